"""A trunk that is read layer by layer gives the same bits as one that is in memory, and at most two layers are held."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.layers import DecoderLayers
from swiftlite.bridge.saving import save_hf, streamed_tensors
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.model.layers.streamed import StreamedBlock
from swiftlite.model.open import build_hf_model
from swiftlite.train import run as training
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from tests.bridge.test_fp8 import make_fp8
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.cached_states import records, remove
from tests.train.test_sft import metrics, train

HEADS = {"mtp_mode": "heads_only", "micro_batch_size": 1, "num_train_epochs": 2, "train_iters": None}
FEW_BYTES = 1e-5
"""--stream_trunk_gb of about one row, so that there are several groups."""


@pytest.fixture
def options(options):
    """Return options of a run on 10 rows."""
    path = Path(options().dataset[0])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    return options


def make_deepseek_fp8(directory: Path) -> Path:
    return make_fp8(directory, "deepseek_v3", with_tokenizer=True)


def make(family: str) -> Callable[[Path], Path]:
    return lambda directory: make_tiny_hf(directory, family, depth=1, with_tokenizer=True)


WAYS = {
    "new head": (make("qwen3"), {"mtp_num_layers": 1, "mtp_init": "fit_last_layer", "mtp_unroll": 2}),
    "mimo, bfloat16": (make("mimo"), {"torch_dtype": "bfloat16", "packing": True, "max_length": 128}),
    "qwen3_moe": (make("qwen3_moe"), {"mtp_loss": "lk_hybrid"}),
    "deepseek_v3, FP8": (make_deepseek_fp8, {"torch_dtype": "bfloat16"}),
    "qwen3_next": (make("qwen3_next"), {"padding_free": True, "draft_vocab": 40}),
    "features": (make("llama"), {"mtp_features": [1], "mtp_unroll": 2, "draft_vocab": 40}),
    "eagle3": (make("llama"), {"drafter": "eagle3.1", "mtp_unroll": 2, "draft_vocab": 40}),
    "dspark": (make("llama"), {"drafter": "dspark", "mtp_unroll": 2, "draft_vocab": 40}),
}


def export(run: Path, mesh) -> dict[str, bytes]:
    """The content of each file of the export of a run."""
    directory = run.with_name(f"{run.name}-hf")
    convert(ExportArgs(model=str(run), output_dir=str(directory), to_hf=True), mesh)
    return content(directory)


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# There are experts in deepseek_v3 too, and linear attention is in tests/parallel/test_streamed_trunk.py.
@pytest.mark.parametrize("way", some_of(WAYS, "new head", "deepseek_v3, FP8", "eagle3"))
def test_same_bits(options, mesh, tmp_path, way):
    make_model, more = WAYS[way]
    check_same_bits(options, mesh, tmp_path, make_model(tmp_path / "model"), more)


def check_same_bits(options, mesh, tmp_path: Path, model: Path, more: dict[str, Any]) -> None:
    """Compare cache, metrics and export of a run that streams the trunk with those of a run that has it in memory."""
    files = {}
    runs = []
    for name, streamed in {"whole": {}, "streamed": {"stream_trunk": True, "stream_trunk_gb": FEW_BYTES}}.items():
        cache = tmp_path / f"{name}-cache"
        given = HEADS | more | streamed | {"cache_trunk_states": str(cache), "output_dir": str(tmp_path / name)}
        runs.append(train(options(model=str(model), **given), mesh))
        files[name] = records(cache)
    assert files["whole"] == files["streamed"]
    assert len(files["whole"]) > 4
    assert metrics(runs[0]) == metrics(runs[1])
    assert export(runs[0], mesh) == export(runs[1], mesh)


def test_at_most_two_layers_are_in_memory(options, mesh, tmp_path, monkeypatch):
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True, num_hidden_layers=6)
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    most = []
    build_layer = StreamedBlock.build_layer

    def build(self, number):
        gc.collect()
        layer = build_layer(self, number)
        alive.add(layer)
        most.append(len(alive))
        return layer

    monkeypatch.setattr(StreamedBlock, "build_layer", build)
    cache = str(tmp_path / "cache")
    train(options(model=str(model), **HEADS, cache_trunk_states=cache, stream_trunk=True), mesh)
    assert max(most) == 2
    assert len(most) == 2 * 6  # one pass for the digests of the weights, and one for the states


def test_an_interrupted_run_computes_only_missing_groups(options, mesh, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    streamed = HEADS | {"stream_trunk": True, "stream_trunk_gb": FEW_BYTES, "cache_trunk_states": str(cache)}
    expected = metrics(train(options(output_dir=str(tmp_path / "whole"), **streamed), mesh))
    files = records(cache)
    removed = set(list(files)[::3])
    remove(cache, removed)
    run_layer = StreamedBlock.run_layer
    passes = []

    def count(self, *args):
        passes.append(1)
        return run_layer(self, *args)

    monkeypatch.setattr(StreamedBlock, "run_layer", count)
    run = train(options(output_dir=str(tmp_path / "again"), **streamed), mesh)
    assert metrics(run) == expected
    assert records(cache) == files
    assert len(passes) == 2 * len(removed)


def test_a_damaged_output_is_computed_again_after_a_restart(options, mesh, tmp_path):
    cache = tmp_path / "cache"
    streamed = HEADS | {"stream_trunk": True, "cache_trunk_states": str(cache)}
    expected = metrics(train(options(output_dir=str(tmp_path / "whole"), **streamed), mesh))
    files = records(cache)
    (data,) = cache.glob("*.data")
    content = data.read_bytes()
    data.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    again = options(output_dir=str(tmp_path / "again"), resume=True, **streamed)
    with pytest.raises(UserError, match=naming("--cache_trunk_states --resume")) as error:
        train(again, mesh)
    assert not error.value.is_final  # the launcher restarts the run
    found = metrics(train(again, mesh))
    assert [line for line in found if "fault" not in line] == expected
    assert records(cache) == files


def test_a_damaged_layer_is_reported(options, mesh, hf_dir, tmp_path, monkeypatch):
    """The thread that reads ahead reports what it found."""

    def truncated(self, bindings):
        raise UserError(f"{hf_dir}/model.safetensors: was truncated while it was read")

    monkeypatch.setattr(DecoderLayers, "read", truncated)
    streamed = {"stream_trunk": True, "cache_trunk_states": str(tmp_path / "cache")}
    with pytest.raises(UserError, match="truncated"):
        train(options(**HEADS, **streamed), mesh)


@pytest.mark.slow
def test_an_export_requires_the_same_trunk(options, mesh, hf_dir, tmp_path):
    streamed = {"stream_trunk": True, "cache_trunk_states": str(tmp_path / "cache")}
    run = train(options(**HEADS, **streamed), mesh)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True, seed=5)
    weights = hf_dir / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes((other / "model.safetensors").read_bytes())
    shared_digest_of.cache_clear()  # another process would read the files again
    with pytest.raises(UserError, match=naming(f"{hf_dir} --stream_trunk")):
        export(run, mesh)
    shared_digest_of.cache_clear()
    weights.unlink()
    with pytest.raises(UserError, match=naming(str(hf_dir))):
        export(run, mesh)
    assert not (tmp_path / "run-hf").exists()
    weights.write_bytes(before)
    assert export(run, mesh)


def test_a_resumed_run_requires_the_same_trunk(options, mesh, hf_dir, tmp_path):
    """The heads would be trained for one trunk and exported with another."""
    streamed = HEADS | {"stream_trunk": True, "save_steps": 2}
    run = train(options(cache_trunk_states=str(tmp_path / "cache"), **streamed), mesh)
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["base"]["model"] == str(hf_dir)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True, seed=5)
    (hf_dir / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    shared_digest_of.cache_clear()
    with pytest.raises(UserError, match=naming(f"--resume --model {hf_dir}")):
        train(options(cache_trunk_states=str(tmp_path / "another"), resume=True, **streamed), mesh)


def test_missing_layers_are_never_written(mesh, hf_dir, tmp_path):
    """Without layers, the files would have zeros in their place."""
    model = resolve(hf_dir)
    chunks = build_hf_model(model, mesh, dtype=torch.float32, holds_layers=False)
    with pytest.raises(ValueError, match="streamed"):
        save_hf(chunks, tmp_path / "out", model.family, model.config)
    with pytest.raises(ValueError, match="streamed"):
        streamed_tensors(chunks, model.family, model.config, "trunk")
    assert streamed_tensors(chunks, model.family, model.config, "heads")
    assert not (tmp_path / "out").exists()


def test_weights_are_not_handed_out(options, tmp_path):
    args = options(**HEADS, stream_trunk=True, cache_trunk_states=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="--stream_trunk"):
        training.run(args, after_step=lambda step, weights: None)


def test_resume_after_the_first_step(options, mesh, tmp_path):
    streamed = HEADS | {"stream_trunk": True, "cache_trunk_states": str(tmp_path / "cache"), "save_steps": 2}
    expected = train(options(output_dir=str(tmp_path / "whole"), **streamed), mesh)
    resumed = tmp_path / "run"
    stopped = options(output_dir=str(resumed), **streamed)
    train(stopped, mesh)
    state = json.loads((resumed / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["base"]["model"] == stopped.model
    for later in sorted(resumed.glob("checkpoint-*")):
        if later.name != "checkpoint-2":
            (later / "trainer_state.json").unlink()
            later.rename(later.with_name(f"removed-{later.name}"))
    train(options(output_dir=str(resumed), resume=True, **streamed), mesh)
    assert export(resumed, mesh) == export(expected, mesh)
