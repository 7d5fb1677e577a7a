"""Check that the files and the heads of a Hugging Face model are complete before an engine reads them.

If tensors of heads are missing, engines silently drop heads or leave their weights random. The generated text is then
still correct, but acceptance drops.
"""

from collections.abc import Collection
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger
from swiftlite.bridge.audit import mtp_keys
from swiftlite.bridge.binding import compare_shapes
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.rows import Shape
from swiftlite.bridge.tensors import SINGLE_NAME, Checkpoint, scan, some
from swiftlite.engines.info import EngineInfo
from swiftlite.families.resolved import HfModel, resolve


def resolve_served(name: str | Path) -> HfModel:
    """Resolve a model for an engine.

    Raises:
        UserError: the model is not available or not supported (`resolve`), or a file is damaged.
    """
    model = resolve(name)
    check_files(model)
    return model


def check_files(model: HfModel) -> None:
    """Read the headers of all safetensors files to find damaged files.

    Raises:
        UserError: a file is damaged, or the directory contains adapters.
    """
    with Checkpoint(model.directory, format_of(model.config)):
        pass


def require_heads(model: HfModel, kinds: Collection[str] = (MTP,)) -> None:
    """Check that the files contain exactly the tensors of the MTP heads, or the drafter, that config.json declares.

    Args:
        kinds: kinds of drafters with which the engine drafts.

    Raises:
        UserError: config.json declares no heads, or tensors are missing or unexpected, or the engine does not draft
            with this kind of drafter.
    """
    if model.heads.layers == 0:
        raise UserError(
            f"--speculative mtp requires MTP heads, but {model.directory / 'config.json'} declares none",
            "train heads (swiftlite megatron sft --mtp_num_layers 1 ...), or remove --speculative",
        )
    if model.heads.kind not in kinds:
        raise UserError(
            f"{model.directory / 'config.json'} declares the drafter {model.heads.kind!r}, with which this engine does "
            "not draft",
            "use --infer_backend vllm, or serve the trunk alone: export the run with --mtp strip",
        )
    with Checkpoint(model.directory, format_of(model.config)) as checkpoint:
        found = {key: entry.shape for key, entry in checkpoint.entries.items()}
    wanted: dict[str, Shape] = {}
    copies: set[str] = set()
    for head in range(model.heads.layers):
        for row in model.family.head_rows(model.config, head):
            wanted.update(row.hf)
        # Files may have copies of the trunk's tensors in heads, which engines do not need.
        copies.update(model.family.copies(model.config, head))
    found_in_heads = {key: found[key] for key in mtp_keys(found, model.family, model.config)}
    problems = compare_shapes(wanted, found_in_heads, copies)
    if problems:
        raise UserError(
            f"--model {model.directory}: tensors do not match the {model.heads.layers} MTP heads in config.json:\n  "
            + "\n  ".join(some(problems)),
            "export the run again, or download the model again",
        )


def check_draft_folder(folder: Path) -> None:
    """Check that a directory from which an engine drafts has config.json and tensors. Only headers are read.

    Raises:
        UserError: a file is missing or damaged.
    """
    hint = "export the run again: swiftlite export --to_hf"
    for name in ("config.json", SINGLE_NAME):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing", hint)
    try:
        read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}", hint) from None
    _, problems = scan(folder)
    if problems:
        raise UserError("\n  ".join([f"{folder} cannot be read:", *some(problems)]), hint)


def fed_otherwise(model: HfModel, info: EngineInfo) -> str:
    """Return a description of the inputs of heads that differ between the engine and training; empty if none differ."""
    if not model.heads.layers or model.heads.kind != MTP:  # the engine reads the settings of other drafters
        return ""
    trained = model.family.drafting_of(model.config, model.heads)
    difference = trained.difference(info.convention_for(model.family).drafting)
    if not difference:
        return ""
    training = "sft without --draft_for"
    if model.heads.drafting:
        training = "the training of these heads"
    return (
        f"{info.label} uses other head inputs than {training}: {difference}. Heads trained with "
        f"sft --draft_for {info.name} have a higher acceptance"
    )


def log_fed_otherwise(model: HfModel, info: EngineInfo) -> None:
    """Log a warning if the inputs of heads differ between the engine and training."""
    text = fed_otherwise(model, info)
    if text:
        logger.warning("%s", text)


def log_untrained_drafts(model: HfModel, num_tokens: int | None) -> None:
    """Log a line if more tokens are drafted than the heads were trained for.

    Args:
        num_tokens: number of draft tokens per step; None means the number that the heads were trained for.
    """
    if (num_tokens or 0) > model.heads.drafts > 0:
        logger.info(
            "drafting %d tokens with heads trained for %d: acceptance is lower (sft --mtp_unroll trains more)",
            num_tokens,
            model.heads.drafts,
        )
