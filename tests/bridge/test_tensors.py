"""Test files against the safetensors package: each reads what the other wrote. Damaged files must be rejected."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.bridge import tensors
from swiftlite.bridge.tensors import Checkpoint, ShardedFiles, describe, scan
from tests.messages import has_line, mentions, naming

TENSORS = {
    "norm": torch.randn(5),
    "layer.a": torch.randn(6, 4).bfloat16(),
    "layer.b": torch.arange(24).reshape(2, 3, 4),
    "scale": torch.randn(()),
    "none": torch.empty(0, 3),
    "half": torch.randn(3).half(),
    "flags": torch.tensor([True, False, True]),
}


def write_sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """Write several files with the safetensors package, and their index."""
    directory.mkdir(exist_ok=True)
    for file, content in shards.items():
        save_file(content, directory / file)
    weight_map = {key: file for file, content in shards.items() for key in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def two_shards(directory: Path) -> Path:
    return write_sharded(
        directory,
        {
            "model-00001-of-00002.safetensors": {"a": torch.ones(4, 4), "b": torch.ones(2)},
            "model-00002-of-00002.safetensors": {"c": torch.ones(3)},
        },
    )


def raw_file(path: Path, header: dict | bytes, data: bytes = b"") -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def test_reads_what_safetensors_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.entries.keys() == TENSORS.keys()
        for key, expected in TENSORS.items():
            assert torch.equal(checkpoint.read(key), expected)
            assert checkpoint.read(key).dtype == expected.dtype


def test_reads_across_shards(tmp_path):
    one, other = {"a": TENSORS["layer.a"]}, {"b": TENSORS["layer.b"]}
    with Checkpoint(write_sharded(tmp_path, {"x-1.safetensors": one, "x-2.safetensors": other})) as checkpoint:
        assert torch.equal(checkpoint.read("a"), TENSORS["layer.a"])
        assert torch.equal(checkpoint.read("b"), TENSORS["layer.b"])


@st.composite
def boxes(draw) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Draw a shape of up to three axes, and a slice of each axis."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    borders = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return shape, tuple(slice(*one) for one in borders)


# One directory serves all examples; each writes its own file over it.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(box=boxes(), chunk_bytes=st.sampled_from([1, 7, 32, 10**6]))
def test_any_slice_in_chunks_of_any_size(tmp_path, box, chunk_bytes):
    shape, index = box
    whole = torch.randn(shape)
    save_file({"x": whole, "y": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensors, "_CHUNK_BYTES", chunk_bytes)
        with Checkpoint(tmp_path) as checkpoint:
            for dtype in (torch.float32, torch.float64):  # straight into the tensor, and through a buffer
                target = torch.empty_like(whole[index], dtype=dtype)
                checkpoint.read_into(target, "x", index)
                assert torch.equal(target, whole[index].to(dtype))
            assert torch.equal(checkpoint.read("x"), whole)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").mkdir()
        files = ShardedFiles(tmp_path / "out", {"x": (torch.float32, shape), "y": (torch.float32, (3,))}, 10**9)
        files.create()
        files.write("x", index, whole[index])
        files.flush()
        files.publish()
    expected = torch.zeros(shape)
    expected[index] = whole[index]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["x"], expected)
    assert torch.equal(written["y"], torch.zeros(3))


def test_file_that_shrinks_while_it_is_read(tmp_path):
    save_file({"x": torch.ones(100)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with checkpoint, pytest.raises(UserError, match=naming("model.safetensors:")):
        checkpoint.read("x")


def test_reads_tensors_that_are_not_aligned(tmp_path):
    """The format allows any header length. Here floats begin at an odd byte."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)
    assert (8 + len(header)) % 2 == 1
    raw_file(tmp_path / "model.safetensors", header, struct.pack("<2f", 1.5, -2.0))
    assert Checkpoint(tmp_path).read("x").tolist() == [1.5, -2.0]


