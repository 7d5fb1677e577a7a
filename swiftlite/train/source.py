"""`source/` of a run: what the model directory had beside weights, so that a run can be exported on its own."""

import json
import shutil
from pathlib import Path
from typing import Any

from swiftlite.bridge.hf_config import quantization_change, write_patched
from swiftlite.bridge.tensors import describe, write_durably
from swiftlite.errors import UserError
from swiftlite.families.family import Family
from swiftlite.heads import Heads

TENSORS_FILE = "tensors.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def write_source(
    hf_dir: Path,
    run_dir: Path,
    family: Family,
    hf_config: dict[str, Any],
    heads: Heads,
    graft_from: str | Path | None = None,
) -> Path:
    """Copy every small file of the model directory, and note the name, dtype and shape of every tensor.

    config.json is copied with the run's heads, and without quantisation, which exports do not have;
    nothing else in it changes.

    Args:
        graft_from: the model that the heads came from; their dtypes are noted too.

    Raises:
        UserError: the directory cannot be made.
    """
    source = run_dir / "source"
    try:
        source.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {run_dir} cannot be made: {error.strerror}", "name a place you may write"
        ) from None
    for path in sorted(hf_dir.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and path.name != "config.json":
            shutil.copy2(path, source / path.name)
    changes = heads.config_change(hf_config) | quantization_change(hf_config)
    write_patched(hf_dir, source, changes)
    tensors = describe(hf_dir) | (describe_heads(graft_from, family, hf_config) if graft_from else {})
    write_durably(source / TENSORS_FILE, json.dumps(tensors, indent=1).encode())
    return source


def describe_heads(hf_dir: str | Path, family: Family, hf_config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Dtype and shape of each tensor of the MTP heads."""
    return {key: tensor for key, tensor in describe(Path(hf_dir)).items() if family.is_mtp(hf_config, key)}


def source_dtypes(source: Path) -> dict[str, str]:
    """Precision of each tensor of the model that the run started from, by HF name."""
    tensors = json.loads((source / TENSORS_FILE).read_text())
    return {name: tensor["dtype"] for name, tensor in tensors.items()}
