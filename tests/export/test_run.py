"""Test exports in one process: to megatron-core and back bitwise, without heads, with other heads, and failures."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.args.config import write_config
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.saving import save_hf
from swiftlite.data.template import load_tokenizer
from swiftlite.export.run import convert, run
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.runtime.lock import only_run_in
from swiftlite.train.checkpoint.source import describe_tensors, dtypes_of
from swiftlite.train.checkpoint.state import CheckpointState
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf, make_tiny_model, promise, random_mtp_tensors


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)


@pytest.fixture
def converted(hf_dir, mesh, tmp_path) -> Path:
    """Return a run's directory as `--to_mcore` writes it."""
    convert(ExportArgs(model=str(hf_dir), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
    return tmp_path / "run"


@pytest.fixture
def export(converted, mesh, tmp_path) -> Callable[..., Path]:
    """Return a function that runs `--to_hf` with the given options and returns the directory."""

    def export(**options) -> Path:
        usual = {"model": str(converted), "output_dir": str(tmp_path / "exports" / "out"), "to_hf": True}
        convert(ExportArgs(**usual | options), mesh)
        return tmp_path / "exports" / "out"

    return export


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def test_to_megatron_and_back_changes_no_byte(export, hf_dir):
    out = export()
    assert_same(tensors(out), tensors(hf_dir))
    assert {path.name for path in out.iterdir()} == {path.name for path in hf_dir.iterdir()}
    for path in hf_dir.iterdir():
        if path.suffix != ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name


COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def without_copies(hf_dir: Path) -> Path:
    """Return the directory after removing the copies of the trunk's tensors from its heads."""
    kept = {
        key: tensor
        for key, tensor in load_file(hf_dir / "model.safetensors").items()
        if key == "model.embed_tokens.weight" or not key.endswith(COPIES)
    }
    save_file(kept, hf_dir / "model.safetensors", metadata={"format": "pt"})
    return hf_dir


@pytest.mark.parametrize(("family", "has_copies"), [("glm4_moe", True), ("deepseek_v3", False)])
def test_heads_have_the_copies_that_their_source_had(family, has_copies, tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "hf", family, depth=1, with_tokenizer=True)
    if not has_copies:
        without_copies(hf_dir)
    source = hf_dir
    for trip in ("1", "2"):  # what an export left is a source too
        run, out = tmp_path / f"run{trip}", tmp_path / f"out{trip}"
        convert(ExportArgs(model=str(source), output_dir=str(run), to_mcore=True, torch_dtype="float32"), mesh)
        convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
        assert_same(tensors(out), tensors(hf_dir))
        source = out


@pytest.mark.parametrize(("where", "has_copies"), [("to_mcore", True), ("to_hf", False)])
def test_grafted_heads_have_the_copies_of_where_they_come_from(has_copies, where, tmp_path, mesh):
    own = make_tiny_hf(tmp_path / "own", "glm4_moe", depth=1, with_tokenizer=True)
    other = make_tiny_hf(tmp_path / "other", "glm4_moe", depth=1, with_tokenizer=True)
    without_copies(own if has_copies else other)
    run, out = tmp_path / "run", tmp_path / "out"
    graft_early = str(other) if where == "to_mcore" else None
    graft_late = str(other) if where == "to_hf" else None
    of_run = ExportArgs(
        model=str(own), output_dir=str(run), to_mcore=True, torch_dtype="float32", mtp_graft_from=graft_early
    )
    convert(of_run, mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True, mtp_graft_from=graft_late), mesh)
    assert_same(tensors(out), tensors(other))


def test_new_heads_have_copies_as_published_ones_do(tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "hf", "glm4_moe")
    model = resolve(hf_dir)
    chunks, _ = open_model(model, mesh, dtype=torch.float32, heads=Heads(1), mtp_init="random")
    save_hf(chunks, tmp_path / "out", model.family, model.config, dtypes=dtypes_of(describe_tensors(model)))
    heads = {key for key in tensors(tmp_path / "out") if model.family.is_mtp(model.config, key)}
    assert heads == set(random_mtp_tensors(make_tiny_model("glm4_moe"), "glm4_moe", 1))


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_heads_that_nobody_dropped_are_not_lost(family, tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "hf", family, depth=1)
    promise(hf_dir, 0)
    args = ExportArgs(model=str(hf_dir), output_dir=str(tmp_path / "run"), to_mcore=True)
    with pytest.raises(UserError) as refused:
        convert(args, mesh)
    assert "num_nextn_predict_layers" in refused.value.hint
    assert not (tmp_path / "run").exists()
    convert(replace(args, mtp="strip"), mesh)
    assert (tmp_path / "run").exists()


EXACT = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias", "linear_attn.norm.weight")
"""Name endings of tensors that are float32 in 16-bit models."""


def assert_only_exact_are_float32(directory: Path) -> None:
    found = tensors(directory)
    float32 = {key for key, tensor in found.items() if tensor.dtype is torch.float32}
    assert float32 == {key for key in found if key.endswith(EXACT)} != set()
    assert {found[key].dtype for key in found.keys() - float32} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["deepseek_v3", "hy_v3"])
