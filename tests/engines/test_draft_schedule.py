"""Test the draft schedule that follows from the measurements of `bench`."""

import json

import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import DraftSchedule, read_schedule, schedule_of
from tests.messages import naming


def recommend(*chosen: tuple[int, int]) -> list[dict[str, int]]:
    return [{"concurrency": concurrency, "num_speculative_tokens": number} for concurrency, number in chosen]


def test_a_number_holds_up_to_the_next_concurrency_that_was_measured():
    assert schedule_of({1: 3, 8: 1, 32: 0}).numbers == {1: 3, 8: 1, 32: 0}
    assert schedule_of({32: 0, 16: 2, 4: 2}).numbers == {1: 2, 32: 0}  # no smaller one was measured than 4
    constant = schedule_of({1: 2, 8: 2})
    assert (constant.numbers, constant.largest, constant.is_constant) == ({1: 2}, 2, True)


def test_a_file_of_bench(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"options": {"infer_backend": "vllm"}, "recommendations": recommend((1, 2), (8, 0))}))
    assert read_schedule(path, "vllm") == DraftSchedule({1: 2, 8: 0})
    with pytest.raises(UserError, match=naming("--infer_backend vllm sglang")):
        read_schedule(path, "sglang")


@pytest.mark.parametrize(
    "content",
    [
        {"options": {"infer_backend": "vllm"}, "recommendations": []},
        {"options": {"infer_backend": "vllm"}},
        {"options": {"infer_backend": "vllm"}, "recommendations": recommend((0, 2))},
        {"options": {"infer_backend": "vllm"}, "recommendations": recommend((1, -1))},
        {"options": {"infer_backend": "vllm"}, "recommendations": [1]},
        [],
        "{",
    ],
)
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=naming(f"--draft_schedule {path}")):
        read_schedule(path, "vllm")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"--draft_schedule .*bench\.json.*No such file"):
        read_schedule(tmp_path / "bench.json", "vllm")
