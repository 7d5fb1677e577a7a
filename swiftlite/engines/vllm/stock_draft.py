"""Write and check the folder `draft/` of an export, from which vLLM drafts, mostly without swiftlite's plugin.

    config.json                   selects one of vLLM's draft classes
    generation_config.json        that of a drafter that was published with one
    model.safetensors, its index  the head or the drafter with the names of this class
    model-mtp.safetensors         the same with the names of its family, for training and other engines

    vllm serve HF --speculative-config '{"method": "mtp", "model": "HF/draft", "num_speculative_tokens": 1}'

The classes for heads are in `families/serving/stock.py`. Other drafters (`families/drafters.py`) have the method of
their kind. The weights of the trunk are in files that vLLM's own trunk classes read, because they refuse tensors of
heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from swiftlite.base.heads import DEPTH_KEY, DRAFTER_KEY, MTP, OWN_GENERATION_KEY, Heads, kind_of
from swiftlite.base.json_file import read_json
from swiftlite.bridge.hf_config import DRAFT_FOLDER, HEADS_FILE, read_config
from swiftlite.bridge.rejoin import joined, separated
from swiftlite.bridge.rows import HfConfig
from swiftlite.bridge.tensors import INDEX_NAME, SINGLE_NAME, Checkpoint
from swiftlite.families import dflash
from swiftlite.families.family import Family
from swiftlite.families.resolved import HfModel
from swiftlite.families.serving import stock

_OF_TRUNK = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "dtype", "torch_dtype"),
)
"""Keys of the trunk's config.json that that of the heads has as well."""


def draft_folder(model: HfModel) -> Path | None:
    """Return the folder from which vLLM drafts, without swiftlite's plugin unless the drafter needs it; None if the
    model has none."""
    if (model.directory / HEADS_FILE).is_file():
        return model.directory / DRAFT_FOLDER
    return None


def write_draft(directory: Path, family: Family) -> None:
    """Write the folder, except for `HEADS_FILE`, which the other files are made from.

    Args:
        directory: directory of the model, with config.json.
        family: family of the model.
    """
    hf_config, folder = read_config(directory), directory / DRAFT_FOLDER
    tensors = _tensors(directory, family, hf_config)
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})
    contents = {INDEX_NAME: {"metadata": {}, "weight_map": _index(tensors)}, "config.json": _config(family, hf_config)}
    if generation := (hf_config.get(DRAFTER_KEY) or {}).get(OWN_GENERATION_KEY):
        contents["generation_config.json"] = generation
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def draft_problems(model: HfModel) -> list[str]:
    """Return a problem (one line) for each difference between the folder and what `write_draft` writes."""
    folder = draft_folder(model)
    if folder is None:
        return []
    try:
        tensors = _tensors(model.directory, model.family, model.config)
        compared = {
            f"{DRAFT_FOLDER}/{SINGLE_NAME}": (load_file(folder / SINGLE_NAME), tensors),
            f"{DRAFT_FOLDER}/{INDEX_NAME}": (read_json(folder / INDEX_NAME)["weight_map"], _index(tensors)),
            f"{DRAFT_FOLDER}/config.json": (read_json(folder / "config.json"), _config(model.family, model.config)),
            "config.json": (model.config, trunk_config(model.family, model.config)),
        }
    except Exception as error:  # also those of the safetensors package
        return [f"{DRAFT_FOLDER}/ cannot be read: {error}"]
    problems = []
    for file, (found, wanted) in compared.items():
        differing = [key for key in wanted if key not in found or not _are_equal(found[key], wanted[key])]
        reference = "the model" if file.endswith("config.json") else HEADS_FILE
        problems += [f"{file}: {key} does not match {reference}" for key in differing]
    return problems


def _are_equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    return found == wanted


def _index(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the file of each tensor, without `HEADS_FILE`, so that vLLM does not read it."""
    return dict.fromkeys(tensors, SINGLE_NAME)


def trunk_config(family: Family, hf_config: HfConfig) -> dict[str, Any]:
    """Return the keys of the trunk's config.json that the draft class reads."""
    if kind_of(hf_config) != MTP:
        return {}
    return stock.trunk_config(family, hf_config)


def _config(family: Family, hf_config: HfConfig) -> dict[str, Any]:
    """Return the config.json of the heads."""
    if own_config := family.drafter(hf_config).own_config:
        return own_config(family, hf_config)
    own = stock.trunk_config(family, hf_config) | {DEPTH_KEY: Heads.from_config(hf_config).layers}
    copied = {key: hf_config[key] for key in _OF_TRUNK if key in hf_config}
    return {**copied, **stock.class_of(family, hf_config).selected_by, **own}


def _tensors(directory: Path, family: Family, hf_config: HfConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of the head with the names of vLLM's class."""
    stored = load_file(directory / HEADS_FILE)
    drafter = family.drafter(hf_config)
    if drafter.needs_plugin:
        return stored  # its class selects the tokens of a draft vocabulary
    stored = {key.removeprefix(drafter.own_prefix): tensor for key, tensor in stored.items()}
    if kind_of(hf_config) != MTP:
        return _tensors_of_vocab(directory, family, hf_config, stored)
    rows = {row.mcore: row for row in stock.class_of(family, hf_config).rows(family, hf_config)}
    factors = stock.factors(family, hf_config)
    # From a family's tensors to those of vLLM's class through the Megatron parameter, which both describe with rows.
    tensors: dict[str, torch.Tensor] = {}
    for row in family.head_rows(hf_config, 0):
        for key, tensor in separated(rows[row.mcore], joined(row, stored.__getitem__)).items():
            # Factors that vLLM's class lacks, such as that of the residual, become part of the weights.
            tensors[key] = (tensor.float() * factors.get(key, 1.0)).to(tensor.dtype)
    return tensors


def _tensors_of_vocab(
    directory: Path, family: Family, hf_config: HfConfig, stored: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a drafter. With a draft vocabulary, they include an output layer of rows of that of the
    trunk, and for each row the difference between the token and the row's number (d2t); a Markov head has these rows.
    """
    tokens = torch.tensor(Heads.from_config(hf_config).draft_vocab, dtype=torch.int64)
    if not len(tokens):
        return stored
    outside = family.outside(hf_config)
    with Checkpoint(directory) as checkpoint:
        output = checkpoint.read(outside.hf_embedding if outside.is_tied else outside.hf_output_layer)
    # vLLM adds d2t to the number of a row: rows for the tokens 3, 7 and 8 have the differences 3, 6 and 6.
    drafted = {"lm_head.weight": output[tokens], "d2t": tokens - torch.arange(len(tokens))}
    if dflash.MARKOV_OUTPUT in stored:
        drafted[dflash.MARKOV_OUTPUT] = stored[dflash.MARKOV_OUTPUT][tokens]
    return {**stored, **drafted}