def test_describe_is_json(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    described = json.loads(json.dumps(describe(tmp_path)))
    assert described["layer.a"] == {"dtype": "bfloat16", "shape": [6, 4]}
    assert described.keys() == TENSORS.keys()


def write_all(out_dir: Path, max_shard_bytes: int) -> ShardedFiles:
    files = ShardedFiles(
        out_dir, {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in TENSORS.items()}, max_shard_bytes
    )
    files.create()
    for key, tensor in TENSORS.items():
        files.write(key, (slice(None),) * tensor.dim(), tensor)
    files.flush()
    return files


@pytest.mark.parametrize("max_shard_bytes", [1, 64, 100, 10**9])
def test_safetensors_reads_what_we_wrote(tmp_path, max_shard_bytes):
    files = write_all(tmp_path, max_shard_bytes)
    files.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files.files)
    shards = sorted(tmp_path.glob("*.safetensors"))
    loaded = {}
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers refuses a file without it
        found = load_file(shard)
        assert sum(tensor.nbytes for tensor in found.values()) <= max_shard_bytes or len(found) == 1
        loaded |= found
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[key], TENSORS[key]) and loaded[key].dtype == TENSORS[key].dtype for key in TENSORS)
    if max_shard_bytes == 10**9:
        assert [shard.name for shard in shards] == ["model.safetensors"]
    else:
        of = len(shards)  # transformers' names
        assert [shard.name for shard in shards] == [f"model-{n:05d}-of-{of:05d}.safetensors" for n in range(1, of + 1)]
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert all(key in load_file(tmp_path / file) for key, file in index["weight_map"].items())
    entries, problems = scan(tmp_path)
    assert problems == []
    # As the package itself places them: others read tensors where they lie.
    assert [key for key, entry in entries.items() if entry.offset % entry.dtype.itemsize] == []


@pytest.mark.parametrize(("max_shard_bytes", "num_files"), [(8, 2), (7, 4), (9, 2), (16, 1)])
def test_files_are_filled_to_the_last_byte(tmp_path, max_shard_bytes, num_files):
    tensors = dict.fromkeys("abcd", (torch.uint8, (4,)))
    files = ShardedFiles(tmp_path, tensors, max_shard_bytes)
    assert len({entry.file for entry in files.entries.values()}) == num_files


def test_nothing_has_its_name_before_publish(tmp_path):
    write_all(tmp_path, 64)
    assert not list(tmp_path.glob("model*"))


def test_files_are_on_disk_before_they_have_their_names(tmp_path, synced):
    """Files are flushed before they are renamed, because a power failure could otherwise leave empty files."""
    files = write_all(tmp_path, 64)
    shards = files.files[:-1]
    assert {path.name for path in synced} == {f".{name}.incomplete" for name in shards}
    synced.clear()
    files.publish()
    assert [path.name for path in synced[: len(shards)]] == [f".{name}.incomplete" for name in shards]
    assert synced[-1] == tmp_path


def test_discard_leaves_nothing(tmp_path):
    write_all(tmp_path, 64).discard()
    assert not list(tmp_path.iterdir())


def test_full_disk_shows_before_the_first_tensor(tmp_path):
    """A limit on the file size replaces the full disk, because both make the reservation fail."""
    files = ShardedFiles(tmp_path, {"x": (torch.float32, (1000, 1000))}, 10**9)
    handler, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, limit[1]))
        with pytest.raises(UserError, match=naming("model.safetensors 0.00 GB")):
            files.create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


RESERVE = """
import sys
from pathlib import Path
import torch
from swiftlite.bridge.tensors import ShardedFiles
from tests.no_fallocate import forbid_fallocate
directory = Path(sys.argv[1])
if not forbid_fallocate():
    sys.exit("seccomp is not available")
files = ShardedFiles(directory, {"x": (torch.uint8, (64 << 20,))}, 10**9)
files.create()
(file,) = directory.iterdir()
print(file.stat().st_size, file.stat().st_blocks * 512)
files.write("x", (slice(None),), torch.full((64 << 20,), 7, dtype=torch.uint8))
files.flush()
files.publish()
"""


def test_a_file_system_that_cannot_allocate_is_not_written_block_by_block(tmp_path):
    """On NFS 3, glibc would write a byte into each block while all other ranks wait."""
    done = subprocess.run([sys.executable, "-c", RESERVE, str(tmp_path)], capture_output=True, text=True)
    if "seccomp is not available" in done.stderr:
        pytest.skip("the kernel cannot be told to refuse fallocate here")
    assert done.returncode == 0, done.stderr[-2000:]
    size, allocated = map(int, done.stdout.split())
    assert size > 64 << 20
    assert allocated < 1 << 20
    assert bool((load_file(tmp_path / "model.safetensors")["x"] == 7).all())


