"""Test the questions of the quickstart: their entries exist, each occurs once, and they are always the same."""

import pytest

from swiftlite.data.rows.conversation import parse_row


@pytest.fixture
def script(load_script):
    return load_script("make_question_dataset")


def test_rows_are_questions_that_swiftlite_reads(script):
    rows = script.make_rows(200)
    assert len(rows) == 200
    conversations = [parse_row(row, needs_answer=False) for row in rows]
    assert all(chat.answer() is None for chat in conversations)
    assert {chat.channel for chat in conversations} == set(script.QUESTIONS)
    asked = [chat.messages[0]["content"] for chat in conversations]
    assert len(set(asked)) == len(asked)


def test_rows_are_the_same_each_time_and_the_first_of_more(script):
    assert script.make_rows(50) == script.make_rows(100)[:50]


def test_a_question_quotes_its_entry(script):
    entry = next(entry for entry in script.stdlib_entries() if entry.name == "shutil.copytree")
    row = script.question(entry, "example")
    (asked,) = [message["content"] for message in row["messages"]]
    assert asked == "Show a short example of how to use `copytree` from Python's module `shutil`."
    (text,) = [message["content"] for message in script.question(entry, "summary")["messages"]]
    assert text.endswith(script.documentation(entry))
