"""Test that vLLM's sender and receiver transfer the checkpoint's tensors from a model on two ranks."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from swiftlite.args.fields import ParallelLayout
from swiftlite.bridge.rows import HfPart
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.runtime.distributed import session
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.optim import wrap_model
from tests.gpu_links.gpu_links import install
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


class Worker(nn.Module):
    """A client whose engine is one worker with vLLM's receiver. Its model stores the tensors that it receives."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        super().__init__()
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0), model_config=None
        )
        self.receiver = NCCLWeightTransferEngine(config, config, torch.device("cpu"), self)
        self.received: dict[str, torch.Tensor] = {}

    def load_weights(self, weights):
        self.received |= weights

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.receiver.init_transfer_engine(self.receiver.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        """Do nothing, because nothing is reloaded."""

    def update_weights(self, update_info: Any) -> None:
        self.receiver.receive_weights(self.receiver.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing, because nothing was reloaded."""


def send_both_parts(layout: ParallelLayout, hf_dir: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Send both parts of a model; return the tensors that the worker received, by part."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    from vllm.utils.network_utils import get_open_port

    from swiftlite.engines.vllm.live.weight_source import MegatronSource

    install()
    received = {}
    parts: tuple[HfPart, ...] = ("trunk", "heads")
    with session(layout, timeout_minutes=2) as mesh:
        hf_model = resolve(hf_dir)
        chunks, _ = open_model(hf_model, mesh, dtype=torch.float32)
        live = LiveWeights(wrap_model(chunks, mesh, torch.float32), hf_model, bucket_bytes=20_000)
        for part in parts:
            info = NCCLTrainerInitInfo("127.0.0.1", get_open_port(), 2, rank=dist.get_rank())
            client = Worker()
            source = MegatronSource(live, part, torch.device("cpu"))
            sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
            sender.send_weights()
            received[part] = client.received
    return received


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3", ParallelLayout(tensor_model_parallel_size=2), marks=pytest.mark.slow),
        ("deepseek_v3", ParallelLayout(pipeline_model_parallel_size=2)),
    ],
)
def test_a_part_of_a_model_is_a_source_of_weights(tmp_path, family, layout):
    hf_dir = make_tiny_hf(tmp_path / "hf", family, depth=1, num_attention_heads=4, num_key_value_heads=2)
    first, second = launch(2, send_both_parts, layout, hf_dir)
    assert second == {"trunk": {}, "heads": {}}
    original = load_file(hf_dir / "model.safetensors")
    assert first["trunk"].keys().isdisjoint(first["heads"])
    sent = first["trunk"] | first["heads"]
    # Tensors that repeat others, such as the embedding that a file has for a head again, are sent once.
    assert sent.keys() <= original.keys()
    assert all(torch.equal(tensor, original[key]) for key, tensor in sent.items())
    copies = original.keys() - sent.keys()
    assert all(key.endswith(("embed_tokens.weight", "shared_head.head.weight")) for key in copies)
