"""torchao's AdamW with 8-bit moments (`--optimizer adamw_8bit`) in megatron-core's optimizers. Imports torchao.

A moment is stored as one byte per value, the index into a table of 256 numbers between -1 and 1 (or 0 and 1), and one
float32 scale per block of 256 values. Each step decodes the moments, updates them in float32, and encodes them again.
"""

import math
from typing import Any

import torch
from torchao import optim  # pyright: ignore[reportMissingImports]
from torchao.optim.quant_utils import (  # pyright: ignore[reportMissingImports]
    dequant_with_qmap,
    quantize_8bit_with_qmap,
)
from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

from swiftlite.train.checkpoint.optimizer_state import HoldsMoments

SMALLEST_TENSOR = 4096
"""Moments of tensors with fewer elements are float32, as in torchao and bitsandbytes."""
_SMALLEST_BLOCK = 16
_SMALLEST_SCALE = 1e-12  # torchao's, see `scale_tensor`
_BLOCKS_AT_ONCE = 2**14
"""Number of blocks that are encoded together, which limits the memory of intermediate results."""


class AdamW8bit(optim.AdamW8bit, HoldsMoments):
    """torchao's AdamW8bit, for the parameter groups of megatron-core.

    Blocks are those of the tensors that the optimizer updates. With tensor parallelism or a distributed optimizer these
    are parts of parameters, so results depend on the layout by the rounding of moments.
    """

    def __init__(self, param_groups: list[dict[str, Any]]):
        """Take over the groups of another AdamW, with its settings (lr, betas, eps, weight_decay)."""
        # The shards of a distributed optimizer are views of parameters, which torch's constructor refuses.
        super().__init__([{"params": []}])
        self.param_groups = param_groups
        for group in param_groups:
            group["amsgrad"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Run an update. The learning rates of groups are numbers, as megatron-core sets them."""
        lrs = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))  # torchao refuses numbers, which it would compile in
        super().step(closure)
        for group, lr in zip(self.param_groups, lrs, strict=True):
            group["lr"] = lr

    def moment(self, main: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a decoded moment in the memory of the host, or the moment itself if it is not stored in 8 bits."""
        moment = super().moment(main, kind)
        if isinstance(moment, OptimState8bit):
            return _decoded(moment)
        return moment

    def set_moment(self, main: torch.Tensor, kind: str, values: torch.Tensor) -> None:
        """Write a moment. Values of the same blocks restore their codes; in other blocks they are rounded again."""
        moment = super().moment(main, kind)
        if isinstance(moment, OptimState8bit):
            _encode(values, moment)
        else:
            moment.copy_(values)

    def state_of(self, main: torch.Tensor) -> dict[str, Any]:
        state = self.state[main]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = self._new_buffer(main, signed=True)
            state["exp_avg_sq"] = self._new_buffer(main, signed=False)
        return state

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        """Return zeros in 8 bits, or in float32 for small tensors.

        In torchao, moments stay float32 if 256 does not divide the size of the tensor. The parts of parameters in a
        distributed optimizer have such sizes, so blocks are smaller there.
        """
        block = math.gcd(p.numel(), self.block_size)
        if p.numel() < SMALLEST_TENSOR or block < _SMALLEST_BLOCK:
            return torch.zeros_like(p, dtype=torch.float32)
        return self._subclass_zeros(p, signed, block)


def _decoded(moment: OptimState8bit) -> torch.Tensor:
    codes, qmap, scale = (tensor.cpu() for tensor in (moment.codes, moment.qmap, moment.scale))
    blocks = codes.view(len(scale), -1)
    parts = zip(blocks.split(_BLOCKS_AT_ONCE), scale.split(_BLOCKS_AT_ONCE), strict=True)
    return torch.cat([dequant_with_qmap(some, qmap, scales) for some, scales in parts]).view(codes.shape)


def _encode(values: torch.Tensor, moment: OptimState8bit) -> None:
    """Write float32 values into a moment of the same shape."""
    blocks = values.reshape(len(moment.scale), -1).cpu()
    encoded = [_encoded(some, moment.qmap.cpu()) for some in blocks.split(_BLOCKS_AT_ONCE)]
    moment.codes.copy_(torch.cat([codes for codes, _ in encoded]).view(moment.codes.shape))
    moment.scale.copy_(torch.cat([scales for _, scales in encoded]))


def _encoded(blocks: torch.Tensor, qmap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of blocks, of shape (blocks, size), and their scales.

    The scale is the first of these that gives exactly the values of the block, else the first one:

    - the largest magnitude, which is torchao's scale. The table contains 1, so the scale of decoded values is found if
      their largest magnitude is that of a positive number.
    - the largest magnitude divided by that of the table's smallest number, which is greater than -1, and the two
      neighbors of the quotient, because the product of table and scale was rounded.
    """
    largest = blocks.abs().amax(-1)
    candidates = [largest]
    if qmap[0] < 0:
        quotient = largest / -qmap[0]
        up, down = torch.tensor(math.inf), torch.tensor(0.0)
        candidates += [quotient, quotient.nextafter(up), quotient.nextafter(down)]
    scales = torch.zeros_like(largest)
    codes = torch.zeros(blocks.shape, dtype=torch.uint8)
    is_exact = torch.zeros(len(blocks), dtype=torch.bool)
    for number, candidate in enumerate(candidates):
        some_scales = candidate.clip(_SMALLEST_SCALE)
        some_codes = quantize_8bit_with_qmap(blocks / some_scales[:, None], qmap)
        gives_values = (dequant_with_qmap(some_codes, qmap, some_scales) == blocks).all(-1)
        chosen = ~is_exact & gives_values
        if number == 0:
            chosen = torch.ones_like(is_exact)
        codes[chosen], scales[chosen] = some_codes[chosen], some_scales[chosen]
        is_exact |= gives_values
    return codes, scales
