"""Test requests to vLLM's server, and reading its answers. tests/e2e/test_bench.py uses a real server."""

import base64

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.data_fields import ImageArgs
from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.client import Answer
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import ChatPrompt, ImagePrompt, PromptEncoder
from swiftlite.engines.server import metrics
from swiftlite.engines.vllm.client import CACHED_TOKENS, read_answer
from swiftlite.families.resolved import resolve
from tests.data.images import noise
from tests.engines.small_server import streamed, with_server
from tests.images import make_vision_hf_with_tokenizer
from tests.messages import naming


def test_an_answer_of_the_openai_route():
    pieces = [(0.1, "a"), (0.3, ""), (0.4, "bc")]
    events = [(seconds, {"choices": [{"text": text}], "usage": None}) for seconds, text in pieces]
    events.append((0.5, {"choices": [], "usage": {"completion_tokens": 4}}))
    assert read_answer(events) == Answer("abc", 4, 0.1, 0.4)
    # 3 steps accepted no draft, 2 steps one, and 1 step both.
    counted = {"acceptance_histogram": [3, 2, 1], "num_spec_steps": 6, "num_draft_tokens": 12}
    events[-1][1]["metrics"] = {"speculative_decoding": counted}
    assert read_answer(events).counts == DraftCounts(6, 12, (3, 1))


def test_vllm_counts_over_all_its_engines():
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
    assert metrics.counts_of("\n".join([*lines, ""]), "vllm:", 2) == DraftCounts(7, 14, (4, 1))


def test_vllm_counts_what_came_from_the_cache():
    lines = ["# TYPE vllm:prefix_cache_queries counter", "# TYPE vllm:prefix_cache_hits counter"]
    for engine, hits in ((0, 128), (1, 256)):
        lines.append(f'vllm:prefix_cache_queries_total{{engine="{engine}"}} 400.0')
        lines.append(f'vllm:prefix_cache_hits_total{{engine="{engine}"}} {hits}.0')
    assert metrics.total("\n".join([*lines, ""]), CACHED_TOKENS) == 384


@pytest.fixture
def image_prompt(tmp_path) -> ChatPrompt:
    """Return a prompt with an image as `bench` sends it."""
    hf_dir = make_vision_hf_with_tokenizer(tmp_path / "model", "qwen3_5", depth=1)
    noise(16, 16).save(tmp_path / "a.png")
    encoder = PromptEncoder.open(ImageArgs(), resolve(hf_dir), load_tokenizer(hf_dir), ENGINES["vllm"])
    row = {"query": "What is <image>?", "images": ["a.png"], "system": "Be brief."}
    chat = parse_row(row, needs_answer=False, no_images=None, source=f"{tmp_path}/rows.jsonl:1")
    prompt = encoder(chat)
    assert isinstance(prompt, ImagePrompt)
    return ChatPrompt.of(prompt, chat)


def ask_with_image(prompt: ChatPrompt, num_tokens: int):
    """Return the answer of a server that counts `num_tokens` tokens in the prompt, and the request."""
    texts = [None, "It is", " an image."]
    chunks = [{"choices": [{"delta": {"role": "assistant", "content": text}}]} for text in texts]
    usage = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": num_tokens}}
    respond, asked = streamed(*chunks, usage)
    answer = with_server("vllm", "/v1/chat/completions", respond, lambda client: client.answer(prompt, "s"))
    return answer, asked[0]


def test_a_prompt_with_images_is_a_chat_request(image_prompt, tmp_path):
    answer, request = ask_with_image(image_prompt, len(image_prompt))
    assert (answer.text, answer.num_tokens) == ("It is an image.", 4)
    system, user = request["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    before, image, after = user["content"]
    assert [before["text"], after["text"]] == ["What is ", "?"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == (tmp_path / "a.png").read_bytes()
    assert request["stop_token_ids"] == [2, 3]
    assert request["cache_salt"] == "s"
    assert "prompt" not in request


def test_a_server_that_divides_images_otherwise_is_an_error(image_prompt):
    with pytest.raises(UserError, match=naming(f"{len(image_prompt) + 1} {len(image_prompt)}")):
        ask_with_image(image_prompt, len(image_prompt) + 1)


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
