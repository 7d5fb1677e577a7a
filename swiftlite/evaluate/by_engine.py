"""What an engine accepts of the heads' drafts, by its own counters and by channel."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from swiftlite.data.conversation import Conversation
from swiftlite.data.template import ChatTemplate, stop_token_ids
from swiftlite.evaluate.teacher_forced import ALL
from swiftlite.infer.engine import EngineConfig, Sampling, start_engine
from swiftlite.model.acceptance import DraftCounts


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
        conversations: their last assistant turn is what is generated.
        max_prompts: of each channel, the first ones.
    """
    template = ChatTemplate(tokenizer)
    by_channel: dict[str, list[list[int]]] = {}
    for chat in conversations:
        prompts = by_channel.setdefault(chat.channel or "", [])
        if len(prompts) < max_prompts:
            prompts.append(template.encode_prompt(chat.prompt().messages, chat.tools))
    ends = {*stop_token_ids(tokenizer, config.model), template.end_token_id} - {None}
    sampling = Sampling(max_new_tokens, stop_token_ids=tuple(sorted(ends)))
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
