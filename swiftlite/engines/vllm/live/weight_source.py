"""Implement `WeightSource`, the interface from which vLLM's senders read weights.

Programs that use vLLM's senders pass a `MegatronSource`, and a client of `weight_channel.py` or of vLLM:

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
    """Interface of a model in training that can be read as Hugging Face tensors, such as
    `train.live_weights.LiveWeights`.
    """

    def tensors(self, part: HfPart) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of every tensor of a part, in the order of `stream`. Not collective."""
        ...

    def stream(self, part: HfPart, device: torch.device) -> Iterator[Bucket]:
        """Yield the tensors of a part. Collective; only the first rank receives the tensors."""
        ...


class MegatronSource(WeightSource):
    """The trunk or the heads of a model in training, in any parallel layout, as a source for vLLM's senders.

    Args:
        part: trunk for the target model, heads for the draft model; each is a separate transfer.
        device: device of the gathered tensors on the first rank.
    """

    def __init__(self, model: TrainedModel, part: HfPart, device: torch.device):
        self._model = model
        self._part: HfPart = part
        self._device = device

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of every tensor, in the order of iteration; nothing is gathered."""
        return [ParamMeta(name, *entry) for name, entry in self._model.tensors(self._part).items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, whole tensor) on the first rank. Other ranks send their slices and yield nothing."""
        for bucket in self._model.stream(self._part, self._device):
            yield from bucket.items()


class BucketSource(WeightSource):
    """A source for vLLM's senders that yields the whole tensors of one bucket."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of every tensor of the bucket."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._bucket.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor) for every tensor of the bucket."""
        yield from self._bucket.items()
