"""Test report.json with counted examples."""

import numpy as np
import pytest

from swiftlite.args.commands import RegenerateArgs
from swiftlite.data.rows.conversation import parse_row
from swiftlite.improve.regenerate.dataset_rows import make_rows
from swiftlite.improve.regenerate.dialogue import Dialogues, RegeneratedTurn, Request
from swiftlite.improve.regenerate.report import lengths, make_report, summary_line
from swiftlite.improve.regenerate.self_dialogues import SelfPrompts
from tests.messages import mention_each

TWO_TURNS = {"query": "q2", "response": "a2", "history": [["q1", "a1"]]}


@pytest.mark.parametrize("numbers", [[7], [3, 1], list(range(1, 11)), [5, 5, 90, 2, 2, 64, 17]])
def test_lengths(numbers):
    found = lengths(numbers)
    assert found == {
        "sum": sum(numbers),
        "min": min(numbers),
        "median": sorted(numbers)[(len(numbers) - 1) // 2],
        "p90": sorted(numbers)[int(np.ceil(len(numbers) * 0.9)) - 1],
        "max": max(numbers),
    }
    assert all(type(number) is int for number in found.values())


def test_what_became_of_everything():
    """Of seven rows, two have equal prompts and one has none. Five conversations end, each in a different way."""
    chats = [parse_row(TWO_TURNS, source=f"a:{number}") for number in range(7)]
    asked = {number: chats[number] for number in range(5)}
    dialogues = Dialogues(asked, 1, drop_truncated=True)
    said = {
        0: [RegeneratedTurn("x", "stop", 1, 10), RegeneratedTurn("y", "stop", 1, 20)],
        1: [RegeneratedTurn("x", "stop", 1, 30), RegeneratedTurn("y", "length", 1, 64)],
        2: [RegeneratedTurn("x", "length", 1, 64)],
        3: [RegeneratedTurn("", "stop", 1, 1)],
        4: [RegeneratedTurn("x", "stop", 1, 12)],  # and the next prompt has no room
    }
    for row, answers in said.items():
        for turn, answer in enumerate(answers):
            dialogues.answers[Request(turn, row, 0)] = answer
    rows = make_rows(dialogues, [], 0.0, 0)
    report = make_report(dialogues, rows, chats, 6, SelfPrompts())
    assert report == {
        "dataset": {"rows": 7, "asked": 5, "equal": 1, "only_calls": 1},
        "conversations": {"last_turn": 1, "truncated": 2, "empty": 1, "no_room": 1},
        "answers": {
            "total": 7,
            "stop": 5,
            "length": 2,
            "completion_tokens": {"sum": 201, "min": 1, "median": 20, "p90": 64, "max": 64},
        },
        "rows": {"total": 3, "regenerated": 3, "gold": 0, "gold_fraction": 0.0, "equal": 0},
    }
    lines = summary_line(report, RegenerateArgs(max_new_tokens=64, drop_truncated=True))
    assert mention_each(lines, ["5 7 1", "7 1 20 p90 64", "--max_new_tokens 64 2", "1", "1", "3 0"])


def test_a_report_of_nothing():
    dialogues = Dialogues({0: parse_row(TWO_TURNS)}, 1, drop_truncated=False)
    report = make_report(dialogues, make_rows(dialogues, [], 0.0, 0), [parse_row(TWO_TURNS)], 1, SelfPrompts())
    assert report["conversations"]["no_room"] == 1
    assert report["answers"]["completion_tokens"]["max"] == 0
    assert report["rows"] == {"total": 0, "regenerated": 0, "gold": 0, "gold_fraction": 0.0, "equal": 0}
