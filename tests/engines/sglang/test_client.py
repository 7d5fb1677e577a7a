"""Test requests to SGLang's server, and reading its answers. tests/e2e/test_sglang.py uses a real server."""

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer
from swiftlite.engines.sglang.client import read_answer
from tests.engines.small_server import streamed, with_server


def test_an_answer_of_sglang_has_its_counts():
    drafts = {"spec_num_proposed_drafts": 8, "spec_correct_drafts_histogram": [2, 1, 1]}
    about = {"completion_tokens": 8, "cached_tokens": 5, **drafts}
    events = [(0.2, {"text": "a", "meta_info": {"completion_tokens": 1}}), (0.9, {"text": "abc", "meta_info": about})]
    # Of 4 steps 2 accepted the first draft and 1 both.
    assert read_answer(events, 2) == Answer("abc", 8, 0.2, 0.9, DraftCounts(4, 8, (2, 1)), cached_tokens=5)
    plain = [(0.2, {"text": "a", "meta_info": {"completion_tokens": 1, "cached_tokens": 0}})]
    assert read_answer(plain, 0) == Answer("a", 1, 0.2, 0.2, DraftCounts(0, 0, ()))


def test_what_sglang_is_asked_and_that_its_counts_add_up():
    drafts = {"spec_num_proposed_drafts": 2, "spec_correct_drafts_histogram": [1, 1]}
    about = {"completion_tokens": 3, "cached_tokens": 1, **drafts}
    respond, asked = streamed({"text": "hi", "meta_info": about})

    async def twice(client):
        await client.answer([5, 6], "s")
        await client.answer([5, 6], "t")
        return await client.draft_counts(), await client.cached_tokens()

    assert with_server("sglang", "/generate", respond, twice) == (DraftCounts(4, 4, (2,)), 2)
    sampling = {"temperature": 0.5, "max_new_tokens": 7, "stop_token_ids": [2, 3]}
    assert asked[0] == {"input_ids": [5, 6], "sampling_params": sampling, "extra_key": "s", "stream": True}
    assert asked[1]["extra_key"] == "t"
