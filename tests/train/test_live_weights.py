"""Test the weights of a run that are sent to an engine, on one process: they are the tensors of the
Hugging Face files.
"""

from collections.abc import Iterable

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file

from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.train.live_weights import Bucket, LiveWeights
from swiftlite.train.optim import wrap_model
from tests.tiny import make_tiny_hf


class Engine:
    """A receiver of weights that records their order."""

    bucket_device = torch.device("cpu")

    def __init__(self):
        self.received: list[tuple[str, dict[str, torch.Tensor]]] = []

    def update_weights(self, target: Iterable[Bucket] | None, draft: Iterable[Bucket] | None) -> None:
        for part, buckets in (("target", target), ("draft", draft)):
            if buckets is not None:
                self.received.append((part, {key: tensor for bucket in buckets for key, tensor in bucket.items()}))


@pytest.fixture
def hf_dir(tmp_path):
    return make_tiny_hf(tmp_path / "hf", "qwen3", depth=1)


@pytest.fixture
def wrapped(hf_dir, mesh) -> list[DistributedDataParallel]:
    chunks, _ = open_model(resolve(hf_dir), mesh, dtype=torch.float32)
    return wrap_model(chunks, mesh, torch.float32)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_trunk_and_heads_together_are_the_model(hf_dir, wrapped):
    engine = Engine()
    LiveWeights(wrapped, resolve(hf_dir)).send(engine)
    assert [part for part, _ in engine.received] == ["target", "draft"]
    trunk, heads = (tensors for _, tensors in engine.received)
    assert all(key.startswith("mtp.") for key in heads)
    assert_same(trunk | heads, load_file(hf_dir / "model.safetensors"))


@pytest.mark.parametrize(("options", "parts"), [({"draft": False}, ["target"]), ({"target": False}, ["draft"])])
def test_one_part_may_stay(hf_dir, wrapped, options, parts):
    engine = Engine()
    LiveWeights(wrapped, resolve(hf_dir)).send(engine, **options)
    assert [part for part, _ in engine.received] == parts


def test_they_are_as_the_last_step_left_them(hf_dir, wrapped):
    live = LiveWeights(wrapped, resolve(hf_dir))
    with torch.no_grad():
        for parameter in wrapped[0].parameters():
            parameter += 1
    found = {}
    for bucket in (*live.stream("trunk"), *live.stream("heads")):
        found |= bucket
    assert_same(found, {key: tensor + 1 for key, tensor in load_file(hf_dir / "model.safetensors").items()})


def test_no_bucket_is_larger_than_it_may_be(hf_dir, wrapped):
    limit = 40_000
    live = LiveWeights(wrapped, resolve(hf_dir), bucket_bytes=limit)
    buckets = list(live.stream("trunk"))
    assert len(buckets) > 1
    for bucket in buckets:
        size = sum(tensor.numel() * tensor.element_size() for tensor in bucket.values())
        assert size <= limit or len(bucket) == 1  # a larger tensor comes alone


def test_precision_is_that_of_an_export(hf_dir, wrapped):
    original = load_file(hf_dir / "model.safetensors")
    dtypes = {key: "bfloat16" if key.startswith("mtp.") else "float32" for key in original}
    live = LiveWeights(wrapped, resolve(hf_dir), dtypes)
    assert {tensor.dtype for bucket in live.stream("heads") for tensor in bucket.values()} == {torch.bfloat16}
    assert {tensor.dtype for bucket in live.stream("trunk") for tensor in bucket.values()} == {torch.float32}
