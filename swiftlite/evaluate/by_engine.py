"""What an engine accepts of the heads' drafts, by its own counters and by channel."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import add

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.teacher_forced import ALL
from swiftlite.data.conversation import Conversation
from swiftlite.data.template import ChatTemplate, stop_token_ids
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.prompts import encode_prompt, needed_length
from swiftlite.engines.served_model import read_model


def by_engine(
    backend: str,
    config: EngineConfig,
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    max_prompts: int,
) -> dict[str, dict[str, object]]:
    """`DraftCounts.to_json` for each channel, and for `all` together; the engine is started once.

    Args:
        config: its max_model_len is found here.
        conversations: their last assistant turn is what is generated.
        max_prompts: of each channel, the first ones.

    Raises:
        UserError: a prompt that the template cannot render, or that leaves no room for an answer; names its row.
    """
    template = ChatTemplate(tokenizer)
    chats = _first_of_each_channel(conversations, max_prompts)
    prompts = {channel: [encode_prompt(template, chat) for chat in chosen] for channel, chosen in chats.items()}
    asked = list(chain(*chats.values()))
    ids = list(chain(*prompts.values()))
    max_model_len = needed_length(read_model(config.model), asked, ids, max_new_tokens, config.num_speculative_tokens)
    sampling = Sampling(max_new_tokens, stop_token_ids=stop_token_ids(template, config.model))
    counts = _count(backend, replace(config, max_model_len=max_model_len), prompts, sampling)
    num_prompts = {channel: len(chosen) for channel, chosen in prompts.items()}
    result = {ALL: _describe(reduce(add, counts.values()), sum(num_prompts.values()))}
    for channel, found in counts.items():
        if channel:
            result[channel] = _describe(found, num_prompts[channel])
    return result


def _first_of_each_channel(conversations: Sequence[Conversation], max_prompts: int) -> dict[str, list[Conversation]]:
    """The first conversations of each channel without their last turns; rows without a channel are under ""."""
    chats: dict[str, list[Conversation]] = {}
    for chat in conversations:
        chosen = chats.setdefault(chat.channel or "", [])
        if len(chosen) < max_prompts:
            chosen.append(chat.prompt())
    return chats


def _count(
    backend: str, config: EngineConfig, prompts: dict[str, list[list[int]]], sampling: Sampling
) -> dict[str, DraftCounts]:
    """What one engine counts while it answers each channel's prompts."""
    counts: dict[str, DraftCounts] = {}
    engine = start_engine(backend, config)
    try:
        for channel in sorted(prompts):
            before = engine.draft_counts()
            engine.generate(prompts[channel], sampling)
            counts[channel] = engine.draft_counts().since(before)
    finally:
        engine.close()
    return counts


def _describe(counts: DraftCounts, num_prompts: int) -> dict[str, object]:
    return {"prompts": num_prompts, **counts.to_json()}
