"""Define the requests of the transformers engine's server, in OpenAI's format.

A field of None is a missing field. Values of another type are refused, and so are fields that the server would ignore.
"""

import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from swiftlite.engines.engine import Sampling

GREEDY = 1e-5
"""Smaller temperatures are 0: logits divided by them would be infinite."""
WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
"""Fields that do not change an answer."""
DEFAULTS: dict[str, Any] = {"add_generation_prompt": True, "best_of": 1, "response_format": {"type": "text"}}
"""Values of other fields that request what the server does anyway, as empty values and 0 do."""
TOOL_CHOICES = ("auto", "none")
"""Values of `tool_choice` that do not force a call: the server returns calls as text."""
INSTEAD = {
    "chat_template_kwargs": "it is an option of the server",
    "logprobs": "/v1/completions supports it",
    "echo": "/v1/completions supports it",
}

Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]


class Request(BaseModel):
    """The fields of completions and of chats."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Share, Field(gt=0)] | None = None
    top_k: int | None = None
    """0 and vLLM's -1 are all tokens."""
    min_p: Share | None = None
    # Logits divided by a smaller one could be infinite.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None

    @model_validator(mode="after")
    def _has_no_other_field(self) -> Self:
        others = self.model_extra or {}
        for name in others.keys() - WITHOUT_EFFECT:
            if name == "tool_choice" and others[name] in TOOL_CHOICES:
                continue
            if others[name] and others[name] != DEFAULTS.get(name):
                raise ValueError(f"{name} is not supported here; {INSTEAD.get(name, 'omit it')}")
        return self

    def sampling(self, max_tokens: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return the settings of the engine.

        Args:
            max_tokens: maximum length of an answer if the request does not set it.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = self.seed
        if seed is None:  # random, so that sampled answers differ as in other servers
            seed = random.getrandbits(31)
        return Sampling(
            self.max_completion_tokens or self.max_tokens or max_tokens,
            0.0 if temperature < GREEDY else temperature,
            self.top_p or 1.0,
            seed,
            stop_token_ids=stop_token_ids,
            log_p=True,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
        )

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class CompletionRequest(Request):
    """A request to /v1/completions; a prompt is a text or tokens."""

    prompt: Text | Tokens | Annotated[list[Text] | list[Tokens], Field(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """Not None: also return log-probabilities, each with one alternative."""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts of a request for one answer or for several."""
        first = self.prompt[0]
        if isinstance(self.prompt, str) or isinstance(first, int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None

    @field_validator("messages")
    @classmethod
    def _with_texts(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_with_text(message) for message in messages]


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text may have been sent in parts, which vLLM joins with line breaks as well."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"this server reads only parts with a text, and not {part!r:.200}")
    return message | {"content": "\n".join(part["text"] for part in parts)}


def describe(error: ValidationError) -> str:
    """Return the first problem of an invalid request in one line."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return "the request is not a JSON object" if first["type"] == "model_type" else message
    name = first["loc"][0]
    if first["type"] == "missing":
        return f"{name} is missing"
    if name == "prompt":
        return "prompt is not a text or a list of tokens, or several of them; none may be empty"
    return f"{name} {first['input']!r:.200}: {message}"
