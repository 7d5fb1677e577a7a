"""Send the weights of a training run to a running engine, in the callback `after_step` of `train.run.run`.

The engine's side is `engines/loading/weight_update.py`; neither module imports the other.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel

from swiftlite.bridge.placement import is_first_rank
from swiftlite.bridge.rows import HfPart
from swiftlite.bridge.saving import Dtypes, stream_hf, streamed_tensors
from swiftlite.families.resolved import HfModel
from swiftlite.model.layers.lora import merged
from swiftlite.train.trainer import whole_parameters

Bucket = Mapping[str, torch.Tensor]
_CPU = torch.device("cpu")


class Receiver(Protocol):
    """A running engine that accepts new weights: `VllmEngine`, `SglangEngine` or `ServedVllm`."""

    @property
    def bucket_device(self) -> torch.device:
        """Device of the tensors to send: the GPU if the weight transport reads GPU memory."""
        ...

    def update_weights(self, target: Iterable[Bucket] | None, draft: Iterable[Bucket] | None) -> None:
        """Load HF tensors into the target model (trunk) and the draft model (heads). None leaves a model unchanged."""
        ...


@dataclass(frozen=True)
class LiveWeights:
    """The current weights of a run as Hugging Face tensors, for any layout.

    Args:
        model: the model's chunks on this rank.
        hf_model: the model that the run started from.
        dtypes: dtypes of the tensors, in the format of `bridge.saving.save_hf`. With the dtypes of an export, an
            engine produces the same results as with the export.
        bucket_bytes: maximum size in bytes of the tensors that the first rank holds at a time, in memory and on disk.
    """

    model: Sequence[DistributedDataParallel]
    hf_model: HfModel
    dtypes: Dtypes = None
    bucket_bytes: int = 1_000_000_000

    def tensors(self, part: HfPart) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtypes and shapes of the tensors that `stream` yields, in the same order; not collective."""
        family, config = self.hf_model.family, self.hf_model.config
        return streamed_tensors(self.model, family, config, part, dtypes=self.dtypes)

    def stream(self, part: HfPart, device: torch.device = _CPU) -> Iterator[Bucket]:
        """Yield buckets (groups of tensors) on the first rank, and nothing on other ranks.

        Collective: all ranks must iterate to the end.
        """
        with whole_parameters(self.model), merged(self.model):
            yield from stream_hf(
                self.model,
                self.hf_model.family,
                self.hf_model.config,
                part,
                dtypes=self.dtypes,
                bucket_bytes=self.bucket_bytes,
                device=device,
            )

    def send(self, engine: Receiver | None, *, target: bool = True, draft: bool = True) -> None:
        """Send the weights to a running engine, first the trunk's, then the heads'; collective.

        Args:
            engine: the engine on the first rank; None on the others.
            target: whether the trunk is sent; not needed if only the heads are trained.
            draft: whether the heads are sent. Acceptance drops if the heads are older than the trunk.
        """
        device = engine.bucket_device if engine else _CPU
        trunk = self.stream("trunk", device) if target else None
        heads = self.stream("heads", device) if draft else None
        streams = [trunk, heads]
        try:
            if is_first_rank():
                assert engine is not None, "the first rank has the engine"
                engine.update_weights(*streams)
        finally:  # also if the engine failed, because the other ranks iterate to the end
            for stream in streams:
                deque(stream or (), maxlen=0)
