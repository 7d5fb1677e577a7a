"""Test the rows of the new dataset: duplicates are removed, and the share of original rows is correct."""

import pytest

from swiftlite.data.rows.conversation import Conversation, parse_row
from swiftlite.improve.regenerate.dataset_rows import gold_rows, make_rows
from swiftlite.improve.regenerate.dialogue import Dialogues, RegeneratedTurn, Request
from tests.messages import has_line


def chat(number: int) -> Conversation:
    row = {"query": f"q{number}", "response": f"gold {number}", "channel": "code"}
    return parse_row(row, source=f"a.jsonl:{number}")


def answered(texts: dict[tuple[int, int], str], num_answers: int = 1) -> Dialogues:
    """Return conversations of one turn with these texts, by row and answer."""
    chats = {row: chat(row) for row, _ in texts}
    dialogues = Dialogues(chats, num_answers, drop_truncated=False)
    dialogues.answers = {Request(0, *each): RegeneratedTurn(text, "stop", 5, len(text)) for each, text in texts.items()}
    return dialogues


def test_a_row_has_what_was_said_and_where_it_comes_from():
    rows = make_rows(answered({(3, 0): "mine"}), [], 0.0, seed=0)
    assert rows.in_order == [
        {
            "messages": [{"role": "user", "content": "q3"}, {"role": "assistant", "content": "mine"}],
            "channel": "code",
            "source": "a.jsonl:3",
            "kind": "regenerated",
            "answer": 1,
            "finish_reasons": ["stop"],
            "completion_tokens": [4],
        }
    ]


def test_equal_answers_to_one_prompt_are_kept_once():
    texts = {(0, 0): "same", (0, 1): "same", (0, 2): "other", (1, 0): "same", (1, 1): "", (1, 2): "same"}
    rows = make_rows(answered(texts, num_answers=3), [], 0.0, seed=0)
    kept = [(row["source"], row["messages"][-1]["content"], row["answer"]) for row in rows.in_order]
    assert kept == [("a.jsonl:0", "same", 1), ("a.jsonl:0", "other", 3), ("a.jsonl:1", "same", 1)]
    assert rows.num_equal == 2  # the empty one is another matter


@pytest.mark.parametrize(("fraction", "num_gold"), [(0.0, 0), (0.1, 1), (0.25, 3), (0.5, 10)])
def test_gold_rows_are_that_part_of_all(fraction, num_gold):
    chats = [chat(number) for number in range(40)]
    dialogues = answered({(number, 0): "mine" for number in range(10)})
    rows = make_rows(dialogues, gold_rows(chats), fraction, seed=1)
    assert len(rows.regenerated) == 10
    assert len(rows.gold) == num_gold
    assert abs(num_gold / (10 + num_gold) - fraction) < 1 / 20
    sources = [int(row["source"].partition(":")[2]) for row in rows.in_order]
    assert sources == sorted(sources)
    for number, row in rows.gold:
        assert row == chats[number].as_row() | {"source": f"a.jsonl:{number}", "kind": "gold"}
    assert make_rows(dialogues, gold_rows(chats), fraction, seed=1) == rows


def test_another_seed_draws_other_gold_rows():
    gold = gold_rows([chat(number) for number in range(40)])
    dialogues = answered({(number, 0): "mine" for number in range(10)})
    drawn = {seed: sorted(number for number, _ in make_rows(dialogues, gold, 0.5, seed).gold) for seed in (1, 2)}
    assert drawn[1] != drawn[2]
    assert len(set(drawn[1])) == 10


def test_all_gold_rows_are_taken_where_more_are_asked_for(caplog):
    gold = gold_rows([chat(0), chat(1)])
    rows = make_rows(answered({(number, 0): "mine" for number in range(6)}), gold, 0.5, seed=0)
    assert len(rows.gold) == 2
    assert has_line(caplog.text, "--gold_fraction 0.5 6 2")


def test_a_row_without_an_answer_is_no_gold():
    open_question = parse_row({"query": "q"}, needs_answer=False)
    assert gold_rows([open_question, chat(1)]) == gold_rows([open_question, chat(1)])[-1:]
