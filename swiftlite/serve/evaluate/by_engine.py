"""Generate answers with an engine, and read from its counters how many draft tokens it accepted, by channel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

from swiftlite.acceptance.teacher_forced import ALL
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.sample import Sample, make_sample
from swiftlite.data.template import stop_token_ids
from swiftlite.engines.engine import Completion, Engine, EngineConfig, Sampling, start_engine
from swiftlite.engines.prompts import ImagePrompt, PromptEncoder, most_images, needed_length
from swiftlite.serve.evaluate.confidence import by_confidence
from swiftlite.serve.prompt_groups import Groups, add_to, by_length, length_group


@dataclass(frozen=True)
class EngineStats:
    """The measurement of one engine.

    Attributes:
        by_channel: for each channel and for "all", the number of prompts (`prompts`) and the draft counts of greedy
            answers (as from `DraftCounts.to_json`).
        drawn_by_channel: the same figures as `by_channel` for sampled answers; empty without sampling.
        by_category: number of prompts and draft counts of greedy answers by channel, without those of "all".
        by_length: number of prompts and draft counts of greedy answers, by length of the prompt (`length_group`).
        answers: prompts and greedy answers as samples whose labels are the answers.
        num_speculative_tokens: number of draft tokens per step.
        by_confidence: speed at each draft confidence, from `confidence.by_confidence`; empty if no confidences were
            given.
    """

    by_channel: dict[str, dict[str, object]]
    drawn_by_channel: dict[str, dict[str, object]]
    by_category: Groups
    by_length: Groups
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
            drawn = _describe(_ask(engine, prompts, replace(greedy, temperature=temperature)))
        asked = _ask(engine, prompts, greedy)
        measured = by_confidence(engine, ids, greedy, confidences)
        categories = {channel: found for channel, found in asked.by_channel.items() if channel}
        return EngineStats(
            _describe(asked), drawn, categories, asked.by_length, asked.answers, engine.num_speculative_tokens, measured
        )
    finally:
        engine.close()


@dataclass(frozen=True)
class _Asked:
    """Draft counts by channel ("" for none) and by length of the prompt, and the answers."""

    by_channel: Groups
    by_length: Groups
    answers: list[Sample]


def _ask(engine: Engine, prompts: Mapping[str, Sequence[Sequence[int]]], sampling: Sampling) -> _Asked:
    """Generate answers by channel and length of the prompts, and count drafts."""
    channels: Groups = {}
    lengths: Groups = {}
    answers: list[Sample] = []
    for channel in sorted(prompts):
        for length, group in _by_length(prompts[channel]).items():
            before = engine.draft_counts()
            completions = engine.generate(group, sampling)
            found = engine.draft_counts().since(before)
            add_to(channels, channel, len(group), found)
            add_to(lengths, length, len(group), found)
            answers += _samples(group, completions, channel or None)
    return _Asked(channels, {length: lengths[length] for length in sorted(lengths, key=by_length)}, answers)


def _by_length(prompts: Sequence[Sequence[int]]) -> dict[str, list[Sequence[int]]]:
    """Return the prompts by their `length_group`."""
    found: dict[str, list[Sequence[int]]] = {}
    for prompt in prompts:
        found.setdefault(length_group(len(prompt)), []).append(prompt)
    return found


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


def _describe(asked: _Asked) -> dict[str, dict[str, object]]:
    """Return the draft counts for "all" and for each channel, in the format of evaluation.json."""
    total = reduce(add, (counts for _, counts in asked.by_channel.values()))
    found: dict[str, dict[str, object]] = {ALL: {"prompts": len(asked.answers), **total.to_json()}}
    for channel, (number, counts) in asked.by_channel.items():
        if channel:
            found[channel] = {"prompts": number, **counts.to_json()}
    return found
