"""Implement vLLM's `WeightSource` for its own senders.

Programs that use vLLM's senders pass a `MegatronSource` and a client of `weight_channel.py` or of vLLM:

    source = MegatronSource(live_weights, "trunk", device)
    sender = WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(...), client=client, source=source)
    sender.send_weights()  # on every rank
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from swiftlite.bridge.rows import HfPart
from swiftlite.engines.loading.weight_update import Bucket


class TrainedModel(Protocol):
    """A model in training as Hugging Face tensors; `train.live_weights.LiveWeights` is one."""

    def tensors(self, part: HfPart) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every tensor of a part, in the order of `stream`; not collective."""
        ...

    def stream(self, part: HfPart, device: torch.device) -> Iterator[Bucket]:
        """The tensors, on the first rank alone; collective."""
        ...


class MegatronSource(WeightSource):
    """A part of a model that Megatron trains, at any layout; names and shapes come from the rows of its family.

    Args:
        part: the trunk for the model that verifies, or the heads for the one that drafts: each is a transfer.
        device: where the tensors are made whole, on the first rank.
    """

    def __init__(self, model: TrainedModel, part: HfPart, device: torch.device):
        self._model = model
        self._part: HfPart = part
        self._device = device

    def metadata(self) -> list[ParamMeta]:
        """See vLLM's class; nothing is gathered."""
        return [ParamMeta(name, *entry) for name, entry in self._model.tensors(self._part).items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See vLLM's class. Ranks other than the first send their parts and receive nothing."""
        for bucket in self._model.stream(self._part, self._device):
            yield from bucket.items()


class BucketSource(WeightSource):
    """Tensors that are whole already."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def metadata(self) -> list[ParamMeta]:
        """See vLLM's class."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._bucket.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See vLLM's class."""
        yield from self._bucket.items()