def test_new_heads_have_the_precision_of_the_trunk(family, tmp_path, mesh):
    """A router's bias changes in steps of 0.001, which bfloat16 cannot represent above 0.25."""
    hf_dir = make_tiny_hf(tmp_path / "hf", family, dtype=torch.bfloat16)
    model = resolve(hf_dir)
    chunks, _ = open_model(model, mesh, dtype=torch.bfloat16, heads=Heads(1), mtp_init="random")
    own = dtypes_of(describe_tensors(model))
    save_hf(chunks, tmp_path / "out", model.family, model.config, dtypes=own)
    assert_only_exact_are_float32(tmp_path / "out")
    # As the source has it, where it has it otherwise.
    otherwise = {key: "bfloat16" if key.endswith(EXACT) else dtype for key, dtype in own.items()}
    save_hf(chunks, tmp_path / "otherwise", model.family, model.config, dtypes=otherwise)
    assert {tensor.dtype for tensor in tensors(tmp_path / "otherwise").values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_smaller_precision_spares_what_16_bits_cannot_hold(family, tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "hf", family, depth=1, dtype=torch.float32)
    run = tmp_path / "run"
    convert(ExportArgs(model=str(hf_dir), output_dir=str(run), to_mcore=True), mesh)
    for dtype in ("bfloat16", "float32"):
        out = tmp_path / dtype
        convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True, torch_dtype=dtype), mesh)
    assert_only_exact_are_float32(tmp_path / "bfloat16")
    assert {tensor.dtype for tensor in tensors(tmp_path / "float32").values()} == {torch.float32}


def test_what_a_conversion_leaves_is_a_run(converted, hf_dir):
    assert {path.name for path in converted.iterdir()} == {"source", "checkpoint-0"}
    state = CheckpointState.read(converted / "checkpoint-0")
    assert state == CheckpointState(step=0, mtp_num_layers=1, torch_dtype="bfloat16")
    assert (converted / "source" / "config.json").read_bytes() == (hf_dir / "config.json").read_bytes()


def test_files_are_as_small_as_asked_for(export, hf_dir):
    out = export(max_shard_size_gb=40_000 / 1e9)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert (out / "model.safetensors.index.json").exists()
    assert_same(tensors(out), tensors(hf_dir))


@pytest.mark.parametrize("where", ["to_mcore", "to_hf"])
def test_stripped_heads_leave_no_tensor_and_no_promise(export, hf_dir, mesh, tmp_path, where):
    if where == "to_mcore":
        run = str(tmp_path / "stripped")
        convert(ExportArgs(model=str(hf_dir), output_dir=run, to_mcore=True, mtp="strip"), mesh)
        out = export(model=run)
    else:
        out = export(mtp="strip")
    trunk = {key: tensor for key, tensor in tensors(hf_dir).items() if not key.startswith("mtp.")}
    assert_same(tensors(out), trunk)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("where", ["to_mcore", "to_hf"])
