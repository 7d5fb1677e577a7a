"""Write models of any size in an instant: weights files with a header and, in place of data, a hole that the file
system reads as zeros."""

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

from commands import make_model
from result import Settings
from trainees import shape

from swiftlite import families
from swiftlite.base.heads import depth_key

ITEM_BYTES = 2
"""Of bfloat16."""


def make_sparse(settings: Settings, name: str) -> Path:
    """Return a model of a shape in `trainees.SHAPES` with one MTP head, whose weights are zeros.

    Its tokenizer is that of `make_model`, so an engine answers text; vLLM draws weights with `load_format: dummy`.
    """
    small, directory = settings.work_dir / "small", settings.work_dir / f"sparse-{name}"
    if not (small / "config.json").exists():
        make_model(small)
    shutil.copytree(small, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    of_small, of_shape = json.loads((small / "config.json").read_text()), shape(name, settings.tiny)
    config = of_small | of_shape
    config.pop("layer_types", None)  # one for each layer of the small model
    vocab_size = max(of_small["vocab_size"], of_shape["vocab_size"])  # tiny shapes have fewer tokens than the tokenizer
    config |= {"vocab_size": vocab_size, depth_key(config): 1}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_holes(directory / "model.safetensors", config)
    return directory


def write_holes(file: Path, config: dict[str, Any]) -> None:
    """Write a safetensors file with the tensors of a model and its head."""
    header: dict[str, Any] = {}
    end = 0
    for row in families.get(config).rows(config, 1):
        for key, size in row.hf.items():
            start, end = end, end + ITEM_BYTES * math.prod(size)
            header[key] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with file.open("wb") as written:
        written.write(struct.pack("<Q", len(content)) + content)
        written.truncate(8 + len(content) + end)
