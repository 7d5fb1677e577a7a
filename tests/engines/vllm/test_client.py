"""Test requests to vLLM's server, and reading its answers. tests/e2e/test_bench.py uses a real server."""

import pytest

pytest.importorskip("aiohttp")

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer
from swiftlite.engines.vllm.client import read_answer
from swiftlite.engines.vllm.metrics import read_cached_tokens, read_metrics
from tests.engines.small_server import streamed, with_server


def test_an_answer_of_the_openai_route():
    pieces = [(0.1, "a"), (0.3, ""), (0.4, "bc")]
    events = [(seconds, {"choices": [{"text": text}], "usage": None}) for seconds, text in pieces]
    events.append((0.5, {"choices": [], "usage": {"completion_tokens": 4}}))
    assert read_answer(events) == Answer("abc", 4, 0.1, 0.4)


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


def test_vllm_counts_what_came_from_the_cache():
    pytest.importorskip("prometheus_client")
    lines = ["# TYPE vllm:prefix_cache_queries counter", "# TYPE vllm:prefix_cache_hits counter"]
    for engine, hits in ((0, 128), (1, 256)):
        lines.append(f'vllm:prefix_cache_queries_total{{engine="{engine}"}} 400.0')
        lines.append(f'vllm:prefix_cache_hits_total{{engine="{engine}"}} {hits}.0')
    assert read_cached_tokens("\n".join([*lines, ""])) == 384


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
            "temperature": 0.5,
            "cache_salt": "s",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