def test_grafted_heads_are_the_other_models(export, hf_dir, mesh, tmp_path, where):
    """The export has two heads in float32; the model had one in bfloat16."""
    base = make_tiny_hf(tmp_path / "base", "qwen3", depth=2, with_tokenizer=True, seed=1)
    if where == "to_mcore":
        run = str(tmp_path / "grafted")
        convert(ExportArgs(model=str(hf_dir), output_dir=run, to_mcore=True, mtp_graft_from=str(base)), mesh)
        out = export(model=run)
    else:
        out = export(mtp_graft_from=str(base))
    found = tensors(out)
    trunk = {key: tensor for key, tensor in tensors(hf_dir).items() if not key.startswith("mtp.")}
    heads = {key: tensor for key, tensor in tensors(base).items() if key.startswith("mtp.")}
    # The checkpoint is bfloat16, as the model is: what came through it is rounded.
    assert_same(found, trunk | {key: tensor.bfloat16().float() for key, tensor in heads.items()})
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 2


def test_another_precision_is_declared(export, hf_dir):
    out = export(torch_dtype="float32")
    assert_same(tensors(out), {key: tensor.float() for key, tensor in tensors(hf_dir).items()})
    before, after = (json.loads((directory / "config.json").read_text()) for directory in (hf_dir, out))
    assert after == before | {"dtype": "float32"}


def test_an_empty_directory_is_taken(export, tmp_path):
    (tmp_path / "exports" / "out").mkdir(parents=True)
    assert (export() / "model.safetensors").exists()


def test_a_link_is_followed(export, tmp_path):
    place = tmp_path / "disk" / "empty"
    place.mkdir(parents=True)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "out").symlink_to(place)
    assert (export() / "model.safetensors").exists()
    assert (tmp_path / "exports" / "out").is_symlink()
    assert [path.name for path in place.parent.iterdir()] == ["empty"]


def test_what_cannot_be_replaced_is_refused_at_once(export, converted, tmp_path):
    """A file may be created there after the options were checked."""
    mine = tmp_path / "exports" / "out" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    for weights in (converted / "checkpoint-0").glob("*.distcp"):
        weights.unlink()  # they are not even looked for
    with pytest.raises(UserError, match=r"--output_dir .*/exports/out.*not empty"):
        export()
    assert [path.name for path in (tmp_path / "exports").rglob("*")] == ["out", "mine"]