def problem_of(directory: Path) -> str:
    with pytest.raises(UserError) as raised:
        Checkpoint(directory)
    return str(raised.value)


def test_no_safetensors(tmp_path):
    absent = problem_of(tmp_path)
    assert mentions(absent, "model.safetensors model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").touch()
    assert mentions(problem_of(tmp_path), "safetensors")
    assert not mentions(absent, "safetensors")
    (tmp_path / "gptq_model-4bit-128g.safetensors").touch()
    assert mentions(problem_of(tmp_path), "gptq_model-4bit-128g.safetensors model.safetensors")


def test_missing_shard(tmp_path):
    (two_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert mentions(problem_of(tmp_path), "model-00002-of-00002.safetensors:")


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_truncated_shard(tmp_path, keep):
    shard = two_shards(tmp_path) / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert mentions(problem_of(tmp_path), f"{shard.name}: {shard.stat().st_size}")


def test_index_and_files_disagree(tmp_path):
    two_shards(tmp_path)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["ghost"] = "model-00002-of-00002.safetensors"
    del index["weight_map"]["b"]
    index_path.write_text(json.dumps(index))
    message = problem_of(tmp_path)
    assert has_line(message, "ghost model-00002-of-00002.safetensors")
    assert has_line(message, "model-00001-of-00002.safetensors b")


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", ""])
def test_index_may_not_point_elsewhere(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert mentions(problem_of(tmp_path), f"model.safetensors.index.json: {file!r}")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}"])
def test_index_is_no_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert mentions(problem_of(tmp_path), "model.safetensors.index.json: safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [-1, -1, 2], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}},
        {"x": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"x": 3},
    ],
)
def test_header_is_not_believed(tmp_path, header):
    raw_file(tmp_path / "model.safetensors", header, b"\0" * 8)
    assert mentions(problem_of(tmp_path), "model.safetensors: safetensors")


def test_unknown_dtype(tmp_path):
    raw_file(tmp_path / "model.safetensors", {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\0")
    assert mentions(problem_of(tmp_path), "model.safetensors: x F4")


def test_header_length_is_not_believed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert mentions(problem_of(tmp_path), "model.safetensors: safetensors 10")


def part(shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "num_bytes", "problem"),
    [
        ({"a": part([2], 0, 8), "b": part([2], 4, 12)}, 12, "b 4 8"),
        ({"a": part([2], 0, 8), "b": part([2], 0, 8)}, 8, "b 0 8"),
        ({"a": part([2], 0, 8), "b": part([2], 12, 20)}, 20, "b 12 8"),
        ({"a": part([2], 4, 12)}, 12, "a 4 0"),
        ({"a": part([2], 0, 8)}, 9, "1"),
        ({"a": part([0], 0, 0), "b": part([2], 0, 8), "c": part([0], 8, 8)}, 8, ""),
    ],
)
def test_what_the_safetensors_package_refuses_is_refused(tmp_path, header, num_bytes, problem):
    path = tmp_path / "model.safetensors"
    raw_file(path, header, b"\0" * num_bytes)
    if not problem:
        assert load_file(path).keys() == scan(tmp_path)[0].keys() == header.keys()
        return
    with pytest.raises(SafetensorError):
        load_file(path)
    assert mentions(problem_of(tmp_path), f"model.safetensors: safetensors {problem}")


def test_a_pipe_is_no_shard(tmp_path):
    os.mkfifo(tmp_path / "model-00001-of-00001.safetensors")
    weight_map = {"a": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert mentions(problem_of(tmp_path), "model-00001-of-00001.safetensors:")


def test_an_index_that_is_nested_for_ever(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert mentions(problem_of(tmp_path), "model.safetensors.index.json: safetensors 100")


def test_a_name_that_would_draw_on_a_terminal(tmp_path):
    save_file({"\x1b[31mevil\nswiftlite: done": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "'\\x1b[31mevil\\nswiftlite: done'" in problem_of(tmp_path)
