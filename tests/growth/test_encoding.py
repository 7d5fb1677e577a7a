"""Test adding an encoding: tensor-parallel ranks read and write it, and it is exported.

A tensor `w` of int8 codes has a factor for every few rows in `w_scale`. Three parts are added: the encoding, a check of
its settings in config.json, and a line for each in `bridge/encoding/`. Nothing else in the package needs a change.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge import tensors as files
from swiftlite.bridge.encoding.encoding import EncodedTensor, Format, WritableEncoding
from swiftlite.bridge.encoding.index import FORMATS
from swiftlite.bridge.encoding.quantization import CHECKS
from swiftlite.bridge.entry import Box, Entry
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.tensors import Checkpoint, ShardedFiles
from swiftlite.bridge.transfer import load_hf
from swiftlite.model.build import build_model
from swiftlite.runtime.distributed import session
from tests.growth.unheard import there_and_back
from tests.messages import naming
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

Tensors = dict[str, torch.Tensor]
GROUP = 2
DECLARED = {"quant_method": "int8_rows", "rows_per_factor": GROUP}

# The encoding


@dataclass(frozen=True)
class Int8Rows:
    """Codes [rows, columns] in int8, and factors [rows / group], which are powers of two to avoid repeated rounding."""

    group: int
    axis: int = 0

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        codes = entries[key]
        if codes.dtype is not torch.int8:
            return None
        factors = entries.get(f"{key}_scale")
        if factors is None or factors.shape != (codes.shape[0] // self.group,):
            raise UserError(f"{key} is int8 without factors of its rows")
        return EncodedTensor(key, replace(codes, dtype=torch.float32), self)

    def is_for_serving(self, key: str) -> bool:
        return False

    def entries(self, name: str) -> tuple[str, ...]:
        return name, f"{name}_scale"

    def boxes(self, box: Box) -> tuple[Box, ...]:
        return box, (self._groups(box[0]),)

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        codes, factors = parts
        groups = torch.arange(box[0].start, box[0].stop) // self.group - self._groups(box[0]).start
        return codes.float() * factors[groups][:, None]

    def aligned(self, box: Box, shape: tuple[int, ...]) -> Box:
        groups = self._groups(box[0])
        return range(groups.start * self.group, groups.stop * self.group), range(shape[1])

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = tensor.float().unflatten(0, (-1, self.group))
        factors = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(dim=(1, 2)) / 127)))
        codes = torch.round(groups / factors[:, None, None])
        return codes.flatten(0, 1).to(torch.int8), factors

    def _groups(self, rows: range) -> range:
        return range(rows.start // self.group, (rows.stop - 1) // self.group + 1)


def declared(quantization: Mapping[str, Any]) -> Int8Rows:
    return Int8Rows(quantization["rows_per_factor"])


def problem(quantization: Mapping[str, Any]) -> str:
    return "" if isinstance(quantization.get("rows_per_factor"), int) else "rows_per_factor is not a number"


def make_known() -> None:
    CHECKS["int8_rows"] = problem
    FORMATS["int8_rows"] = declared


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(CHECKS, "int8_rows", problem)
    monkeypatch.setitem(FORMATS, "int8_rows", declared)


# Its checkpoint, as a user would bring it


def is_encoded(key: str) -> bool:
    return key.endswith("_proj.weight")


def is_split_by_rows(key: str) -> bool:
    """Return whether tensor-parallel ranks hold whole rows of the tensor."""
    return is_encoded(key) and not key.endswith(("o_proj.weight", "down_proj.weight"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = make_tiny_hf(
        tmp_path_factory.mktemp("int8"),
        "qwen3",
        depth=1,
        dtype=torch.bfloat16,
        with_tokenizer=True,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    stored: Tensors = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        if is_encoded(key):
            stored[key], stored[f"{key}_scale"] = Int8Rows(GROUP).write(tensor)
        else:
            stored[key] = tensor
    save_file(stored, directory / "model.safetensors")
    config = read_config(directory) | {"quantization_config": DECLARED}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def decoded(model: Path) -> Tensors:
    """Return the decoded tensors of a model, computed with a simple formula."""
    stored = load_file(model / "model.safetensors")
    numbers = {key: tensor for key, tensor in stored.items() if f"{key}_scale" not in stored}
    for key in stored.keys() - numbers.keys():
        numbers[key] = stored[key].float() * stored[f"{key}_scale"].repeat_interleave(GROUP)[:, None]
    return {key: tensor for key, tensor in numbers.items() if not key.endswith("_scale")}


# What swiftlite does with it


def test_without_its_lines_it_is_refused(model):
    with pytest.raises(UserError, match=naming("quantization_config int8_rows")):
        families.get(read_config(model))


def test_what_config_json_says_of_it_is_checked(model, known):
    with pytest.raises(UserError, match=naming("rows_per_factor")):
        families.get(read_config(model) | {"quantization_config": {"quant_method": "int8_rows"}})


def test_a_slice_reads_its_own_bytes(tmp_path, monkeypatch):
    codes, factors = Int8Rows(GROUP).write(torch.randn(8, 5))
    save_file({"w": codes, "w_scale": factors}, tmp_path / "model.safetensors")
    counts = []
    read = os.preadv

    def counted(descriptor: int, buffers: list, offset: int) -> int:
        counts.append(read(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    format: Format = Int8Rows(GROUP)
    with Checkpoint(tmp_path, format) as checkpoint:
        checkpoint.read_into(target := torch.empty(2, 3), "w", (slice(3, 5), slice(1, 4)))
    assert sum(counts) == 2 * 3 + 2 * factors.itemsize  # rows 3 and 4 are of two groups
    assert torch.equal(target, (codes.float() * factors.repeat_interleave(GROUP)[:, None])[3:5, 1:4])


@pytest.mark.parametrize("chunk_bytes", [1, 15, 10**6])
def test_slices_of_whole_blocks_are_written(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    tensor = torch.randn(8, 5)
    encoding: WritableEncoding = Int8Rows(GROUP)
    out = ShardedFiles(tmp_path, {"w": (torch.float32, (8, 5))}, 10**9, {"w": encoding})
    out.create()
    for rows in (slice(0, 2), slice(2, 8)):
        out.write("w", (rows, slice(None)), tensor[rows])
    for index in ((slice(1, 4), slice(None)), (slice(0, 2), slice(0, 3))):
        with pytest.raises(ValueError, match="w: "):
            out.write("w", index, tensor[index])
    out.flush()
    out.publish()
    codes, factors = Int8Rows(GROUP).write(tensor)
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["w"], codes)
    assert torch.equal(written["w_scale"], factors)


def load_and_save(model: Path, out_dir: Path, tensor_parallel_size: int) -> None:
    """Load the model on all ranks and save it.

    Tensors of which ranks hold whole rows are encoded; all others are plain.
    """
    make_known()
    hf_config = read_config(model)
    family = families.get(hf_config)
    is_single = tensor_parallel_size == 1
    keys = [key for key in decoded(model) if (is_encoded(key) if is_single else is_split_by_rows(key))]
    with session(ParallelLayout(tensor_model_parallel_size=tensor_parallel_size)) as mesh:
        architecture = family.architecture(hf_config)
        chunks = build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))
        load_hf(chunks, model, family, hf_config)
        encodings = dict.fromkeys(keys, Int8Rows(GROUP))
        dtypes = {key: "float32" if is_encoded(key) else "bfloat16" for key in decoded(model)}
        save_hf(chunks, out_dir, family, hf_config, dtypes=dtypes, encodings=encodings, max_shard_bytes=50_000)


@pytest.mark.gloo
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_it_is_read_and_written_slice_by_slice(model, tmp_path, tensor_parallel_size):
    launch(tensor_parallel_size, load_and_save, model, tmp_path / "out", tensor_parallel_size)
    written: Tensors = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    stored, numbers = load_file(model / "model.safetensors"), decoded(model)
    expected: Tensors = {}
    for key, tensor in numbers.items():
        if is_split_by_rows(key) or (is_encoded(key) and tensor_parallel_size == 1):
            expected |= {key: stored[key], f"{key}_scale": stored[f"{key}_scale"]}
        else:
            expected[key] = tensor
    assert written.keys() == expected.keys()
    assert all(written[key].dtype is tensor.dtype for key, tensor in expected.items())
    assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())


@pytest.mark.gloo
def test_the_commands_export_the_numbers(model, tmp_path):
    exported, numbers = there_and_back(make_known, model, tmp_path), decoded(model)
    assert exported.keys() == numbers.keys()
    assert all(torch.equal(exported[key], tensor.bfloat16()) for key, tensor in numbers.items())
    assert "quantization_config" not in read_config(tmp_path / "hf")