@pytest.fixture
def mount_point(tmp_path):
    """Return an empty mount point on the same file system, such as a volume of a container.

    Python does not detect that this directory is a mount point.
    """
    volume, point = tmp_path / "volume", tmp_path / "exports" / "out"
    volume.mkdir()
    point.mkdir(parents=True)
    if subprocess.run(["mount", "--bind", volume, point], capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield point
    subprocess.run(["umount", point], check=True)


def test_a_mount_point_is_refused_at_once(export, mount_point):
    with pytest.raises(UserError, match=r"--output_dir .*/exports/out.*busy"):
        export()
    assert list(mount_point.parent.iterdir()) == [mount_point]


def test_of_two_exports_into_one_place_the_second_is_refused(export, tmp_path):
    out = tmp_path / "exports" / "out"
    writing = tmp_path / "exports" / ".out.writing"
    with only_run_in(out, writing):
        work = writing / "out" / "model.safetensors"
        work.parent.mkdir()
        work.touch()
        with pytest.raises(UserError, match=naming(f"--output_dir {out} {os.getpid()}")):
            export()
        assert work.exists()


def test_what_a_killed_export_left_is_in_nobodys_way(export, tmp_path):
    stale = tmp_path / "exports" / ".out.writing"
    (stale / "out").mkdir(parents=True)
    (stale / "out" / "model.safetensors").write_bytes(b"half of it")
    (stale / ".lock").touch()
    export()
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["out"]


def stop_when_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM, as the command line handles it, when a directory of this name is created."""
    mkdir = os.mkdir

    def make(path, *mode) -> None:
        mkdir(path, *mode)
        if Path(path).name == name:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(os, "mkdir", make)


@pytest.mark.parametrize("name", [".out.writing", "out"])
def test_a_signal_leaves_nothing_behind_when_it_comes_first(export, monkeypatch, tmp_path, name):
    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        stop_when_made(name, monkeypatch)
        with pytest.raises(SystemExit):
            export()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing_behind(hf_dir, mesh, tmp_path):
    """`source/` can be written, but the checkpoint cannot."""
    args = ExportArgs(model=str(hf_dir), output_dir=str(tmp_path / "runs" / "run"), to_mcore=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match=rf"{tmp_path}.*File too large") as raised:
            convert(args, mesh)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.hint
    assert not mentions(raised.value.hint, "--resume")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_tensor_that_would_be_lost_leaves_nothing_behind(export, converted, tmp_path):
    note = converted / "source" / "tensors.json"
    described = json.loads(note.read_text())
    note.write_text(json.dumps({**described, "model.extra.weight": {"dtype": "float32", "shape": [1]}}))
    with pytest.raises(UserError, match=naming("model.extra.weight")):
        export()
    assert list((tmp_path / "exports").iterdir()) == []


def test_heads_that_fall_short_leave_nothing_behind(export, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"query": "What?", "response": "That is how it is."}) + "\n")
    with pytest.raises(UserError, match=naming("--min_acceptance 1.0")):
        export(min_acceptance=1.0, val_dataset=[str(rows)])
    assert list((tmp_path / "exports").iterdir()) == []
    assert (export(min_acceptance=0.0, val_dataset=[str(rows)]) / "model.safetensors").exists()


def test_a_run_without_checkpoint_is_named(mesh, tmp_path):
    with pytest.raises(UserError, match=naming(f"{tmp_path} checkpoint-N")):
        convert(ExportArgs(model=str(tmp_path), output_dir=str(tmp_path / "out"), to_hf=True), mesh)


def test_heads_get_a_draft_vocabulary(export, converted, tmp_path):
    """The answers of all rows are `7 7 7` and their end, so the draft vocabulary has two tokens.

    Tensors do not change.
    """
    (tmp_path / "train.jsonl").write_text('{"query": "What?", "response": "7 7 7"}\n' * 2)
    tokenizer = load_tokenizer(converted / "source")
    end = cast(int, tokenizer.eos_token_id)
    answer = {*tokenizer.encode("7 7 7", add_special_tokens=False), end}
    trained_with = SftArgs(model="hf", dataset=[str(tmp_path / "train.jsonl")], split_dataset_ratio=0)
    write_config(trained_with, converted / "args.json")
    whole = tensors(export(output_dir=str(tmp_path / "whole")) and tmp_path / "whole")
    directory = export(draft_vocab=len(answer))
    drafted = Heads.from_config(json.loads((directory / "config.json").read_text())).draft_vocab
    assert set(drafted) == answer
    assert torch.load(directory / "speculative_token_map.pt", weights_only=True) == list(drafted)
    assert_same(tensors(directory), whole)


def test_a_draft_vocabulary_is_chosen_from_the_rows_that_were_learned(export, converted, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"query": "What?", "response": "7 7 7"}\n' * 2)
    write_config(SftArgs(model="hf", dataset=[str(tmp_path / "train.jsonl")]), converted / "args.json")
    (converted / "run_report.json").write_text('{"data_sha256": "of other rows"}')
    with pytest.raises(UserError, match=naming("--draft_vocab 4 --dataset")):
        export(draft_vocab=4)


@pytest.mark.parametrize(
    ("trained_with", "problem"),
    [
        (None, "args.json"),
        (SftArgs(model="hf", dataset=["gone.jsonl"]), "gone.jsonl"),
        (SftArgs(model="hf", dataset=["rows.jsonl"], streaming=True), "--draft_vocab"),
    ],
)
def test_a_draft_vocabulary_needs_the_rows_of_the_run(export, converted, trained_with, problem, tmp_path):
    if trained_with:
        write_config(trained_with, converted / "args.json")
    with pytest.raises(UserError, match=naming(problem)) as error:
        export(draft_vocab=4)
    assert mentions(error.value.problem, "--draft_vocab 4")
    assert not (tmp_path / "exports").exists()


def test_ranks_wait_for_each_other_as_long_as_asked(monkeypatch):
    """A slow file system delays the first rank, and thus all other ranks."""
    asked = []

    class Opened(Exception):
        pass

    def session(layout, **options):
        asked.append(options)
        raise Opened

    monkeypatch.setattr("swiftlite.export.run.session", session)
    with pytest.raises(Opened):
        run(ExportArgs(to_hf=True, distributed_timeout_minutes=45))
    assert asked == [{"timeout_minutes": 45}]
