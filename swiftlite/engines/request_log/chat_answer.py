"""Read the assistant's message from the response of an OpenAI-compatible server, whole or streamed."""

from typing import Any

from swiftlite.base.json_file import parse_json

NORMAL_ENDS = ("stop", "tool_calls")


class ChatAnswer:
    """The answer to a chat request, of which pieces arrive.

    A whole response is one piece with a message. A streamed response consists of server-sent events (lines that begin
    with `data:`), each with the next part of the message.

    Args:
        is_streamed: whether the response is streamed.
    """

    def __init__(self, is_streamed: bool):
        self._is_streamed = is_streamed
        self._rest = b""  # bytes of an incomplete line
        self._texts = {"content": "", "reasoning_content": ""}
        self._calls: dict[int, dict[str, Any]] = {}
        self._end: Any = None
        self._is_single = True

    def feed(self, body: bytes) -> None:
        """Read the next bytes of the response.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: the response does not have the expected format.
        """
        self._rest += body
        if not self._is_streamed:
            return
        # A chunk of the connection can end inside of a line, even inside of a character.
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                self._add(parse_json(data.decode()), "delta")

    def message(self) -> dict[str, Any] | None:
        """Return the message after the last bytes; None unless there is exactly one, which the model has ended itself.

        An answer that ends at a stop string of the request is not returned, because the model would have continued.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: the response does not have the expected format.
        """
        if not self._is_streamed:
            self._add(parse_json(self._rest.decode()), "message")
        if not self._is_single or self._end not in NORMAL_ENDS:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": self._texts["content"]}
        if self._texts["reasoning_content"]:
            message["reasoning_content"] = self._texts["reasoning_content"]
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        return message

    def _add(self, response: dict[str, Any], field: str) -> None:
        for choice in response.get("choices") or []:
            # With several answers to one request, it is unknown with which of them the conversation continues.
            if choice["index"] > 0:
                self._is_single = False
                return
            self._add_part(choice.get(field) or {})
            if choice.get("finish_reason"):
                self._end = choice["finish_reason"]
            # vLLM's finish_reason is "stop" for stop tokens and stop strings alike; its stop_reason is the string.
            if isinstance(choice.get("stop_reason"), str):
                self._end = "stop string"

    def _add_part(self, part: dict[str, Any]) -> None:
        self._texts["content"] += part.get("content") or ""
        self._texts["reasoning_content"] += part.get("reasoning") or part.get("reasoning_content") or ""
        for number, call in enumerate(part.get("tool_calls") or []):
            # The parts of a streamed call have its index. Whole responses have none, so the place counts.
            whole = self._calls.setdefault(
                call.get("index", number), {"type": "function", "function": {"name": "", "arguments": ""}}
            )
            if call.get("id"):
                whole["id"] = call["id"]
            function = call.get("function") or {}
            for name in ("name", "arguments"):
                whole["function"][name] += function.get(name) or ""
