"""Continue a conversation of token ids: the tokens between two answers, and the tool calls of an answer.

The tokens of answers are kept as they were generated. Only the text between two answers is tokenized: the end of the
turn, the following messages, and the start of the next answer. It is found in a rendered dummy conversation, so it does
not depend on whether the template renders earlier answers as they were generated (Qwen3 removes their thinking).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from swiftlite.base.errors import UserError, clip
from swiftlite.data.rows.conversation import Message, RowError
from swiftlite.data.template import MARK, ChatTemplate, check_ids

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
"""A tool call in the format of Hermes and Qwen: JSON with a name and arguments."""
TEMPLATE_HINT = "use a model whose template renders tools, and calls as <tool_call>{JSON}</tool_call>"


class Turns:
    """A continuation of conversations by a model's chat template.

    Args:
        template: the chat template.
        schemas: JSON schemas of the tools (`--tools`); empty without.
        stop_token_ids: tokens that end an answer.

    Raises:
        UserError: the template does not support conversations of several turns, or the tools.
    """

    def __init__(self, template: ChatTemplate, schemas: Sequence[dict[str, Any]], stop_token_ids: Sequence[int]):
        self.template = template
        self.schemas = list(schemas)
        self._stops = frozenset(stop_token_ids)
        self._known_roles: set[str] = set()
        self._has_parser = getattr(template.tokenizer, "response_template", None) is not None
        given = "--tools" if schemas else "--rollout_func"
        if template.end_token_id is None:
            problem = f"{given}: the chat template does not end the assistant's turns with a single token"
            raise UserError(problem, "use a model with another template, such as ChatML")
        try:
            self.after(-1, [{"role": "tool" if schemas else "user", "content": "a"}])
            self._renders_calls = self._has_calls_of_hermes()
            if schemas:
                self._check_tools()
        except RowError as error:
            raise UserError(f"{given}: {error.problem}", TEMPLATE_HINT if schemas else error.hint) from None

    def after(self, last: int, messages: Sequence[Message]) -> list[int]:
        """Return the tokens after an answer: the end of its turn, these messages, and the start of the next answer.

        Args:
            last: last token of the answer, which can be the end of its turn.

        Raises:
            RowError: the template does not support these messages.
        """
        for role in {message["role"] for message in messages} - self._known_roles:
            # Some templates skip roles that they do not know, without an error.
            if "swiftlite" not in self._text_between([{"role": role, "content": "swiftlite"}]):
                raise RowError("messages", f"the chat template drops messages of the role {clip(role, 40)}")
            self._known_roles.add(role)
        ids = self.template.tokenize(self.template.turn_end + self._text_between(messages))
        end = self.template.end_token_id
        if end not in ids[:2]:  # the first one is a space, with tokenizers like Llama 2's
            raise RowError("messages", "the end of the assistant's turn cannot be located in the rendered text")
        _, _, vocab_size, _ = self.template.settings
        check_ids(ids, self.template.tokenizer, vocab_size, "messages")
        # If the engine stopped at the end token, the answer has it already; an answer that was cut off needs it.
        return ids[ids.index(end) + (last == end) :]

    def _text_between(self, messages: Sequence[Message]) -> str:
        """Return the text after the end-of-turn token of an answer."""
        answer: Message = {"role": "assistant", "content": MARK}
        names = [message.get("name", "tool") for message in messages if message["role"] == "tool"]
        if names:  # templates can require calls before their results
            calls = [call_of(name, {"mark": MARK}) for name in names]
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
        dummy = [{"role": "user", "content": "a"}, answer, *messages]
        text = self.template.render(dummy, self.schemas or None, add_generation_prompt=True)
        _, mark, after = text.rpartition(MARK)
        _, end, rest = after.partition(self.template.turn_end)
        if not mark or not end:
            problem = "the chat template does not end turns of the assistant with a token"
            raise RowError("messages", problem + ", or does not render tool calls" * bool(names))
        return rest

    def message(self, ids: Sequence[int], prompt: Sequence[int]) -> Message:
        """Return an answer as a message, with `tool_calls` if it has any. A call that is not valid has an "error"."""
        if self._has_parser and (parsed := self._parsed(ids, prompt)):
            return parsed
        # The end of the turn belongs to the template, not to the text.
        text_ids = list(ids[:-1] if ids[-1] in self._stops else ids)
        text = self.template.decode(text_ids)
        calls = [_read_call(found) for found in HERMES.findall(text)]
        if self._has_parser or not self._renders_calls or not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": text.partition("<tool_call>")[0].rstrip(), "tool_calls": calls}

    def _parsed(self, ids: Sequence[int], prompt: Sequence[int]) -> Message | None:
        """Return an answer as the tokenizer's `response_template` describes it; None if it has another form."""
        try:
            tokenizer: Any = self.template.tokenizer
            parsed = tokenizer.parse_response(list(ids), prefix=list(prompt), tools=self.schemas or None)
            calls = [_checked_call(call["function"]) for call in parsed.get("tool_calls") or ()]
            message = {"role": "assistant", "content": str(parsed.get("content") or "")}
            json.dumps(calls, allow_nan=False)
        except Exception:  # of any kind, for text that a model generates
            return None
        return {**message, "tool_calls": calls} if calls else message

    def _has_calls_of_hermes(self) -> bool:
        call = call_of("swiftlite", {"a": "b"})
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            text = self.template.render([*turns, {"role": "tool", "content": "a"}], None)
        except RowError:  # only --tools requires calls
            return False
        return [_read_call(found) for found in HERMES.findall(text)] == [call]

    def _check_tools(self) -> None:
        """Check that the template renders tools, and that their calls can be parsed."""
        user: list[Message] = [{"role": "user", "content": "a"}]
        text = self.template.render(user, self.schemas, add_generation_prompt=True)
        names = [schema["function"]["name"] for schema in self.schemas]
        if missing := [name for name in names if name not in text]:
            raise RowError("tools", f"the chat template does not render the tool {missing[0]}")
        if not self._has_parser and not self._renders_calls:
            problem = "the tokenizer has no response_template, and the chat template has another format of tool calls"
            raise RowError("tools", problem)


def call_of(name: str, arguments: Any, error: str = "") -> dict[str, Any]:
    """Return a tool call of a message."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "error": error} if error else call


def _not_json(constant: str) -> None:
    """Reject NaN and infinities, which Python reads: a message with NaN would not be equal to itself."""
    raise ValueError(f"{constant} is not JSON")


def _read_call(text: str) -> dict[str, Any]:
    try:
        call = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        return call_of("", {}, f"the call is not JSON: {clip(str(error), 200)}")
    return _checked_call(call)


def _checked_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return call_of("", {}, "the call has no name")
    return call_of(call["name"], call.get("arguments") or {})
