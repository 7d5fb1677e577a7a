"""Cache keys, values and states of rows in decoding.

A pass processes the new tokens of all rows as one flat row without padding. For example, pass 1 processes the rows "the
cat" and "a dog ran", and pass 2 the next token of each:

    pass 1    the cat a dog ran    positions 0 1 0 1 2
    pass 2    sat off              positions 2 3

Rows are not split over ranks; context-parallel ranks process different rows.

megatron-core's static context (inference/contexts of 0.16.1) requires all rows to be at the same position, and its
dynamic context requires CUDA kernels. Neither supports sequence parallelism or swiftlite's latent attention.

Shapes: T tokens of a pass, B rows, C capacity.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

Name = str | tuple[torch.nn.Module, str]
"""Key of a tensor in the cache: a module with a name, or a name that is unique in the model."""


class Span(NamedTuple):
    """Consecutive tokens of one row."""

    row: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Cache:
    """The cache of one batch of rows on one rank.

    For every layer it contains keys and values, or the state of linear attention. It also contains the inputs of the
    MTP heads.

    Args:
        num_rows: B.
        capacity: maximum number of tokens of a row.

    Attributes:
        spans: tokens of the current pass, in order; tokens after them are padding.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device):
        self.num_rows = num_rows
        self.capacity = capacity
        self.device = device
        self._kept: dict[Name, torch.Tensor] = {}
        self.begin(())

    def begin(self, spans: Sequence[Span]) -> None:
        """Start a pass over the tokens in `spans`."""
        self.spans = tuple(spans)
        rows: list[int] = []
        positions: list[int] = []
        for row, start, end in spans:
            rows += [row] * (end - start)
            positions += range(start, end)
        self._row_T = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._position_T = torch.tensor(positions, dtype=torch.int64, device=self.device)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the current pass, without padding."""
        return len(self._row_T)

    @property
    def is_step(self) -> bool:
        """Whether each row has at most one token in the current pass."""
        return self.num_tokens == len(self.spans)

    def lengths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the number of tokens of each span, then of the padding, in a pass of `num_tokens` tokens."""
        return (*map(len, self.spans), num_tokens - self.num_tokens)

    def keep(self, name: Name, new_T: torch.Tensor) -> torch.Tensor:
        """Write this pass's values [T, ...] into the tensor cached as `name`, and return this tensor, [B, C, ...]."""
        kept = self._kept.get(name)
        if kept is None:
            # Initialized to zeros: masked values are multiplied by 0 in attention, and 0 * NaN would be NaN.
            kept = self._kept[name] = new_T.new_zeros(self.num_rows, self.capacity, *new_T.shape[1:])
        kept[self._row_T, self._position_T] = new_T[: self.num_tokens]
        return kept

    def kept(self, name: Name, num_tokens: int) -> torch.Tensor:
        """Return the entry of each token of this pass in the tensor cached as `name`, [T, ...]; zeros for padding."""
        kept = self._kept[name]
        return self._padded(kept[self._row_T, self._position_T], num_tokens)

    def update_state(self, name: Name, new: torch.Tensor) -> None:
        """Store a module's state after the last token of each span, [spans, ...]."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = new.new_zeros(self.num_rows, *new.shape[1:])
        kept[self._span_rows()] = new

    def state(self, name: Name, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a module's state for each span of this pass, [spans, *shape]; zeros for spans that start a row.

        A span is a row's tokens in this pass.
        """
        kept = self._kept.get(name)
        if kept is None:
            return torch.zeros(len(self.spans), *shape, dtype=dtype, device=self.device)
        begins = torch.tensor([span.start == 0 for span in self.spans], device=self.device)
        found = kept[self._span_rows()]
        return found.masked_fill(begins.view(-1, *[1] * len(shape)), 0)

    def _span_rows(self) -> torch.Tensor:
        return torch.tensor([span.row for span in self.spans], dtype=torch.int64, device=self.device)

    def is_used_by(self, layer: torch.nn.Module) -> bool:
        """Return whether a module of the layer has stored anything in the cache."""
        keepers = {name[0] for name in self._kept if isinstance(name, tuple)}
        return not keepers.isdisjoint(layer.modules())

    def by_row(self, new_T: torch.Tensor) -> torch.Tensor:
        """Convert [T, ...] to [B, ...] in a pass with at most one token per row; zeros for rows without a token."""
        by_row = new_T.new_zeros(self.num_rows, *new_T.shape[1:])
        by_row[self._row_T] = new_T[: self.num_tokens]
        return by_row

    def by_token(self, rows_B: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Invert `by_row`: [T, ...]."""
        return self._padded(rows_B[self._row_T], num_tokens)

    def visible(self, window: int | None = None) -> torch.Tensor:
        """Return which keys the token of each row sees in this pass, bool [B, longest row]: all keys up to the token's
        position, or the last `window` of these.
        """
        longest = max((span.end for span in self.spans), default=1)
        # 0 for rows without a token in this pass, which thus see one key: a softmax over none would be NaN.
        last_B = self._position_T.new_zeros(self.num_rows)
        last_B[self._row_T] = self._position_T
        position_S = torch.arange(longest, device=self.device)
        visible_BS = position_S <= last_B[:, None]
        if window is not None:
            visible_BS &= position_S > last_B[:, None] - window
        return visible_BS

    def _padded(self, new_T: torch.Tensor, num_tokens: int) -> torch.Tensor:
        padding = new_T.new_zeros(num_tokens - len(new_T), *new_T.shape[1:])
        return torch.cat([new_T, padding])
