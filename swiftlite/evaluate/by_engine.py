"""What an engine accepts of the heads' drafts, by its own counters and by channel."""

from collections.abc import Sequence
from dataclasses import replace

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
    asked: dict[str, list[Conversation]] = {}
    for chat in conversations:
        chosen = asked.setdefault(chat.channel or "", [])
        if len(chosen) < max_prompts:
            chosen.append(chat.prompt())
    by_channel = {channel: [encode_prompt(template, chat) for chat in chosen] for channel, chosen in asked.items()}
    config = replace(
        config,
        max_model_len=needed_length(
            read_model(config.model),
            [chat for chosen in asked.values() for chat in chosen],
            [prompt for prompts in by_channel.values() for prompt in prompts],
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=config.num_speculative_tokens,
        ),
    )
    sampling = Sampling(max_new_tokens, stop_token_ids=stop_token_ids(template, config.model))
    engine = start_engine(backend, config)
    try:
        counts: dict[str, DraftCounts] = {}
        for channel, prompts in sorted(by_channel.items()):
            before = engine.draft_counts()
            engine.generate(prompts, sampling)
            counts[channel] = engine.draft_counts().since(before)
    finally:
        engine.close()
    total = None
    for part in counts.values():
        total = part if total is None else total + part
    named = {channel: _describe(counts[channel], len(by_channel[channel])) for channel in counts if channel}
    assert total is not None
    return {ALL: _describe(total, sum(map(len, by_channel.values()))), **named}


def _describe(counts: DraftCounts, num_prompts: int) -> dict[str, object]:
    return {"prompts": num_prompts, **counts.to_json()}
