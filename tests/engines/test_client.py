"""Test the stream that all clients read, and the times of an answer."""

import pytest
from aiohttp import web

from swiftlite.base.errors import UserError
from swiftlite.engines.client import Answer
from tests.engines.small_server import streamed, with_server


def test_time_per_token_is_of_the_tokens_after_the_first():
    assert Answer("a", 5, 0.1, 0.5).seconds_per_token == pytest.approx(0.1)
    assert Answer("a", 1, 0.1, 0.1).seconds_per_token is None


def test_a_server_that_refuses():
    async def refuse(request):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    halfway, _ = streamed({"choices": [{"text": "hi"}]}, {"error": {"message": "too long"}})
    for respond in (refuse, halfway):
        with pytest.raises(UserError, match="too long"):
            with_server("vllm", "/v1/completions", respond, lambda client: client.answer([5, 6], "s"))
