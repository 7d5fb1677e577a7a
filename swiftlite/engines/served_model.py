"""A Hugging Face directory as an engine is about to read it: family, MTP depth, and whether the heads are whole.

Engines drop or invent MTP tensors in silence, and the text stays right: only the acceptance falls. So the files are
checked here, before any engine starts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite import families
from swiftlite.bridge.audit import mtp_keys
from swiftlite.bridge.binding import compare_shapes
from swiftlite.bridge.encoding.index import encoding_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.rows import Shape
from swiftlite.bridge.tensors import Checkpoint, some
from swiftlite.engines.info import EngineInfo
from swiftlite.errors import UserError
from swiftlite.families import Family
from swiftlite.heads import Heads
from swiftlite.hub.model import local_model
from swiftlite.log import logger


@dataclass(frozen=True)
class ServedModel:
    """A model directory that exists and is of a known family.

    Attributes:
        directory: config.json, safetensors, tokenizer.
        hf_config: content of config.json.
        heads: the MTP heads that config.json promises.
    """

    directory: Path
    hf_config: dict[str, Any]
    family: Family
    heads: Heads


def read_model(name: str | Path) -> ServedModel:
    """Look at a model without reading a tensor.

    Args:
        name: a directory, or what `local_model` makes one of.

    Raises:
        UserError: no Hugging Face model there (a training run has a message of its own), an unknown family, or a file
            that is damaged, which engines report by a traceback.
    """
    directory = local_model(str(name))
    if not directory.is_dir():
        raise UserError(f"--model {directory} is not a directory", "give the directory of a Hugging Face model")
    is_checkpoint = (directory.parent / "args.json").is_file() and not (directory / "config.json").is_file()
    if (directory / "args.json").is_file() or is_checkpoint:
        raise UserError(
            f"--model {directory} is a training run, not a Hugging Face model",
            f"convert it first: swiftlite export --to_hf --model {directory} --output_dir DIR",
        )
    hf_config = read_config(directory)
    family = families.get(hf_config, directory)
    with Checkpoint(directory, encoding_of(hf_config)):
        pass
    return ServedModel(directory, hf_config, family, Heads.from_config(hf_config))


def require_heads(model: ServedModel) -> None:
    """Make sure that drafting has what it needs: every tensor of every promised MTP head, and no other.

    Raises:
        UserError: no head is promised, or the tensors are not those that config.json promises.
    """
    if model.heads.layers == 0:
        raise UserError(
            f"--speculative mtp: {model.directory / 'config.json'} promises no MTP heads",
            "train some (swiftlite megatron sft --mtp_num_layers 1 ...), or leave --speculative out",
        )
    with Checkpoint(model.directory, encoding_of(model.hf_config)) as checkpoint:
        found = {key: entry.shape for key, entry in checkpoint.entries.items()}
    wanted: dict[str, Shape] = {}
    copies: set[str] = set()
    for head in range(model.heads.layers):
        for row in model.family.head_rows(model.hf_config, head):
            wanted.update(row.hf)
        copies.update(model.family.mtp.copies(model.hf_config, head))
    found_in_heads = {key: found[key] for key in mtp_keys(found, model.family, model.hf_config)}
    problems = compare_shapes(wanted, found_in_heads, copies)
    if problems:
        raise UserError(
            f"{model.directory}: config.json promises {model.heads.layers} MTP heads, the tensors are others:\n  "
            + "\n  ".join(some(problems)),
            "export the run again; an engine would draft with random numbers and accept nothing",
        )


def fed_otherwise(model: ServedModel, info: EngineInfo) -> str:
    """What an engine feeds the heads otherwise than training did, in words; "" where nothing."""
    trained = model.family.mtp.drafting_of(model.heads)
    difference = trained.difference(info.convention_for(model.family).drafting)
    if not difference or not model.heads.layers:
        return ""
    who = "these heads were trained" if model.heads.drafting else "sft trains heads without --draft_for"
    return (
        f"{info.label} feeds the heads otherwise than {who}: {difference}. It accepts fewer of their drafts "
        f"than of heads that sft --draft_for {info.name} has trained"
    )


def log_fed_otherwise(model: ServedModel, info: EngineInfo) -> None:
    """Log it when an engine feeds the heads otherwise than training did."""
    text = fed_otherwise(model, info)
    if text:
        logger.warning("%s", text)


def log_untrained_drafts(model: ServedModel, num_tokens: int | None) -> None:
    """Log it when more tokens are to be drafted than the heads were trained for; None is as many as they were."""
    if (num_tokens or 0) > model.heads.drafts > 0:
        logger.info(
            "drafting %d tokens with heads that were trained for %d: the last one goes on from its own state, so fewer "
            "are accepted at each further position (sft --mtp_unroll trains it for that)",
            num_tokens,
            model.heads.drafts,
        )
