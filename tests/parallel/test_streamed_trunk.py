"""A trunk that is read layer by layer, on two ranks: the same bits as in memory, also after kill -9."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch.multiprocessing.spawn import ProcessExitedException

from swiftlite.args.commands import SftArgs
from swiftlite.model.layers.streamed import StreamedBlock
from tests.bridge.test_fp8 import make_fp8
from tests.parallel.launch import launch
from tests.parallel.parity import TP2_SP
from tests.parallel.runs import train
from tests.parallel.test_heads import options_of_a_cache
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.cached_states import records
from tests.train.test_sft import metrics

pytestmark = pytest.mark.gloo

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2+SP, fit": ("qwen3", TP2_SP | {"mtp_num_layers": 1, "mtp_init": "fit_last_layer"}),
    "CP2": ("qwen3_next", {"context_parallel_size": 2}),
    "EP2": ("qwen3_moe", {"expert_model_parallel_size": 2, "torch_dtype": "bfloat16"}),
    "DP2, FP8": ("deepseek_v3", {"torch_dtype": "bfloat16"}),
}


def options(directory: Path, way: str) -> tuple[SftArgs, SftArgs]:
    """Options of a run with the trunk in memory, and of one that streams it in several groups."""
    family, more = WAYS[way]
    args = replace(options_of_a_cache(directory), model=str(directory / family), **more)
    sizes: dict[str, Any] = {"with_tokenizer": True}
    if family == "qwen3":
        sizes["num_key_value_heads"] = 2
    if family == "deepseek_v3":
        make_fp8(directory / family, family, **sizes)
    else:
        make_tiny_hf(directory / family, family, depth=1, **sizes)
    other = {"output_dir": str(directory / "streamed"), "cache_trunk_states": str(directory / "streamed-cache")}
    return args, replace(args, stream_trunk=True, stream_trunk_gb=1e-5, **other)


# The trunk of a run that is killed is compared too, below.
@pytest.mark.parametrize("way", some_of(WAYS))
def test_same_bits(tmp_path, way):
    check_same_bits(tmp_path, *options(tmp_path, way))


@pytest.mark.slow
def test_expert_parallel_states_in_float32(tmp_path):
    """An expert multiplies the tokens of both ranks' micro-batches together. The last rows have other companions if
    the trunk is streamed, so the sums of these products may have another order.
    """
    whole, streamed = options(tmp_path, "EP2")
    for args in (whole, streamed):
        assert launch(2, train, replace(args, torch_dtype="float32")) == [0, 0]
    cached, streamed_states = records(tmp_path / "cache"), records(tmp_path / "streamed-cache")
    assert len(cached) > 3
    for name, content in cached.items():
        expected, found = load(content), load(streamed_states[name])
        states = "states_SBH"
        bound = 1e-5 * float(expected[states].abs().max())  # float32 rounding of sums over the hidden size
        torch.testing.assert_close(found[states], expected[states], rtol=0, atol=bound)


def check_same_bits(tmp_path: Path, whole: SftArgs, streamed: SftArgs) -> None:
    """Compare cache and metrics of both runs."""
    for args in (whole, streamed):
        assert launch(2, train, args) == [0, 0]
    assert records(tmp_path / "cache") == records(tmp_path / "streamed-cache")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "streamed")


def killed(passes: int, args: SftArgs) -> None:
    """Kill the process in the given pass of a micro-batch through a layer."""
    run_layer = StreamedBlock.run_layer
    left = [passes]

    def run(self, *given):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_layer(self, *given)

    StreamedBlock.run_layer = run  # pyright: ignore[reportAttributeAccessIssue]: this process ends with the run
    train(args)


def test_after_kill_the_finished_groups_are_kept(tmp_path):
    whole, streamed = options(tmp_path, "CP2")
    with pytest.raises(ProcessExitedException):
        launch(2, killed, 5, streamed)
    assert 1 <= len(records(tmp_path / "streamed-cache")) < 5
    for args in (whole, replace(streamed, resume=True)):
        assert launch(2, train, args) == [0, 0]
    assert records(tmp_path / "cache") == records(tmp_path / "streamed-cache")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "streamed")
