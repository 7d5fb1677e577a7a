"""Continue prompts greedily with the model in training and a KV cache, for any parallel layout.

Each pass processes the tokens of every row that the trunk has not processed yet: first the prompt, in parts if it is
long, then one token at a time. The heads process the rows once at the end, from the trunk's states in the cache. With
pipeline parallelism, the rows of a rank form one micro-batch per stage, so that all stages are busy.

A model with a tower, such as an image tower, runs it once per prompt, before the first pass.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from megatron.core.utils import unwrap_model

from swiftlite.acceptance.prompt_items import NO_ITEMS, PromptItems
from swiftlite.model.attention.cache import Cache, Span
from swiftlite.model.decode import CachedPass, forward_cached, tower_output
from swiftlite.model.gpt import GPTModel
from swiftlite.model.pipeline import run_pipeline
from swiftlite.model.ranks import broadcast_from_last_stage
from swiftlite.runtime.mesh import Mesh

MAX_PASS_TOKENS = 2048
"""Maximum number of tokens in one pass through the trunk, to limit the memory of activations."""
Chunks = Sequence[torch.nn.Module]
"""The chunks of a model on this rank, with or without wrappers."""


@dataclass
class GreedyRow:
    """A prompt and its continuation so far.

    Attributes:
        first: position of the first token of the continuation.
        max_length: maximum length of prompt and continuation.
        num_seen: number of tokens that the trunk has processed.
        items: the prompt's inputs for a tower, and positions along three axes; by default there are none.
    """

    tokens: list[int]
    first: int
    max_length: int
    num_seen: int = 0
    is_finished: bool = False
    items: PromptItems = NO_ITEMS

    @classmethod
    def of(
        cls, prompt: Sequence[int], max_new_tokens: int, max_length: int, items: PromptItems = NO_ITEMS
    ) -> "GreedyRow":
        """Create a row for a prompt. A prompt of at least `max_length` tokens is not continued."""
        max_length = min(len(prompt) + max_new_tokens, max_length)
        return cls(list(prompt), len(prompt), max_length, is_finished=len(prompt) >= max_length, items=items)

    def append(self, token: int, eos_token_ids: Collection[int | None]) -> None:
        self.tokens.append(token)
        self.is_finished = token in eos_token_ids or len(self.tokens) == self.max_length


@dataclass(frozen=True)
class _MicroBatch:
    """A part of the rows, and its cache on this rank.

    Attributes:
        tower_output: outputs of the tower for all rows (`decode.tower_output`); None if no row has items.
        first_items: for each row, the index of its first item among the items of all rows.
    """

    rows: Sequence[GreedyRow]
    cache: Cache
    tower_output: torch.Tensor | None
    first_items: Sequence[int]

    @property
    def has_items(self) -> bool:
        return any(len(row.items) for row in self.rows)

    @property
    def has_axes(self) -> bool:
        return any(row.items.axes for row in self.rows)

    def token_of(self, row: int, position: int) -> int:
        """Return a row's token; 0 after the known tokens, because predictions from such tokens are not used."""
        tokens = self.rows[row].tokens
        if position < len(tokens):
            return tokens[position]
        return 0

    def axis_of(self, axis: int, row: int, position: int) -> int:
        """Return the position of a row's token along one of three axes."""
        return self.rows[row].items.axes_of(position)[axis]

    def item_of(self, row: int, position: int) -> int:
        """Return the index, among the items of all rows, of the item that a row's token stands for; -1 if none."""
        item = self.rows[row].items.item_of(position)
        if item < 0:
            return item
        return self.first_items[row] + item


@dataclass(frozen=True)
class _Flat:
    """Concatenates values of the tokens in `spans`, and pads them to `num_tokens`."""

    spans: Sequence[Span]
    num_tokens: int
    device: torch.device

    def __call__(self, value_of: Callable[[int, int], int], ahead: int = 0, padding: int = 0) -> torch.Tensor:
        """Return int64 [1, T]: the values of `value_of(row, position)`, each for the position `ahead` tokens later."""
        values: list[int] = []
        for row, start, end in self.spans:
            values += [value_of(row, position) for position in range(start + ahead, end + ahead)]
        values += [padding] * (self.num_tokens - len(values))
        return torch.tensor([values], device=self.device)


