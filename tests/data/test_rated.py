"""Test rows with one good or bad answer: all formats, errors that name the field, and mismatched answers."""

import numpy as np
import pytest

from swiftlite.data.rows.conversation import RowError
from swiftlite.data.rows.rated import mismatch, others, parse_rated
from swiftlite.data.rows.sources import find_rows, read_rows
from swiftlite.data.sample import make_sample
from tests.messages import mention_each, naming

ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWER], "label": True},
        {"query": "q", "response": "a", "label": True, "rejected_response": None},
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": [ASKED], "completion": [ANSWER], "label": True},
    ],
)
def test_every_format_is_the_same_answer(row):
    assert parse_rated(row).messages == [ASKED, ANSWER]
    assert parse_rated(row).trains_heads is True
    assert parse_rated({**row, "label": False}).trains_heads is False


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"query": "q", "response": "a"}, "label:"),
        ({"query": "q", "response": "a", "label": 1}, "label: 1 true false"),
        ({"query": "q", "response": "a", "label": "1"}, "label: '1' true false"),
        ({"query": "q", "response": "a", "label": ""}, "label:"),
        ({"query": "q", "response": "a", "label": True, "rejected_response": "b"}, "rejected_response:"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen:"),
        ({"prompt": "q", "completion": "", "label": True}, "completion:"),
        ({"completion": "a", "label": True}, "prompt:"),
        ({"prompt": "q", "completion": [ASKED], "label": True}, "user"),
        ([1], "row:"),
    ],
)
def test_what_is_no_rated_answer_is_named(row, problem):
    with pytest.raises(RowError, match=naming(problem)):
        parse_rated(row)


def test_bad_rows_have_their_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "q", "response": "a", "label": true}\n{"query": "q", "response": "a", "label": 3}\n')
    rows = read_rows(find_rows(str(path)), parse=parse_rated)
    assert mention_each([str(bad) for bad in rows.bad_rows], [f"{path}:2 label: 3 true false"])


@pytest.mark.parametrize("writer", ["pandas", "datasets", "words"])
def test_tables_of_text_hold_labels_as_words(tmp_path, writer):
    labels = {"query": ["q", "q", "q"], "response": ["a", "b", "c"], "label": [True, False, True]}
    path = tmp_path / "rows.csv"
    if writer == "words":
        path.write_text("query,response,label\nq,a,true\nq,b,false\nq,c,TRUE\n")
    elif writer == "pandas":
        pytest.importorskip("pandas").DataFrame(labels).to_csv(path, index=False)
    else:
        pytest.importorskip("datasets").Dataset.from_dict(labels).to_csv(path)
    rows = read_rows(find_rows(str(path)), parse=parse_rated)
    assert not rows.bad_rows
    assert [row.trains_heads for row in rows.conversations] == [True, False, True]


def sample(question: list[int], answer: list[int]):
    return make_sample([*question, *answer], [0.0] * len(question) + [1.0] * len(answer))


def test_an_answer_stands_behind_another_question():
    samples = [sample([1], [10, 11]), sample([2, 3], [20]), sample([2, 3], [30, 31, 32])]
    first, *rest = [each.companion for each in mismatch(samples, max_length=4, strategy="right", seed=0)]
    assert first is not None
    # The first row is the only one that has another question than the others.
    assert [list(each.input_ids) for each in rest if each] == [[2, 3, 10, 11]] * 2
    assert list(first.input_ids) in ([1, 20], [1, 30, 31, 32])
    assert np.array_equal(first.labels, [-100, *first.input_ids[1:]])
    cut = mismatch(samples, max_length=3, strategy="left", seed=0)[1].companion
    assert cut is not None
    assert list(cut.input_ids) == [3, 10, 11]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [[1] * 50, [2] * 25, [3, 1, 1, 1], [5, 5], [4, 2, 1, 1, 7, 2], [9, 1, 1]])
def test_no_row_meets_its_own_question(sizes, seed):
    questions = np.random.RandomState(seed).permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    found = others(questions, seed)
    assert all(questions[row] != questions[other] for row, other in enumerate(found))
    times = np.bincount(found, minlength=len(questions))
    if 2 * max(sizes) <= len(questions):
        assert (times == 1).all()
    else:
        of_largest = np.array(questions) == int(np.argmax(sizes))
        assert np.ptp(times[~of_largest]) <= 1


def test_a_resumed_run_pairs_the_same_rows():
    # Drawn in the order 2 0 1 3 4, so that the groups are 0 1, 2, 3 and 4, shifted by two places.
    assert others("aabcd", seed=0).tolist() == [2, 3, 4, 0, 1]


ORDERS = {
    "alternating": lambda rows: rows,
    "sorted": lambda rows: sorted(rows, key=lambda row: row[1]),
    "shuffled": lambda rows: [rows[place] for place in np.random.RandomState(1).permutation(len(rows))],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("answers", [1, 2], ids=["question once", "good and bad of each question"])
def test_the_share_of_good_answers_does_not_depend_on_the_order(order, answers):
    rows = [(number // answers, number % 2 == 0) for number in range(400)]
    rows = ORDERS[order](rows)
    is_good = np.array([good for _, good in rows])
    is_mismatched_good = is_good[others([question for question, _ in rows], seed=42)]
    assert is_mismatched_good.mean() == 0.5
    # Good and bad rows hear both kinds. Of 200 draws 3 standard deviations are 0.11.
    assert abs(is_mismatched_good[is_good].mean() - 0.5) < 0.11
    assert abs(is_mismatched_good[:200].mean() - 0.5) < 0.11


def test_many_rows_of_one_question():
    """Half of 200,000 rows have the same question.

    Comparing all pairs would take hours; the function takes a second.
    """
    questions = [0] * 100_000 + list(range(1, 100_001))
    found = others(questions, seed=0)
    assert not (np.array(questions)[found] == questions).any()
