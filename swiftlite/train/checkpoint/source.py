"""Write the directory `source/` of a run: a copy of the model directory without weights.

Exports read this copy, not the model directory.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save

from swiftlite.acceptance.report import ACCEPTANCE_FILE
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import MODELOPT_FILE, TENSORS_FILE, quantization_change, write_patched
from swiftlite.bridge.rows import shapes_of
from swiftlite.bridge.tensors import Checkpoint, describe
from swiftlite.families.resolved import HfModel

CARRIED_FILE = "carried.safetensors"
"""File with the parts of the source model other than the language model, such as a vision tower, if there are any."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def write_source(hf_model: HfModel, run_dir: Path, heads: Heads, graft_from: HfModel | None = None) -> Path:
    """Copy every small file of the model directory, and record the dtype and shape of every tensor.

    The copy of config.json declares the heads of the run, and has no quantization, because exports are not quantized.
    Tensors of a drafter that the run removes are not recorded: without its declaration, they would be the trunk's. New
    parameters of the trunk are recorded with its usual dtype.

    Args:
        graft_from: the model that the heads were copied from, whose head tensors are recorded too; None without such a
            model.

    Raises:
        UserError: the directory cannot be created, or a file is a link that points outside of the model.
    """
    source = run_dir / "source"
    check_model_links(hf_model.directory)
    try:
        source.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {run_dir} cannot be created: {error.strerror}", "use a writable directory"
        ) from None
    for path in small_files(hf_model.directory):
        # config.json is written below; the other describes a quantization, which exports do not have.
        if path.name not in ("config.json", MODELOPT_FILE):
            shutil.copy2(path, source / path.name)
    changes = hf_model.family.config_with(hf_model.config, heads) | quantization_change(hf_model.config)
    write_patched(hf_model.directory, source, changes)
    tensors = describe_tensors(hf_model, graft_from)
    if heads.kind != hf_model.heads.kind:
        tensors = {key: each for key, each in tensors.items() if not hf_model.family.is_mtp(hf_model.config, key)}
    [(dtype, _)] = Counter(dtypes_of(tensors).values()).most_common(1)
    new = shapes_of(row for row in hf_model.family.rows(hf_model.config, 0) if row.can_be_new)
    # The entries of files replace those of new parameters: a model that was exported before has them.
    tensors = {key: {"dtype": dtype, "shape": list(shape)} for key, shape in new.items()} | tensors
    atomic_write(source / TENSORS_FILE, json.dumps(tensors).encode())
    _write_carried(hf_model, source)
    return source


def _write_carried(hf_model: HfModel, source: Path) -> None:
    with Checkpoint(hf_model.directory, format_of(hf_model.config)) as checkpoint:
        keys = [key for key in checkpoint.entries if hf_model.family.is_carried(hf_model.config, key)]
        if keys:
            tensors = {key: checkpoint.read(key, torch.bfloat16) for key in keys}
            atomic_write(source / CARRIED_FILE, save(tensors))


def carried_file(source: Path) -> Path | None:
    """Return the file with the source model's parts other than the language model, if it exists."""
    path = source / CARRIED_FILE
    if not path.exists():
        return None
    return path


def describe_tensors(hf_model: HfModel, graft_from: HfModel | None = None) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor of a model directory, by HF name.

    Args:
        graft_from: model whose heads replace those of `hf_model`.
    """
    tensors = describe(hf_model.directory)
    if not graft_from:
        return tensors
    return with_heads_of(hf_model, tensors, graft_from)


def with_heads_of(
    hf_model: HfModel, tensors: Mapping[str, dict[str, Any]], graft_from: HfModel
) -> dict[str, dict[str, Any]]:
    """Return the dtypes and shapes in `tensors`, with the MTP heads replaced by those of `graft_from`."""
    trunk = {key: tensor for key, tensor in tensors.items() if not hf_model.family.is_mtp(hf_model.config, key)}
    others = describe(graft_from.directory)
    return trunk | {key: tensor for key, tensor in others.items() if hf_model.family.is_mtp(hf_model.config, key)}


def dtypes_of(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the dtype of each tensor, by HF name."""
    return {key: tensor["dtype"] for key, tensor in tensors.items()}


def source_tensors(source: Path) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor of the model that the run started from, by HF name.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = source / TENSORS_FILE
    try:
        tensors = TypeAdapter(dict[str, dict[str, Any]]).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", _RESTORE) from None
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {error.errors()[0]['msg']}", _RESTORE) from None
    if not tensors:
        raise UserError(f"{path} is damaged: it lists no tensors", _RESTORE)
    for key, tensor in tensors.items():
        dtype = tensor.get("dtype")
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise UserError(f"{path} is damaged: {key} has no dtype", _RESTORE)
    return tensors


_RESTORE = "restore it; megatron sft --resume writes it again from --model"


def check_source(run_dir: Path) -> None:
    """Check that no link in source/ points outside of the run, because an export copies these files.

    Raises:
        UserError: a link points outside, or source/ contains something other than files.
    """
    source = run_dir / "source"
    try:
        entries = sorted(source.iterdir())
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}", _RESTORE) from None
    for path in (source, *entries):
        _check_link(path, [run_dir.resolve()], "the run")
    for path in entries:
        if not path.is_file():
            raise UserError(f"{path} is not a file, and no run created it", "delete it")


def check_model_links(hf_dir: Path) -> None:
    """Check that no small file is a link that points out of the model's directory.

    Runs and exports would copy its target.

    In the Hugging Face cache, the files of models--NAME/snapshots/REVISION are links to models--NAME/blobs; these are
    allowed.

    Raises:
        UserError: a file is such a link.
    """
    directory = hf_dir.resolve()
    homes = [directory]
    repository = directory.parent.parent
    if directory.parent.name == "snapshots" and repository.name.startswith("models--"):
        homes.append(repository / "blobs")
    for path in small_files(hf_dir):
        _check_link(path, homes, "the model's directory")


def small_files(hf_dir: Path) -> list[Path]:
    """Return all files of a model except weights, and acceptance.json, which contains measurements of these weights."""
    files = (path for path in sorted(hf_dir.iterdir()) if path.is_file() and path.name != ACCEPTANCE_FILE)
    return [path for path in files if path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json")]


def _check_link(path: Path, homes: Sequence[Path], name: str) -> None:
    """Check that a path does not point outside of the directories `homes`.

    Without this check, the author of the directory could cause any file of this machine to be copied into an export.

    Args:
        homes: absolute paths without links.

    Raises:
        UserError: the path is a link that points outside of all `homes`.
    """
    if not any(path.resolve().is_relative_to(home) for home in homes):
        raise UserError(f"{path} links to {path.resolve()}, outside of {name}", "replace the link with the file")
