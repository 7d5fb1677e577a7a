"""Test weight updates of an engine: what is sent in which order, and all rejected cases.

No engine is started; tests/e2e/test_live_weights.py does.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.base.errors import UserError
from swiftlite.engines.loading.weight_update import WeightUpdate, unsupported_layout
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.live.weight_channel import LlmClient, VllmChannel
from swiftlite.engines.vllm.live.weight_transport import Files
from tests.messages import mentions
from tests.tiny import make_tiny_hf

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


class FakeLLM:
    """vLLM's methods for weight transfer, which record their calls."""

    def __init__(self, is_busy: bool = False):
        self.calls: list[Any] = []
        self.is_busy = is_busy
        self.llm_engine = self  # which has the method for the outputs of a vision tower

    def start_weight_update(self) -> None:
        self.calls.append("target")

    def start_draft_weight_update(self) -> None:
        self.calls.append("draft")

    def update_weights(self, request: dict) -> None:
        path = Path(request["update_info"]["path"])
        self.calls.append(sorted(load_file(path)))
        assert len(list(path.parent.iterdir())) == 1  # one bucket at a time

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset images")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return not self.is_busy


def make(tmp_path, llm: Any, drafts: bool = True, layout: str = "") -> tuple[WeightUpdate, dict, dict]:
    """Return the update, and the tensors of trunk and heads."""
    directory = make_tiny_hf(tmp_path / "model", "glm4_moe", depth=1)
    model, tensors = resolve_served(directory), load_file(directory / "model.safetensors")
    copies = model.family.mtp.copies(model.config, 0)
    heads = {key: t for key, t in tensors.items() if model.family.is_mtp(model.config, key) and key not in copies}
    trunk = {key: tensor for key, tensor in tensors.items() if key not in heads and key not in copies}
    client = LlmClient(llm)
    return WeightUpdate("vLLM", VllmChannel(client, Files(client)), model, drafts, layout), trunk, heads


def in_two(tensors: dict) -> list[dict]:
    keys = list(tensors)
    return [{key: tensors[key] for key in keys[:5]}, {key: tensors[key] for key in keys[5:]}]


def test_target_and_draft_have_transfers_of_their_own(tmp_path):
    llm = FakeLLM()
    update, trunk, heads = make(tmp_path, llm)
    update.run(in_two(trunk), in_two(heads))
    sent = [[sorted(bucket) for bucket in in_two(tensors)] for tensors in (trunk, heads)]
    assert llm.calls == ["target", *sent[0], "finish", "draft", *sent[1], "finish", "reset images", "reset"]
    llm.calls.clear()
    update.run(None, [heads])
    assert llm.calls == ["draft", sorted(heads), "finish", "reset images", "reset"]
    update.check_whole()


def refused(update: WeightUpdate, *streams: Any) -> str:
    with pytest.raises(UserError) as refusal:
        update.run(*streams)
    return str(refusal.value)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "swapped"])
def test_other_tensors_are_refused_and_leave_an_engine_that_answers_no_more(tmp_path, change):
    llm = FakeLLM()
    update, trunk, heads = make(tmp_path, llm)
    streams, expected = {
        "missing": (([], None), "model.norm.weight"),
        "unexpected": (([trunk | {"model.norm.bias": torch.ones(1)}], None), "model.norm.bias"),
        "shape": (([trunk | {"model.norm.weight": torch.ones(3)}], None), "model.norm.weight [3]"),
        "swapped": ((None, [trunk]), "model.embed_tokens.weight"),
    }[change]
    assert mentions(refused(update, *streams), expected)
    assert "finish" not in llm.calls
    calls = list(llm.calls)
    refused(update, [trunk], [heads])
    assert llm.calls == calls


def test_an_engine_that_does_not_draft_takes_no_heads(tmp_path):
    llm = FakeLLM()
    update, trunk, heads = make(tmp_path, llm, drafts=False)
    refused(update, [trunk], [heads])
    assert llm.calls == []
    update.run([trunk], None)
    assert "finish" in llm.calls
    assert update.is_whole


@pytest.mark.parametrize(("stages", "shares_experts"), [(2, False), (1, True)])
def test_an_engine_whose_workers_hold_parts_is_refused_before_the_first_bucket(tmp_path, stages, shares_experts):
    """Each worker would reject tensors of the other workers, after a part of the new weights was loaded."""
    llm = FakeLLM()
    update, trunk, heads = make(tmp_path, llm, layout=unsupported_layout(stages, shares_experts))
    refused(update, [trunk], [heads])
    assert llm.calls == []
    assert update.is_whole
    assert unsupported_layout(1, False) == ""


def test_cached_keys_of_old_weights_are_an_error(tmp_path):
    llm = FakeLLM(is_busy=True)
    update, trunk, heads = make(tmp_path, llm)
    refused(update, [trunk], [heads])
    assert llm.calls[-1] == "reset"
    assert not update.is_whole


@pytest.mark.engine
@needs_vllm
def test_vllm_does_not_see_the_launcher_of_the_trainer(monkeypatch):
    from swiftlite.engines.devices import outside_torchrun

    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with outside_torchrun():
        assert os.environ.keys().isdisjoint(torchrun)
    assert os.environ.items() >= torchrun.items()
