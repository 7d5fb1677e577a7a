"""From what `bench` measured to what a server drafts at each load."""

import json

import pytest

from swiftlite.engines.draft_schedule import DraftSchedule, read_schedule, schedule_of
from swiftlite.errors import UserError


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
    with pytest.raises(UserError, match="was measured with --infer_backend vllm, and sglang is asked for"):
        read_schedule(path, "sglang")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"options": {"infer_backend": "vllm"}, "recommendations": []}, "was cut short"),
        ({"options": {"infer_backend": "vllm"}}, "is no bench.json"),
        ({"options": {"infer_backend": "vllm"}, "recommendations": recommend((0, 2))}, "is no bench.json"),
        ({"options": {"infer_backend": "vllm"}, "recommendations": recommend((1, -1))}, "is no bench.json"),
        ({"options": {"infer_backend": "vllm"}, "recommendations": [1]}, "is no bench.json"),
        ([], "is no bench.json"),
        ("{", "is no bench.json"),
    ],
)
def test_another_file_is_refused(tmp_path, content, problem):
    path = tmp_path / "bench.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=problem):
        read_schedule(path, "vllm")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"bench\.json cannot be read: No such file"):
        read_schedule(tmp_path / "bench.json", "vllm")
