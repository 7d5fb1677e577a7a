"""Test each transport of weights to vLLM's workers with the real receiver: what arrives, and what is rejected.

tests/gpu_links tests NCCL and CUDA IPC; tests/e2e/test_live_weights.py uses whole engines.
"""

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swiftlite.base.errors import UserError
from swiftlite.engines.loading.weight_update import Part
from swiftlite.engines.vllm.live import weight_transport
from swiftlite.engines.vllm.live.ipc_handle import as_arguments, as_plain_values
from swiftlite.engines.vllm.live.weight_channel import VllmChannel
from swiftlite.engines.vllm.live.weight_transport import Nccl, check_gpus, make_transport
from tests.gpu_links.gpu_links import install, reduce_tensor
from tests.messages import naming

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


class Model(nn.Module):
    """A model that loads the tensors it knows and ignores others, as vLLM's models do, but rejects `never`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def load_weights(self, weights):
        parameters: dict[str, Any] = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            assert name != "never"
            if name in parameters:
                parameters[name].weight_loader(parameters[name], tensor)
                loaded.add(name)
        return loaded


class Worker:
    """A `Client` whose engine is one worker. Calls are converted to JSON, as over HTTP."""

    part: Part = "target"

    def __init__(self, receiver: type):
        from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

        self.model = Model()
        record_metadata_for_reloading(self.model)
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
            model_config=SimpleNamespace(dtype=torch.float32),
        )
        self.receiver = receiver(config, config, torch.device("cpu"), self.model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = json.loads(json.dumps(init_info))
        self.receiver.init_transfer_engine(self.receiver.parse_init_info(info))

    def start_weight_update(self) -> None:
        self.receiver.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        info = json.loads(json.dumps(update_info))
        self.receiver.receive_weights(self.receiver.parse_update_info(info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.receiver.finish_weight_update()

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture(params=["file", "nccl", "ipc"])
def worker_and_channel(request, monkeypatch):
    from swiftlite.engines.vllm.live import weight_transfer
    from swiftlite.engines.vllm.plugin import _RECEIVERS

    install(monkeypatch.setattr)
    worker = Worker(getattr(weight_transfer, _RECEIVERS[request.param]))
    transport = make_transport(request.param, worker, num_workers=1)
    transport.connect()
    yield worker, VllmChannel(worker, transport)
    transport.close()


def full(number: float) -> torch.Tensor:
    return torch.full((3, 3), number)


def test_buckets_arrive_and_what_is_not_taken_is_named(worker_and_channel):
    worker, channel = worker_and_channel
    weight = worker.model.first.weight

    def send(*buckets: dict[str, torch.Tensor]) -> None:
        channel.start("target")
        for bucket in buckets:
            channel.send(bucket)
        channel.finish()

    send({"first.weight": full(2.0), "second.weight": full(3.0)})
    assert worker.model.first.weight is weight  # where captured graphs find it
    assert (worker.model.first.weight == 2).all()
    assert (worker.model.second.weight == 3).all()
    send({"first.weight": full(4.0)}, {"second.weight": full(5.0).T})
    assert (worker.model.first.weight == 4).all()
    assert (worker.model.second.weight == 5).all()
    with pytest.raises(ValueError, match=naming("second.weight")):
        send({"first.weight": full(1.0)})
    # One of several tensors that came in one buffer.
    with pytest.raises(ValueError, match=naming("third.weight")):
        send({"first.weight": full(1.0), "third.weight": full(1.0), "second.weight": full(1.0)})


def test_a_worker_that_refuses_a_bucket_is_not_waited_for(worker_and_channel):
    _, channel = worker_and_channel
    channel.start("target")
    with pytest.raises(AssertionError):
        channel.send({"first.weight": full(1.0), "never": full(1.0), "second.weight": full(1.0)})


def test_the_memory_of_one_gpu_reaches_one_worker():
    with pytest.raises(UserError, match=naming("ipc 2 nccl")):
        make_transport("ipc", Worker.__new__(Worker), num_workers=2)


def test_workers_meet_the_trainer_at_an_address_of_this_machine():
    nccl = make_transport("nccl", Worker.__new__(Worker), 1, server="127.0.0.1")
    assert isinstance(nccl, Nccl)
    assert nccl._address == "127.0.0.1"


def test_an_address_that_this_machine_does_not_reach_is_an_error():
    with pytest.raises(UserError, match=naming("no-such-host.invalid")):
        make_transport("nccl", Worker.__new__(Worker), 1, server="no-such-host.invalid")


@pytest.mark.parametrize(
    ("name", "gpu", "devices", "problem"),
    [
        ("nccl", None, (0,), "weight_transport nccl file"),
        ("ipc", None, (), "weight_transport ipc file"),
        ("nccl", torch.device("cuda", 1), (0, 1), "weight_transport nccl 1 ipc"),
        ("nonsense", None, (), "weight_transport nonsense"),
    ],
)
def test_a_way_that_these_gpus_do_not_have_is_refused(monkeypatch, name, gpu, devices, problem):
    monkeypatch.setattr(weight_transport, "own_gpu", lambda: gpu)
    with pytest.raises(UserError, match=naming(problem)):
        check_gpus(name, devices)


@pytest.mark.parametrize(("name", "devices"), [("nccl", (0, 2)), ("ipc", (1,)), ("file", (1,))])
def test_a_way_that_these_gpus_have(monkeypatch, name, devices):
    monkeypatch.setattr(weight_transport, "own_gpu", lambda: torch.device("cuda", 1))
    check_gpus(name, devices)


def test_the_handle_of_a_buffer_is_plain_values_with_nothing_missing():
    buffer: Any = torch.zeros(12, dtype=torch.uint8)
    buffer.path = "somewhere"
    arguments = reduce_tensor(buffer)[1]
    values = json.loads(json.dumps(as_plain_values(arguments)))
    assert as_arguments(values, device=3) == [*arguments[:6], 3, *arguments[7:]]
    del values["storage"]
    with pytest.raises(ValueError, match=naming("storage")):
        as_arguments(values, device=3)