class GreedyRows:
    """Rows that the model continues at the same time. All ranks run the same number of passes.

    Args:
        rows: rows of this data-parallel rank; may be empty while other ranks have rows.
    """

    def __init__(self, model: Chunks, mesh: Mesh, rows: Sequence[GreedyRow], eos_token_ids: Collection[int | None]):
        self.model = model
        self.mesh = mesh
        self.rows = rows
        self._rotary_pos_emb = cast(GPTModel, unwrap_model(model[0])).rotary_pos_emb
        self.eos_token_ids = eos_token_ids
        capacity = max((row.max_length for row in rows), default=1)
        size = mesh.pp.size()
        self._micro_batches: list[_MicroBatch] = []
        for start in range(size):
            some = rows[start::size]
            cache = Cache(len(some), capacity, mesh.device.torch_device)
            first_items = list(accumulate((len(row.items) for row in some), initial=0))
            self._micro_batches.append(_MicroBatch(some, cache, self._tower_output(some), first_items))

    @property
    def num_unfinished(self) -> int:
        return sum(not row.is_finished for row in self.rows)

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens in all continuations so far."""
        return sum(len(row.tokens) - row.first for row in self.rows)

    def step(self) -> None:
        """Run one pass. Rows whose tokens have all been processed get their next token."""
        passes = []
        complete: list[list[GreedyRow]] = []
        for batch in self._micro_batches:
            spans = list(_unseen(batch.rows))
            ends = [span.end == len(batch.rows[span.row].tokens) for span in spans]
            last_tokens = torch.tensor([len(span) for span in spans], dtype=torch.int64).cumsum(0) - 1
            passes.append(self._pass(batch, spans, last_tokens[torch.tensor(ends, dtype=torch.bool)]))
            complete.append([batch.rows[span.row] for span, is_end in zip(spans, ends, strict=True) if is_end])
            for span in spans:
                batch.rows[span.row].num_seen = span.end
        for rows, (tokens,) in zip(complete, self._run(passes, 1), strict=True):
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.append(token, self.eos_token_ids)
                if not row.is_finished and self._rotary_pos_emb.restarts_at(len(row.tokens)):
                    row.num_seen = 0

    def drafts(self, num_drafts: int) -> Iterator[tuple[GreedyRow, torch.Tensor]]:
        """Run a pass of the heads.

        For each continued row, yield the row and the predictions of the heads, int64 [K, S].

        The prediction of depth k at position s is for the token at s + k + 1. The positions are those of the prompt's
        last token and of all tokens of the continuation except the last one.
        """
        passes = []
        continued: list[list[GreedyRow]] = []
        for batch in self._micro_batches:
            spans = [Span(index, 0, row.num_seen) for index, row in enumerate(batch.rows) if row.num_seen]
            rows = [batch.rows[span.row] for span in spans]
            is_predicted: list[bool] = []
            for row in rows:
                is_predicted += [position >= row.first - 1 for position in range(row.num_seen)]
            passes.append(self._pass(batch, spans, torch.tensor(is_predicted).nonzero()[:, 0], num_drafts))
            continued.append(rows)
        for rows, predictions_KN in zip(continued, self._run(passes, num_drafts), strict=True):
            lengths = [row.num_seen - row.first + 1 for row in rows]
            yield from zip(rows, predictions_KN.split(lengths, dim=1), strict=True)

    def _pass(
        self, batch: _MicroBatch, spans: Sequence[Span], predicted: torch.Tensor, num_drafts: int | None = None
    ) -> CachedPass:
        """Return a pass of the trunk over the tokens in `spans` or, with `num_drafts`, a pass of the heads."""
        batch.cache.begin(spans)
        layout = self.mesh.layout
        multiple = 1
        if layout.sequence_parallel:
            multiple = layout.tensor_model_parallel_size
        num_tokens = max(-(-batch.cache.num_tokens // multiple), 1) * multiple
        flat = _Flat(spans, num_tokens, self.mesh.device.torch_device)
        head_tokens = axes_3BT = item_KBT = None
        depths = range(1)
        if num_drafts is not None:
            depths = range(1, num_drafts + 1)
            head_tokens = [flat(batch.token_of, depth) for depth in depths]
        if batch.has_axes:
            axes_3BT = torch.stack([flat(partial(batch.axis_of, axis)) for axis in range(3)])
        if batch.has_items:
            item_KBT = torch.stack([flat(batch.item_of, depth, padding=-1) for depth in depths])
        return CachedPass(
            flat(batch.token_of),
            flat(lambda _, position: position),
            head_tokens,
            batch.cache,
            [len(batch.rows[span.row].tokens) if num_drafts is None else span.end for span in spans],
            predicted.to(self.mesh.device.torch_device),
            axes_3BT,
            item_KBT,
            batch.tower_output,
        )

    def _tower_output(self, rows: Sequence[GreedyRow]) -> torch.Tensor | None:
        """Return the outputs of the tower for the items of the rows; None if no row has items."""
        items = [row.items.of_tower for row in rows if len(row.items)]
        if not items:
            return None
        first_chunk = cast(GPTModel, unwrap_model(self.model[0]))
        return tower_output(first_chunk, self.mesh, items)

    def _run(self, passes: Sequence[CachedPass], num_predictions: int) -> Sequence[torch.Tensor]:
        """Return the predictions of each micro-batch, int64 [num_predictions, N], on every rank of the model."""

        def forward_step(micro_batches: Iterator[CachedPass], chunk: torch.nn.Module):
            model = cast(GPTModel, unwrap_model(chunk))
            return forward_cached(model, next(micro_batches)), lambda predictions, non_loss_data: predictions

        results = run_pipeline(
            self.model,
            self.mesh,
            forward_step,
            [iter(passes) for _ in self.model],
            shapes=[each.input_ids.shape for each in passes],
            forward_only=True,
            tells_shapes=True,
            collect_non_loss_data=True,
        )
        counts = [len(micro_batch.predicted) for micro_batch in passes]
        device = self.mesh.device.torch_device
        predictions = torch.empty(num_predictions, sum(counts), dtype=torch.int64, device=device)
        if results:
            torch.cat(results, dim=1, out=predictions)
        return broadcast_from_last_stage(predictions, self.mesh).cpu().split(counts, dim=1)


def _unseen(rows: Sequence[GreedyRow]) -> Iterator[Span]:
    """Yield at most MAX_PASS_TOKENS tokens of unfinished rows that the trunk has not processed yet."""
    left = MAX_PASS_TOKENS
    for index, row in enumerate(rows):
        if row.is_finished or not left:
            continue
        end = min(len(row.tokens), row.num_seen + left)
        left -= end - row.num_seen
        yield Span(index, row.num_seen, end)
