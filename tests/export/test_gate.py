"""Test the limits of an export: the acceptance of a model and of its baseline."""

import json
from typing import Any

import pytest

from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.args.commands import ExportArgs
from swiftlite.errors import UserError
from swiftlite.evaluate.evaluation_rows import load_rows
from swiftlite.export.gate import check_acceptance
from swiftlite.families.resolved import resolve
from tests.messages import has_line, mentions, naming
from tests.tiny import make_tiny_hf


@pytest.fixture
def rows(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    lines = [{"query": f"What is {n}?", "response": "It is " + "so " * n + "much."} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_gate(tmp_path, mesh, rows, caplog):
    good = make_tiny_hf(tmp_path / "good", "mimo", depth=1, with_tokenizer=True)
    shares = {}

    def check(**asked: Any) -> None:
        check_acceptance(ExportArgs(val_dataset=[rows], **asked), good, "float32", mesh)

    for share in (0.0, 1.0):
        try:
            check(min_acceptance=share)
            shares[share] = "passed"
        except UserError as error:
            shares[share] = error.problem
    assert shares[0.0] == "passed"
    assert mentions(shares[1.0], "% --min_acceptance 1.0")
    check(baseline=str(good), max_regression=0.0)
    check(min_acceptance=1.0, force=True)
    assert has_line(caplog.text, "--min_acceptance 1.0 --force")


def test_a_model_without_heads_is_a_baseline_of_nothing(tmp_path, mesh, rows):
    bare = make_tiny_hf(tmp_path / "bare", "qwen3", with_tokenizer=True)
    headed = make_tiny_hf(tmp_path / "headed", "qwen3", depth=1, with_tokenizer=True)
    _, data = load_rows(resolve(bare), [rows])
    assert teacher_forced(resolve(bare), data.val, torch_dtype="float32", mesh=mesh)["all"]["heads"] == []
    args = ExportArgs(baseline=str(bare), val_dataset=[rows], max_regression=0.0)
    check_acceptance(args, headed, "float32", mesh)


def test_a_baseline_that_went_while_exporting_is_named(tmp_path, mesh, rows):
    headed = make_tiny_hf(tmp_path / "headed", "qwen3", depth=1, with_tokenizer=True)
    args = ExportArgs(model=str(tmp_path / "run"), val_dataset=[rows], max_regression=0.0)
    with pytest.raises(UserError, match=naming("--max_regression --baseline DIR")):
        check_acceptance(args, headed, "float32", mesh)
