"""Test acceptance by category and by length of prompts."""

import json

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import EvaluateArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.client import Answer
from swiftlite.serve.bench.measure import ServerResult
from swiftlite.serve.bench.results import ConcurrencyResult, Round
from swiftlite.serve.evaluate.command import run
from swiftlite.serve.prompt_groups import by_length, group_table, groups_to_json, length_group
from tests.e2e.conftest import Commands
from tests.messages import has_line, naming
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize(
    ("num_tokens", "group"),
    [
        (0, "short"),
        (700, "short"),
        (730, "1k"),
        (1100, "1k"),
        (8000, "8k"),
        (8600, "8k"),
        (32768, "32k"),
        (10**6, "32k"),
    ],
)
def test_lengths_are_those_of_speed_bench(num_tokens, group):
    assert length_group(num_tokens) == group
    assert sorted(["32k", "2k", "short", "16k"], key=by_length) == ["short", "2k", "16k", "32k"]


def test_metrics_have_the_names_of_vllm():
    found = groups_to_json({"math": (3, DraftCounts(10, 20, (6, 3)))})
    assert found["math"] == {
        "num_prompts": 3,
        "spec_decode_acceptance_rate": 45.0,
        "spec_decode_acceptance_length": 1.9,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 9,
        "spec_decode_per_position_acceptance_rates": [0.6, 0.3],
    }
    assert has_line(group_table("", "category", found).text(), "math 3 10 1.90 45.0% 60.0% 30.0%")


def test_answers_of_a_server_are_counted_by_group():
    counts = [DraftCounts(1, 2, (1, 0)), DraftCounts(2, 4, (2, 1)), None]
    answers = [Answer("", 1, 0.1, 0.2, each) for each in counts]
    result = ConcurrencyResult(1, [Round(answers, 1.0), Round(answers, 1.0)], None, 0.0)
    server = ServerResult(2, "", 0.0, [result])
    assert server.draft_groups(["a", "b", "b"]) == {
        "a": (2, DraftCounts(2, 4, (2, 0))),
        "b": (2, DraftCounts(4, 8, (4, 2))),
    }
    assert ServerResult(0, "", 0.0, []).draft_groups(["a"]) == {}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "hf"
    return make_tiny_hf(directory, "qwen3", depth=1, with_tokenizer=True, max_position_embeddings=2048)


def test_questions_are_evaluated_with_an_engine(model, tmp_path):
    """Counts by category and by length sum up to those of all prompts; rows without answers have no other figures."""
    rows = [
        {"question_id": 0, "category": "coding", "turns": ["word1 number2"]},
        {"question_id": 1, "category": "math", "turns": ["word3 number4"]},
        {"question_id": 2, "category": "math", "turns": ["word3 number4 " * 70]},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": str(model), "dataset": [str(file)], "output_dir": str(tmp_path / "E")}
    with pytest.raises(UserError, match=naming("--dataset question.jsonl --infer_backend")):
        run(EvaluateArgs(**options))
    words = ["evaluate", "--model", model, "--dataset", file, "--output_dir", tmp_path / "E"]
    words += ["--infer_backend", "transformers", "--torch_dtype", "float32", "--max_new_tokens", 12]
    done = Commands(tmp_path).ok(*words)
    found = json.loads((tmp_path / "E" / "evaluation.json").read_text())["model"]
    assert "teacher_forced" not in found
    assert "trunk" not in found
    total = found["transformers"]["all"]
    assert total["prompts"] == 3
    assert found["by_category"].keys() == {"coding", "math"}
    assert list(found["by_prompt_length"]) == ["short", "1k"]
    for kind in ("by_category", "by_prompt_length"):
        groups = found[kind].values()
        assert sum(group["num_prompts"] for group in groups) == 3
        assert sum(group["spec_decode_num_drafts"] for group in groups) == total["drafts"]
        assert sum(group["spec_decode_accepted_tokens"] for group in groups) == total["accepted"]
    assert has_line(done.stdout, "math 2")
