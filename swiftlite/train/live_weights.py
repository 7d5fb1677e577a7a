"""Send the weights of a training run to a running engine, from the `after_step` of `train.run.run`.

The engine's side is `engines/loading/weight_update.py`; the two do not import each other.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel

from swiftlite.bridge.placement import is_first_rank
from swiftlite.bridge.rows import HfPart
from swiftlite.bridge.transfer import Dtypes, stream_hf, streamed_tensors
from swiftlite.families.resolved import HfModel
from swiftlite.model.layers.lora import merged
from swiftlite.train.trainer import whole_parameters

Bucket = Mapping[str, torch.Tensor]
_CPU = torch.device("cpu")


class Receiver(Protocol):
    """An engine that takes weights while it runs; `VllmEngine`, `SglangEngine` and `ServedVllm` are."""

    @property
    def bucket_device(self) -> torch.device:
        """Device for the tensors: the GPU if the transport reads them there."""
        ...

    def update_weights(self, target: Iterable[Bucket] | None, draft: Iterable[Bucket] | None) -> None:
        """Take HF tensors for the model that verifies and for the one that drafts; None leaves one as it is."""
        ...


@dataclass(frozen=True)
class LiveWeights:
    """The model of a run as Hugging Face tensors, with any layout, as the last step left it.

    Args:
        model: the chunks of this rank.
        hf_model: the model that the run started from.
        dtypes: of the tensors, see `bridge.transfer.save_hf`: those of an export, so that an engine computes as it
            would with that.
        bucket_bytes: most of what the first rank holds of them at once, and of what is on its disk.
    """

    model: Sequence[DistributedDataParallel]
    hf_model: HfModel
    dtypes: Dtypes = None
    bucket_bytes: int = 1_000_000_000

    def tensors(self, part: HfPart) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return type and shape of the tensors that `stream` brings, in its order; not collective."""
        family, config = self.hf_model.family, self.hf_model.config
        return streamed_tensors(self.model, family, config, part, dtypes=self.dtypes)

    def stream(self, part: HfPart, device: torch.device = _CPU) -> Iterator[Bucket]:
        """Yield bucket after bucket on the first rank, nothing on the others; collective: iterate to the end on all
        ranks."""
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
        """Put the weights into an engine that runs, the trunk's before the heads'; collective.

        Args:
            engine: on the first rank; None on the others.
            target: whether the trunk is sent. Not needed when the heads alone train.
            draft: whether the heads are sent. Drafts of heads that lag behind their trunk are not accepted.
        """
        device = engine.bucket_device if engine else _CPU
        trunk = self.stream("trunk", device) if target else None
        heads = self.stream("heads", device) if draft else None
        streams = [trunk, heads]
        if is_first_rank():
            assert engine is not None, "the first rank has the engine"
            engine.update_weights(*streams)
        else:
            for stream in streams:
                deque(stream or (), maxlen=0)
