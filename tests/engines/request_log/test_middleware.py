"""Test the middleware in a real server whose answers come from a function."""

import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swiftlite.base.log import logger
from swiftlite.data.dataset import load_prompts, load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.images import read_image
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.engines.request_log import middleware
from swiftlite.engines.request_log.middleware import RequestLog, variables
from tests.data.images import data_uri, noise
from tests.messages import mentions
from tests.tiny import make_tiny_hf

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is part of vLLM")
SECRET = "sk-not-to-be-logged"
QUESTION = {"role": "user", "content": "Where is the garden?"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "garden"}'}}


def whole(message: dict | None = None, finish_reason: str = "stop", **choice: Any) -> dict:
    message = message or {"role": "assistant", "content": "Behind the house. Ünïcode 日本"}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}]}


def events(*deltas: dict, finish_reason: str | None = "stop") -> list[dict]:
    """Return the events of a streamed answer, with usage at its end."""
    made: list[dict] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    made += [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    made.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
    return [*made, {"choices": [], "usage": {"completion_tokens": 3}}]


class Server:
    """A server that answers with the result of `respond`. A list is streamed; None in it raises an error."""

    def __init__(self, file: Path):
        self.file = file
        self.respond: Callable[[Any], Any] = lambda request: whole()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        response = self.respond(json.loads(body))
        status = 200
        if isinstance(response, int):
            status, response = response, whole()
        kind = b"text/event-stream; charset=utf-8" if isinstance(response, list) else b"application/json"
        headers = [(b"content-type", kind), (b"x-request-id", SECRET.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if isinstance(response, list):
            for event in response:
                if event is None:
                    raise RuntimeError("the engine died")
                data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
                for start in range(0, len(data), 11):  # which also divides characters
                    piece = data[start : start + 11]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            response = b"data: [DONE]\n\n"
        else:
            response = json.dumps(response).encode()
        await send({"type": "http.response.body", "body": response})

    def ask(self, path: str = "/v1/chat/completions", **request: Any) -> bytes:
        body = json.dumps({"model": "m", "user": SECRET, "messages": [QUESTION]} | request).encode()
        headers = {"Authorization": f"Bearer {SECRET}", "X-Forwarded-For": "203.0.113.7"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers)) as response:
                return response.read()
        except (OSError, http.client.HTTPException):
            return b""

    def rows(self) -> list[dict]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    app = Server(tmp_path / "log.jsonl")
    for name, value in variables(app.file, 100_000).items():
        monkeypatch.setenv(name, value)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # so that requests wait until the server has started
        app.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running = uvicorn.Server(uvicorn.Config(RequestLog(app), log_level="critical"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        yield app
        running.should_exit = True
        thread.join()


LAST = {"role": "user", "content": "The last one."}


def logged(server: Server, number: int) -> list[dict]:
    """Wait until the file has this many rows, because it is written after the response, and return its rows."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        rows = server.rows()
        if len(rows) >= number:
            return rows
        time.sleep(0.01)
    raise AssertionError(f"only {server.rows()} was logged")


def nothing_is_logged(server: Server) -> bool:
    """Return whether the next request, which is logged, is the first row."""
    server.respond = lambda request: whole()
    server.ask(messages=[LAST])
    return [row["messages"][0] for row in logged(server, 1)] == [LAST]


def test_a_row_is_what_was_asked_and_answered(server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    answer = {"role": "assistant", "content": "There.", "reasoning": "Look."}  # as vLLM returned it
    history = [{"role": "system", "content": "Be brief."}, QUESTION, answer]
    server.ask(messages=[*history, {"role": "user", "content": [{"type": "text", "text": "Where?"}]}], tools=tools)
    (row,) = logged(server, 1)
    assert row == {
        "messages": [
            history[0],
            QUESTION,
            {"role": "assistant", "content": "There.", "reasoning_content": "Look.", "loss_scale": 0.0},
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "Behind the house. Ünïcode 日本"},
        ],
        "tools": tools,
    }


def test_images_are_logged_as_data_uris(server, tmp_path):
    uri = data_uri(noise(16, 16))
    parts = [{"type": "image_url", "image_url": {"url": uri, "detail": "high"}}, {"type": "text", "text": "What?"}]
    server.ask(messages=[{"role": "user", "content": parts}])
    (row,) = logged(server, 1)
    assert row["messages"][0] == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    assert row["images"] == [uri]
    again = parse_row(row, no_images=None)
    assert read_image(again.images[0], tmp_path).width == 16


def test_tags_in_texts_are_logged(server):
    server.ask(messages=[{"role": "user", "content": "What is <image>?"}])
    (row,) = logged(server, 1)
    assert row["messages"][0]["content"] == "What is <image>?"


def test_streams_are_assembled(server):
    server.respond = lambda request: events({"content": "Behind "}, {"content": "the 家."}, {"content": None})
    streamed = server.ask(stream=True)
    assert streamed.count(b"data:") == 7
    logged(server, 1)
    called = [
        {"reasoning": "I should "},
        {"reasoning": "look."},
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"garden"}'}}]},
    ]
    server.respond = lambda request: events(*called, finish_reason="tool_calls")
    server.ask(stream=True)
    logged(server, 2)
    server.respond = lambda request: whole({"content": None, "tool_calls": [CALL]}, "tool_calls")
    server.ask()
    one, call, same_call = [row["messages"][1] for row in logged(server, 3)]
    assert one == {"role": "assistant", "content": "Behind the 家."}
    assert call.pop("reasoning_content") == "I should look."
    assert call == same_call
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "garden"}}


@pytest.mark.parametrize(
    ("response", "request_"),
    [
        (400, {}),
        (whole(finish_reason="length"), {}),
        (whole(stop_reason="\n"), {"stop": ["\n"]}),
        ({"choices": whole()["choices"] + [{**whole()["choices"][0], "index": 1}]}, {"n": 2}),
        (whole({"content": ""}), {}),
        (None, {}),
        ({"error": "overloaded"}, {}),
        (whole(), {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (whole(), {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]}),
        (whole(), {"messages": "text"}),
        # What the model would not generate from the messages alone.
        (whole(stop_reason=304), {"stop_token_ids": [304]}),
        (whole(), {"structured_outputs": {"choice": ["yes"]}}),
        (whole(), {"response_format": {"type": "json_object"}}),
        (whole(), {"repetition_penalty": 1.2}),
        (whole(), {"add_generation_prompt": False}),
        (whole(), {"an_option_of_later_releases": 1}),
        (whole(), {"messages": [QUESTION, {"role": "assistant", "content": "It is"}]}),  # continues an answer
        (events({"content": "Behind"}, finish_reason="length"), {}),
        (events({"content": "Behind"})[:-2], {}),
        ([*events({"content": "Behind"})[:2], None], {}),
        ([*events({"content": "Behind"})[:2], {"error": {"code": 500}}], {}),
        ([*events({"content": "Behind"}), {"choices": [{"index": 1, "delta": {"content": "Left"}}]}], {}),
    ],
)
def test_other_responses_are_no_rows(server, response, request_):
    server.respond = lambda request: response
    server.ask(**request_)
    assert nothing_is_logged(server)


def test_options_that_change_nothing_are_logged(server):
    """Check the defaults that clients send explicitly, and sampling of the model's own distribution."""
    server.ask(n=1, repetition_penalty=1.0, presence_penalty=0.0, response_format={"type": "text"}, bad_words=None)
    server.ask(temperature=0.7, top_p=0.9, max_tokens=100, stop=["END"])
    logged(server, 2)


def test_other_routes_and_large_requests_are_no_rows(server, monkeypatch):
    monkeypatch.setattr(middleware, "LARGEST_REQUEST", 1000)
    server.ask("/v1/completions")
    server.ask(messages=[{"role": "user", "content": "a" * 1000}])
    assert nothing_is_logged(server)


def test_parallel_requests_stay_apart_and_no_secret_is_written(server, tmp_path):
    server.respond = lambda request: events(*({"content": word} for word in request["messages"][0]["content"].split()))
    texts = [f"{number} " * 50 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: server.ask(messages=[{"role": "user", "content": text}], stream=True), texts))
    rows = logged(server, 16)
    assert sorted(row["messages"][0]["content"] for row in rows) == sorted(texts)
    for row in rows:
        assert row["messages"][1]["content"] == row["messages"][0]["content"].replace(" ", "")
    for path in tmp_path.iterdir():
        content = path.read_text()
        assert SECRET not in content
        assert "203.0.113.7" not in content


def test_the_file_is_a_dataset(server, tmp_path):
    server.ask()
    server.ask(messages=[QUESTION, {"role": "assistant", "content": "There."}, {"role": "user", "content": "Sure?"}])
    assert len(logged(server, 2)) == 2
    model = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True)
    encoder = ConversationEncoder(ChatTemplate(load_tokenizer(model)), 512, "delete")
    data = load_train_val(encoder, [str(server.file)])
    assert data.report.total.kept == 2
    assert sorted(len(chat.messages) for chat in load_prompts([str(server.file)])) == [2, 4]


def test_serving_continues_if_the_file_cannot_be_written(server, capfd):
    """Check that the warning does not depend on the logger, because servers configure logging themselves."""
    logger.disabled = True
    server.file.mkdir()
    try:
        assert server.ask() == server.ask() != b""
        while not (err := capfd.readouterr().err):
            time.sleep(0.01)
    finally:
        logger.disabled = False
    assert mentions(err, f"--log_requests {server.file}")
