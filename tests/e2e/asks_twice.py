"""A rollout function with a question between two answers, for tests of engines."""

from typing import Any


async def asks_twice(messages: list[dict[str, Any]], generate: Any) -> list[dict[str, Any]]:
    messages = [*messages, await generate(messages, max_tokens=12)]
    messages = [*messages, {"role": "user", "content": "and then?"}]
    return [*messages, await generate(messages)]
