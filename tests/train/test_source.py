"""Test `source/` of a run: unchanged small files, a config with the run's heads, and the names of all tensors."""

import json
import os

import pytest
import torch
from safetensors import safe_open

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.train.checkpoint.source import (
    CARRIED_FILE,
    carried_file,
    check_model_links,
    check_source,
    dtypes_of,
    source_tensors,
    write_source,
)
from tests.messages import naming
from tests.tiny import make_tiny_hf


@pytest.fixture
def hf_dir(tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    (directory / "generation_config.json").write_text('{"top_k": 3}')
    (directory / "pytorch_model.bin").write_bytes(b"weights")
    (directory / "pytorch_model.bin.index.json").write_text("{}")
    (directory / "subdirectory").mkdir()
    return directory


def test_small_files_are_copied_and_weights_are_not(hf_dir, tmp_path):
    source = write_source(resolve(hf_dir), tmp_path / "run", Heads(1))
    assert source == tmp_path / "run" / "source"
    copied = {path.name for path in source.iterdir()}
    assert copied == {path.name for path in hf_dir.iterdir()} - {
        "model.safetensors",
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
        "subdirectory",
    } | {"tensors.json"}
    for name in copied - {"tensors.json"}:
        assert (source / name).read_bytes() == (hf_dir / name).read_bytes(), name


def test_config_tells_of_the_heads_of_the_run_and_of_no_quantization(hf_dir, tmp_path):
    config = json.loads((hf_dir / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (hf_dir / "config.json").write_text(json.dumps(quantized))
    source = write_source(resolve(hf_dir), tmp_path / "run", Heads(1, unroll=3))
    assert json.loads((source / "config.json").read_text()) == {**config, "mtp_unroll": 3}


def test_the_precision_of_every_tensor_is_noted(hf_dir, tmp_path):
    source = write_source(resolve(hf_dir), tmp_path / "run", Heads(1))
    with safe_open(hf_dir / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    expected = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    assert dtypes_of(source_tensors(source)) == expected
    assert set(expected.values()) == {"bfloat16"}


def test_grafted_heads_bring_their_own_precision(hf_dir, tmp_path):
    base = make_tiny_hf(tmp_path / "base", "qwen3", depth=1, dtype=torch.float32)
    source = write_source(resolve(hf_dir), tmp_path / "run", Heads(1), resolve(base))
    found = dtypes_of(source_tensors(source))
    assert {found[name] for name in found if name.startswith("mtp.")} == {"float32"}
    assert {found[name] for name in found if not name.startswith("mtp.")} == {"bfloat16"}


def test_a_place_that_cannot_be_made_is_named(hf_dir, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--output_dir .*file/run.*Not a directory"):
        write_source(resolve(hf_dir), tmp_path / "file" / "run", Heads(1))


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"a": 1}', '{"a": {}}', '{"a": {"dtype": "load"}}', "[" * 100_000]
)
def test_a_list_of_tensors_that_cannot_be_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tensors.json").write_text(content)
    with pytest.raises(UserError, match=naming("tensors.json")) as error:
        source_tensors(tmp_path)
    assert "\n" not in error.value.problem


def test_links_out_of_a_model_are_not_followed(hf_dir, tmp_path):
    """In the Hugging Face cache, however, every file is a link."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    hf_dir.rename(tmp_path / "models--a--b" / "blobs")
    for blob in (tmp_path / "models--a--b" / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    source = write_source(resolve(snapshot), tmp_path / "run", Heads(1))
    assert (source / "tokenizer.json").is_file()
    assert not (source / "tokenizer.json").is_symlink()
    (tmp_path / "secret").write_text("not the model's")
    (snapshot / "leak.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=naming("leak.txt /secret")):
        write_source(resolve(snapshot), tmp_path / "other", Heads(1))


def test_a_directory_that_is_only_called_like_the_cache(hf_dir, tmp_path):
    evil = tmp_path / "snapshots" / "evil"
    evil.parent.mkdir()
    hf_dir.rename(evil)
    (tmp_path / "secret").write_text("not the model's")
    (evil / "leak.txt").symlink_to("../../secret")
    with pytest.raises(UserError, match=naming("leak.txt /secret")):
        check_model_links(evil)
    (evil / "leak.txt").unlink()
    (evil / "config.json").rename(tmp_path / "config.json")
    (evil / "config.json").symlink_to("../../config.json")
    with pytest.raises(UserError, match=naming(f"{evil / 'config.json'} {tmp_path / 'config.json'}")):
        check_model_links(evil)


def test_links_out_of_a_run_are_not_followed(hf_dir, tmp_path):
    source = write_source(resolve(hf_dir), tmp_path / "run", Heads(1))
    (source / "inside.json").symlink_to("config.json")
    check_source(tmp_path / "run")
    (tmp_path / "secret").write_text("not the run's")
    (source / "leak.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=naming("leak.txt /secret")):
        check_source(tmp_path / "run")
    (source / "leak.txt").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(UserError, match=naming(str(source / "pipe"))):
        check_source(tmp_path / "run")
    (source / "pipe").unlink()
    source.rename(tmp_path / "elsewhere")
    source.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=naming(f"{source} {tmp_path / 'elsewhere'}")):
        check_source(tmp_path / "run")


def test_carried_parts_are_found_if_there_are_any(tmp_path):
    assert carried_file(tmp_path) is None
    (tmp_path / CARRIED_FILE).write_bytes(b"")
    assert carried_file(tmp_path) == tmp_path / CARRIED_FILE
