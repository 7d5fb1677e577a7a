"""Measure on held-out prompts how many draft tokens would be accepted, before and after training.

The current model continues the prompts greedily, and the steps of an engine over the continuations are counted.
Data-parallel ranks can share experts, so all ranks run the same number of passes. A rank whose prompts are finished
runs passes without tokens.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.answers import WrittenToken, describe, written_tokens
from swiftlite.acceptance.counts import DraftCounts, count_steps, draft_steps
from swiftlite.acceptance.greedy import Chunks, GreedyRow, GreedyRows
from swiftlite.acceptance.prompt_items import PromptItems
from swiftlite.acceptance.report import MeasuredPrompts, add_run_acceptance, add_run_answers, read_summary
from swiftlite.acceptance.thumbnails import thumbnails
from swiftlite.base.log import logger
from swiftlite.data.batch import Extra
from swiftlite.data.images import ImageRef
from swiftlite.runtime.mesh import Mesh

MAX_CACHED_TOKENS = 8192
"""Maximum number of tokens in a rank's KV cache, over all rows of a batch. A batch of a single row can have more."""
PROGRESS_SECONDS = 5
"""Interval of progress messages in seconds."""
NUM_ANSWERS = 12
"""Number of prompts (the first ones) whose answers are stored token by token."""
When = Literal["before", "after"]


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt.

    Attributes:
        text: the prompt as text, for display.
        channel: label of the prompt's row, such as a domain, for which results are reported separately; "" without a
            label.
        extras: values of the prompt for its tower, such as images (`Sample.extras`).
        images: the images of the prompt, for display.
    """

    token_ids: Sequence[int]
    text: str = ""
    channel: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[ImageRef] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts, the settings for generating answers to them, and the file for the results.

    Attributes:
        path: acceptance.json of the run.
        num_drafts: draft tokens per step of an engine; 0 disables the measurement.
        prompts: held-out prompts; an empty list disables the measurement.
        max_length: the model's maximum length of prompt and answer.
        tokenizer: decodes answers; with None no answers are stored.
        extras: tensors that batches of the run contain, which the extras of prompts are collated to.
        trunk_is_frozen: whether the continuations after training are those before it.
    """

    path: Path
    mesh: Mesh
    num_drafts: int
    prompts: Sequence[Prompt]
    eos_token_ids: Collection[int | None]
    max_new_tokens: int
    max_length: int
    tokenizer: PreTrainedTokenizerBase | None = None
    extras: Sequence[Extra] = ()
    trunk_is_frozen: bool = False
    _continued: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)
    """Prompts of this rank with the continuations of a frozen trunk, by number."""

    def measure(self, when: When, model: Chunks, evaluation: Mapping[str, float]) -> None:
        """Measure the model, and add the results under `when` to the file; collective.

        Args:
            model: the model in evaluation mode.
            evaluation: metrics of the model over the held-out rows; empty if these have no labels.
        """
        if not (self.num_drafts and self.prompts):
            return
        by_channel, answers = self._continue(when, model)
        if dist.get_rank():
            return
        counts = reduce(add, by_channel.values())
        names = [f"eval_mtp_{depth}_acceptance" for depth in range(1, self.num_drafts + 1)]
        per_depth = [evaluation[name] for name in names if name in evaluation]
        named = {name: self._measured(name, by_channel[name]) for name in by_channel if name}
        add_run_answers(self.path, when, self._describe(answers))
        add_run_acceptance(self.path, when, per_depth, MeasuredPrompts(len(self.prompts), counts), named)
        shares = [count / max(counts.drafts, 1) for count in counts.accepted_per_position]
        logger.info(
            "acceptance %s training, by position of the draft: %s; %d of %d draft tokens on %d held-out prompts",
            when,
            ", ".join(f"{share:.1%}" for share in shares),
            counts.accepted,
            counts.drafted,
            len(self.prompts),
        )

    def summary(self) -> dict[str, float]:
        """Return the measured values by metric name; empty before the first measurement."""
        if not self.path.exists():
            return {}
        return read_summary(self.path)

    @torch.no_grad()
    def _continue(self, when: When, model: Chunks) -> tuple[dict[str, DraftCounts], dict[int, Sequence[WrittenToken]]]:
        """Return the draft counts of an engine by channel, and the first answers by prompt number.

        The engine drafts `num_drafts` tokens per step. The prompts are distributed over data- and context-parallel
        ranks; every rank returns the combined results.
        """
        ranks = self.mesh.dp_cp
        counts = {prompt.channel: DraftCounts(0, 0, (0,) * self.num_drafts) for prompt in self.prompts}
        answers: dict[int, Sequence[WrittenToken]] = {}
        progress = _Progress(when, len(self.prompts))
        for numbers in self._batches():
            mine = numbers[ranks.rank() :: ranks.size()]
            rows = [self._row(number) for number in mine]
            number_of = {id(row): number for row, number in zip(rows, mine, strict=True)}
            batch = GreedyRows(model, self.mesh, rows, self.eos_token_ids)
            unfinished, new_tokens = self._sum(batch.num_unfinished, 0)
            while unfinished:
                batch.step()
                unfinished, new_tokens = self._sum(batch.num_unfinished, batch.num_new_tokens)
                progress.show(len(numbers) - unfinished, new_tokens)
            progress.add(len(numbers), new_tokens)
            if not new_tokens:  # the prompt has the maximum length
                continue
            for row, drafts_KS in batch.drafts(self.num_drafts):
                number = number_of[id(row)]
                if self.trunk_is_frozen:
                    self._continued[number] = row.tokens
                # Starts at the last token of the prompt, because nothing is drafted before.
                steps = list(draft_steps(drafts_KS, torch.tensor(row.tokens[row.first - 1 :]), 1))
                counts[self.prompts[number].channel] += count_steps(steps, self.num_drafts)
                if number < NUM_ANSWERS:
                    answers[number] = written_tokens(row.tokens[row.first :], steps)
        return self._assemble(counts, answers)

    def _row(self, number: int) -> GreedyRow:
        prompt = self.prompts[number]
        items = PromptItems.of(prompt.token_ids, prompt.extras, self.extras)
        row = GreedyRow.of(prompt.token_ids, self.max_new_tokens, self.max_length, items)
        if number in self._continued:
            # One pass over known tokens instead of one per token. It predicts the last token, which ends the row.
            row.tokens = self._continued[number][:-1]
        return row

    def _assemble(
        self, counts: Mapping[str, DraftCounts], answers: Mapping[int, Sequence[WrittenToken]]
    ) -> tuple[dict[str, DraftCounts], dict[int, Sequence[WrittenToken]]]:
        """Sum counts and merge answers over the data-parallel ranks, which have different prompts."""
        summed: dict[str, DraftCounts] = {}
        for channel, mine in counts.items():
            drafts, drafted, *accepted = self._sum(mine.drafts, mine.drafted, *mine.accepted_per_position)
            summed[channel] = DraftCounts(drafts, drafted, tuple(accepted))
        rank_answers: list[dict[int, Sequence[WrittenToken]]] = [{} for _ in range(self.mesh.dp_cp.size())]
        dist.all_gather_object(rank_answers, answers, group=self.mesh.dp_cp)
        together: dict[int, Sequence[WrittenToken]] = {}
        for some in rank_answers:
            together |= some
        return summed, together

    def _measured(self, channel: str, counts: DraftCounts) -> MeasuredPrompts:
        return MeasuredPrompts(sum(prompt.channel == channel for prompt in self.prompts), counts)

    def _describe(self, answers: Mapping[int, Sequence[WrittenToken]]) -> list[dict[str, Any]]:
        """Return the answers in the format of drafts.json."""
        if self.tokenizer is None:
            return []
        described = []
        for number, answer in sorted(answers.items()):
            prompt = self.prompts[number]
            tokens = describe(self.tokenizer, answer)
            described.append({"prompt": prompt.text, "channel": prompt.channel, "tokens": tokens})
            if prompt.images:
                described[-1]["images"] = thumbnails(prompt.images)
        return described

    def _batches(self) -> Iterator[Sequence[int]]:
        """Yield the indices of the prompts that all ranks continue together, the longest prompts first."""
        numbers = sorted(range(len(self.prompts)), key=lambda number: -len(self.prompts[number]))
        while numbers:
            longest = min(len(self.prompts[numbers[0]]) + self.max_new_tokens, self.max_length)
            num_rows = max(MAX_CACHED_TOKENS // longest, 1) * self.mesh.dp_cp.size()
            yield numbers[:num_rows]
            numbers = numbers[num_rows:]

    def _sum(self, *numbers: int) -> list[int]:
        """Sum each number over the data-parallel ranks, which have different prompts."""
        sums = torch.tensor(numbers, device=self.mesh.device.torch_device)
        dist.all_reduce(sums, group=self.mesh.dp_cp)
        return sums.tolist()


class _Progress:
    """Logs a line at the start, and then a line every `PROGRESS_SECONDS`."""

    def __init__(self, when: When, num_prompts: int):
        self.when = when
        self.num_prompts = num_prompts
        self.num_done = 0
        self.num_tokens = 0
        self.begun = self.shown = time.perf_counter()
        self._log(f"continuing {num_prompts} held-out prompts")

    def show(self, num_done: int, num_tokens: int) -> None:
        """Report the finished prompts and the new tokens of the current batch."""
        now = time.perf_counter()
        if now - self.shown >= PROGRESS_SECONDS:
            self.shown = now
            speed = (self.num_tokens + num_tokens) / (now - self.begun)
            done = f"{self.num_done + num_done} of {self.num_prompts} held-out prompts continued"
            self._log(f"{done}, {speed:.0f} tokens/s")

    def add(self, num_done: int, num_tokens: int) -> None:
        """Add the prompts and the new tokens of a finished batch to the totals."""
        self.num_done += num_done
        self.num_tokens += num_tokens

    def _log(self, what: str) -> None:
        if not dist.get_rank():
            logger.info("acceptance %s training: %s", self.when, what)
