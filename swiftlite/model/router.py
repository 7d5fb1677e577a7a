"""The router of a mixture of experts, whose bias and counts stay in float32."""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter as McoreTopKRouter


class TopKRouter(McoreTopKRouter):
    """megatron-core's, with its buffers kept out of casts.

    Float16Module casts a model with `bfloat16()`. The stock router turns its expert bias back to float32 at the next
    forward pass, when the numbers are rounded already (GLM-4.5's biases are near 0, their differences near 1e-3); and
    its counts of tokens stop growing at 256, where bfloat16 has no odd numbers any more.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TopKRouter":
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self
