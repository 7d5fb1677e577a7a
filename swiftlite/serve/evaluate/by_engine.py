"""Generate answers with an engine, and read from its counters how many draft tokens it accepted, by channel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.teacher_forced import ALL
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.sample import Sample, make_sample
from swiftlite.data.template import stop_token_ids
from swiftlite.engines.engine import Completion, Engine, EngineConfig, Sampling, start_engine
from swiftlite.engines.prompts import ImagePrompt, PromptEncoder, most_images, needed_length
from swiftlite.serve.evaluate.confidence import by_confidence


@dataclass(frozen=True)
class EngineStats:
    """The measurement of one engine.

    Attributes:
        by_channel: for each channel and for "all", the number of prompts (`prompts`) and the draft counts of greedy
            answers (as from `DraftCounts.to_json`).
        drawn_by_channel: the same figures as `by_channel` for sampled answers; empty without sampling.
        answers: prompts and greedy answers as samples whose labels are the answers.
        num_speculative_tokens: number of draft tokens per step.
        by_confidence: speed at each draft confidence, from `confidence.by_confidence`; empty if no confidences were
            given.
    """

    by_channel: dict[str, dict[str, object]]
    drawn_by_channel: dict[str, dict[str, object]]
    answers: list[Sample]
    num_speculative_tokens: int
    by_confidence: list[dict[str, Any]]


def by_engine(
    backend: str,
    config: EngineConfig,
    conversations: Sequence[Conversation],
    encoder: PromptEncoder,
    *,
    max_new_tokens: int,
    max_prompts: int,
    temperature: float = 0.0,
    confidences: Sequence[float] = (),
) -> EngineStats:
    """Start an engine once, and generate answers to the prompts of all channels.

    Args:
        config: configuration of the engine. Its max_model_len and max_images are replaced by what the prompts need.
        conversations: conversations whose last assistant turn is generated.
        max_prompts: maximum number of prompts per channel; the first ones are used.
        temperature: if above 0, answers are also sampled at this temperature.
        confidences: values of `Sampling.draft_confidence` whose speeds are compared.

    Raises:
        UserError: the template cannot render a prompt, or a prompt leaves no room for an answer; the error names the
            row.
    """
    chats = _first_of_each_channel(conversations, max_prompts)
    prompts = {channel: [encoder(chat) for chat in chosen] for channel, chosen in chats.items()}
    asked = list(chain(*chats.values()))
    ids = list(chain(*prompts.values()))
    max_model_len = needed_length(config.model, asked, ids, max_new_tokens, config.num_speculative_tokens)
    greedy = Sampling(max_new_tokens, stop_token_ids=stop_token_ids(encoder.template, config.model.directory))
    engine = start_engine(backend, replace(config, max_model_len=max_model_len, max_images=most_images(ids)))
    try:
        drawn: dict[str, dict[str, object]] = {}
        if temperature:  # first, because an engine can reject it
            drawn, _ = _ask(engine, prompts, replace(greedy, temperature=temperature))
        counted, answers = _ask(engine, prompts, greedy)
        measured = by_confidence(engine, ids, greedy, confidences)
        return EngineStats(counted, drawn, answers, engine.num_speculative_tokens, measured)
    finally:
        engine.close()


def _ask(
    engine: Engine, prompts: Mapping[str, Sequence[Sequence[int]]], sampling: Sampling
) -> tuple[dict[str, dict[str, object]], list[Sample]]:
    """Generate answers, and return the engine's draft counts for each channel and for "all", and the answers."""
    counts: dict[str, DraftCounts] = {}
    answers: list[Sample] = []
    for channel in sorted(prompts):
        before = engine.draft_counts()
        completions = engine.generate(prompts[channel], sampling)
        counts[channel] = engine.draft_counts().since(before)
        answers += _samples(prompts[channel], completions, channel or None)
    described = {ALL: _describe(reduce(add, counts.values()), len(answers))}
    for channel, found in counts.items():
        if channel:
            described[channel] = _describe(found, len(prompts[channel]))
    return described, answers


def _first_of_each_channel(conversations: Sequence[Conversation], max_prompts: int) -> dict[str, list[Conversation]]:
    """Return the first conversations of each channel ("" for none), without their last turns."""
    chats: dict[str, list[Conversation]] = {}
    for chat in conversations:
        chosen = chats.setdefault(chat.channel or "", [])
        if len(chosen) < max_prompts:
            chosen.append(chat.prompt())
    return chats


def _samples(prompts: Sequence[Sequence[int]], completions: Sequence[Completion], channel: str | None) -> list[Sample]:
    """Return prompts and answers as samples with exactly the engine's tokens.

    Tokenizing their text again could give other tokens.
    """
    samples = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if isinstance(prompt, ImagePrompt):
            samples.append(prompt.with_answer(completion.token_ids, channel))
            continue
        weights = [0.0] * len(prompt) + [1.0] * len(completion.token_ids)
        samples.append(make_sample([*prompt, *completion.token_ids], weights, channel=channel))
    return samples


def _describe(counts: DraftCounts, num_prompts: int) -> dict[str, object]:
    return {"prompts": num_prompts, **counts.to_json()}
