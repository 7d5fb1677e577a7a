"""What is asked of a server, and how its answers are read; real ones are asked in tests/e2e/test_bench.py."""

import asyncio
import json

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from swiftlite.acceptance.counts import DraftCounts  # noqa: E402
from swiftlite.bench.client import ask_all, connect, read_metrics, read_openai, read_sglang  # noqa: E402
from swiftlite.bench.figures import Answer  # noqa: E402
from swiftlite.engines.engine import Sampling  # noqa: E402
from swiftlite.errors import UserError  # noqa: E402

SAMPLING = Sampling(7, stop_token_ids=(2, 3))


def test_an_answer_of_the_openai_route():
    pieces = [(0.1, "a"), (0.3, ""), (0.4, "bc")]
    events = [(seconds, {"choices": [{"text": text}], "usage": None}) for seconds, text in pieces]
    events.append((0.5, {"choices": [], "usage": {"completion_tokens": 4}}))
    assert read_openai(events) == Answer("abc", 4, 0.1, 0.4)


def test_vllm_counts_over_all_its_engines():
    pytest.importorskip("prometheus_client")
    counters = {"num_drafts": (3, 4), "num_draft_tokens": (6, 8), "num_accepted_tokens": (4, 1)}
    lines = []
    for name, values in counters.items():
        lines.append(f"# TYPE vllm:spec_decode_{name} counter")
        for engine, value in enumerate(values):
            lines.append(f'vllm:spec_decode_{name}_total{{engine="{engine}",model_name="m"}} {value}.0')
            lines.append(f'vllm:spec_decode_{name}_created{{engine="{engine}",model_name="m"}} 1.7e9')
    lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
    for engine, position, value in ((0, 0, 3), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        labels = f'engine="{engine}",model_name="m",position="{position}"'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {value}.0")
    assert read_metrics("\n".join([*lines, ""]), 2) == DraftCounts(7, 14, (4, 1))


def test_an_answer_of_sglang_has_its_counts():
    about = {"completion_tokens": 8, "spec_num_proposed_drafts": 8, "spec_correct_drafts_histogram": [2, 1, 1]}
    events = [(0.2, {"text": "a", "meta_info": {"completion_tokens": 1}}), (0.9, {"text": "abc", "meta_info": about})]
    # Of 4 steps 2 accepted the first draft and 1 both.
    assert read_sglang(events, 2) == Answer("abc", 8, 0.2, 0.9, DraftCounts(4, 8, (2, 1)))
    plain = [(0.2, {"text": "a", "meta_info": {"completion_tokens": 1}})]
    assert read_sglang(plain, 0) == Answer("a", 1, 0.2, 0.2, DraftCounts(0, 0, ()))


class Counting:
    """Answers later prompts sooner, and notes how many it has under way."""

    def __init__(self):
        self.under_way, self.most = 0, 0

    async def answer(self, prompt, salt):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02 / prompt[0])
        self.under_way -= 1
        return Answer(f"{prompt[0]} {salt}", 1, 0.0, 0.0)

    async def draft_counts(self):
        raise NotImplementedError


def test_prompts_are_answered_in_order_so_many_at_once():
    client = Counting()
    done = asyncio.run(ask_all(client, [[number] for number in range(1, 8)], 3, "x"))
    assert [answer.text for answer in done.answers] == [f"{number} x" for number in range(1, 8)]
    assert client.most == 3
    assert done.seconds > 0


def with_server(backend: str, path: str, respond, use):
    """What `use` makes of a client whose server answers POST requests to `path` by `respond`."""

    async def run():
        app = web.Application()
        app.router.add_post(path, respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with connect(backend, f"http://127.0.0.1:{runner.addresses[0][1]}", SAMPLING, 1) as client:
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def streamed(*events: dict):
    """A handler that streams these, in pieces that end where no event does."""
    asked = []

    async def respond(request):
        asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        for start in range(0, len(body), 7):
            await response.write(body[start : start + 7].encode())
        return response

    return respond, asked


def test_what_vllm_is_asked():
    respond, asked = streamed({"choices": [{"text": "hi"}]}, {"choices": [], "usage": {"completion_tokens": 2}})
    answer = with_server("vllm", "/v1/completions", respond, lambda client: client.answer([5, 6], "s"))
    assert (answer.text, answer.num_tokens) == ("hi", 2)
    assert 0 < answer.seconds_to_first == answer.seconds
    assert asked == [
        {
            "prompt": [5, 6],
            "max_tokens": 7,
            "stop_token_ids": [2, 3],
            "temperature": 0,
            "cache_salt": "s",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_what_sglang_is_asked_and_that_its_counts_add_up():
    about = {"completion_tokens": 3, "spec_num_proposed_drafts": 2, "spec_correct_drafts_histogram": [1, 1]}
    respond, asked = streamed({"text": "hi", "meta_info": about})

    async def twice(client):
        await client.answer([5, 6], "s")
        await client.answer([5, 6], "t")
        return await client.draft_counts()

    assert with_server("sglang", "/generate", respond, twice) == DraftCounts(4, 4, (2,))
    sampling = {"temperature": 0, "max_new_tokens": 7, "stop_token_ids": [2, 3]}
    assert asked[0] == {"input_ids": [5, 6], "sampling_params": sampling, "extra_key": "s", "stream": True}
    assert asked[1]["extra_key"] == "t"


def test_a_server_that_refuses():
    async def refuse(request):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    halfway, _ = streamed({"choices": [{"text": "hi"}]}, {"error": {"message": "too long"}})
    for respond in (refuse, halfway):
        with pytest.raises(UserError, match=r"the server refuses a prompt: .*too long"):
            with_server("vllm", "/v1/completions", respond, lambda client: client.answer([5, 6], "s"))
