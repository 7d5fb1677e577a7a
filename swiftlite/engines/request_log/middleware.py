"""ASGI middleware that logs served chat requests as rows for training.

A server imports `RequestLog` by its name and reads the settings from environment variables, because it passes no
arguments to middleware. Only the messages and tools of a request and the model's answer are logged: no headers, no
addresses, and no other field.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import write_line
from swiftlite.data.rows.conversation import NO_IMAGES, parse_row
from swiftlite.data.rows.image_parts import has_image_parts
from swiftlite.engines.request_log.chat_answer import ChatAnswer
from swiftlite.engines.request_log.log_file import LogFile

CLASS = "swiftlite.engines.request_log.middleware.RequestLog"
FILE, MAX_BYTES = "SWIFTLITE_LOG_REQUESTS", "SWIFTLITE_LOG_REQUESTS_MAX_BYTES"
PATH = "/v1/chat/completions"
LARGEST_REQUEST = 8_000_000
"""Maximum size of a logged request in bytes, because requests are held in memory while they are answered."""
KEPT_OF_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
NEUTRAL = {
    *("messages", "tools", "model", "user", "metadata", "request_id", "priority", "stream", "stream_options"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs"),
    *("top_logprobs", "parallel_tool_calls", "service_tier", "store"),
}
"""Fields of a request after which the answer is still what the model generates from the messages. `ChatAnswer` skips
answers that end at a limit or at a stop string."""
NEUTRAL_VALUES = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}
"""Values with which other fields change nothing."""
# Exceptions when a request or response does not have the expected format.
UNEXPECTED_FORMAT = (ValueError, TypeError, LookupError, AttributeError, UserError)

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]


def variables(path: Path, max_bytes: int) -> dict[str, str]:
    """Return the environment variables with the settings of `RequestLog`."""
    return {FILE: str(path.absolute()), MAX_BYTES: str(max_bytes)}


class RequestLog:
    """Middleware that appends each successful chat request to the file."""

    def __init__(self, app: App):
        self._app = app
        self._file = LogFile(Path(os.environ[FILE]), int(os.environ[MAX_BYTES]))
        self._has_failed = False

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATH):
            await self._app(scope, receive, send)
            return
        exchange = _Exchange()

        async def receive_and_keep() -> AsgiMessage:
            message = await receive()
            exchange.add_request(message)
            return message

        async def send_and_keep(message: AsgiMessage) -> None:
            await send(message)
            exchange.add_response(message)

        await self._app(scope, receive_and_keep, send_and_keep)
        # After the response, and in a thread: no client waits for the disk, and the server's loop continues.
        if line := exchange.line():
            await asyncio.to_thread(self._write, line)

    def _write(self, line: bytes) -> None:
        try:
            self._file.append(line)
        except OSError as error:  # serving continues
            if not self._has_failed:
                # Not the logger, which the configuration of the server's logging disables.
                write_line(f"swiftlite: --log_requests {self._file.path} cannot be written: {error}")
            self._has_failed = True


class _Exchange:
    """A request and its response, whose ASGI messages arrive in order."""

    def __init__(self) -> None:
        self._request = bytearray()
        self._answer: ChatAnswer | None = None  # None: not successful, or of an unexpected format
        self._is_complete = False

    def add_request(self, message: AsgiMessage) -> None:
        if message["type"] == "http.request" and len(self._request) <= LARGEST_REQUEST:
            self._request += message.get("body", b"")

    def add_response(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            headers = dict(message.get("headers", []))
            self._answer = ChatAnswer(headers.get(b"content-type", b"").startswith(b"text/event-stream"))
        elif message["type"] == "http.response.body" and self._answer is not None:
            try:
                self._answer.feed(message.get("body", b""))
            except UNEXPECTED_FORMAT:
                self._answer = None
            # If the client disconnects, this last message is missing: the answer is cut off, and not an example.
            self._is_complete = not message.get("more_body", False)

    def line(self) -> bytes | None:
        """Return the row as a line of a file; None if the request is not logged."""
        if self._answer is None or not self._is_complete or len(self._request) > LARGEST_REQUEST:
            return None
        try:
            answer = self._answer.message()
            if answer is None:
                return None
            row = _make_row(parse_json(self._request.decode()), answer)
            return json.dumps(row, ensure_ascii=False).encode() + b"\n"
        except UNEXPECTED_FORMAT:
            return None


def _make_row(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return a row as `sft` reads it; only its last turn is trained.

    Earlier answers of the model were logged with earlier requests, and other answers are not the model's.

    Raises:
        RowError: `sft` would not read the row, because it has a video, for example.
        ValueError: an option of the request changes what the model generates, or an image is not a data URI.
    """
    if changing := [name for name, value in request.items() if not _is_neutral(name, value)]:
        raise ValueError(f"changes what the model generates: {', '.join(changing)}")
    messages = []
    for message in [*request["messages"], answer]:
        kept = {name: message[name] for name in KEPT_OF_MESSAGES if name in message}
        if message.get("reasoning"):  # the name in vLLM's responses, which clients send back
            kept.setdefault("reasoning_content", message["reasoning"])
        messages.append(kept)
    no_images = NO_IMAGES
    contents = [message.get("content") for message in messages]
    if any(isinstance(content, list) and has_image_parts(content) for content in contents):
        no_images = None
    # The parser of training, so that each logged line can be trained on.
    conversation = parse_row({"messages": messages, "tools": request.get("tools")}, no_images=no_images)
    if not all(image.to_text().startswith("data:") for image in conversation.images):
        raise ValueError("names images that the request does not contain")
    weights = []
    for place, message in enumerate(conversation.messages, start=1):
        is_earlier_answer = message["role"] == "assistant" and place < len(conversation.messages)
        weights.append(0.0 if is_earlier_answer else 1.0)
    return replace(conversation, weights=weights).as_row()


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a field of a request does not change what the model generates."""
    if value is None or name in NEUTRAL:
        return True
    return name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]
