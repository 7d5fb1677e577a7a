"""Test which turns are regenerated and their prompts, with examples."""

from typing import Literal

import pytest

from swiftlite.data.rows.conversation import Conversation, parse_row
from swiftlite.improve.regenerate.dialogue import (
    Dialogues,
    RegeneratedTurn,
    Request,
    answered_turns,
    distinct,
    prompt_after,
)


def turn(role: str, content: str, **fields) -> dict:
    return {"role": role, "content": content, **fields}


CALL = {"type": "function", "function": {"name": "get", "arguments": {}}}
SYSTEM = turn("system", "s")
ASKED = [turn("user", "q1"), turn("assistant", "a1"), turn("user", "q2"), turn("assistant", "a2")]
CALLED = [
    turn("user", "q1"),
    turn("assistant", "", tool_calls=[CALL]),
    turn("tool", "20"),
    turn("assistant", "a1"),
    turn("user", "q2"),
]


def chat(messages: list[dict], **fields) -> Conversation:
    return parse_row({"messages": messages, **fields}, needs_answer=False, source="a.jsonl:1")


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        (ASKED, [1, 3]),
        ([SYSTEM, *ASKED], [2, 4]),
        (ASKED[:3], [1, 3]),
        (ASKED[:1], [1]),
        (CALLED, [3, 5]),
        (CALLED[:3], [3]),
        (CALLED[:2], []),
        # A call that stands in the text is known by the result behind it.
        ([turn("user", "q"), turn("assistant", "get()"), turn("tool", "20"), turn("assistant", "a")], [3]),
    ],
)
def test_turns_that_are_answered(messages, turns):
    assert answered_turns(chat(messages)) == turns


def test_a_prompt_holds_what_the_model_said_before_it():
    row = chat([SYSTEM, *ASKED], channel="code")
    assert prompt_after(row, []).messages == [SYSTEM, ASKED[0]]
    second = prompt_after(row, ["mine"])
    assert second.messages == [SYSTEM, ASKED[0], turn("assistant", "mine"), ASKED[2]]
    assert (second.channel, second.source) == ("code", "a.jsonl:1")
    assert row.messages == [SYSTEM, *ASKED]


def test_of_an_answer_nothing_but_its_place_is_taken_over():
    first = turn("assistant", "a1", reasoning_content="hm", loss_scale=3)
    asked = prompt_after(chat([ASKED[0], first, *ASKED[2:]]), ["mine"])
    assert asked.messages[1] == turn("assistant", "mine")
    assert asked.weights == [1.0, 1.0, 1.0]


def test_calls_of_tools_stay_and_do_not_train():
    asked = prompt_after(chat(CALLED), ["mine"])
    assert asked.messages == [*CALLED[:3], turn("assistant", "mine"), CALLED[4]]
    assert asked.weights == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_the_same_prompts_are_asked_once():
    tools = [{"type": "function", "function": {"name": "get"}}]
    chats = [
        chat(ASKED),
        chat([ASKED[0], turn("assistant", "another"), *ASKED[2:]]),  # other answers
        chat(ASKED[:3]),  # none
        chat([SYSTEM, *ASKED]),
        chat(ASKED, tools=tools),
        chat(ASKED[:2]),
        chat([{"content": "q1", "role": "user"}]),  # as the one before it
    ]
    assert list(distinct(dict(enumerate(chats)))) == [0, 3, 4, 5]


def said(text: str, finish_reason: Literal["stop", "length"] = "stop") -> RegeneratedTurn:
    return RegeneratedTurn(text, finish_reason, 1, 1)


def test_requests_come_turn_by_turn():
    dialogues = Dialogues({4: chat(ASKED[:2]), 7: chat(ASKED)}, num_answers=2, drop_truncated=False)
    numbers = [(request.turn, request.row, request.answer) for request in dialogues.requests]
    assert numbers == [(0, 4, 0), (0, 4, 1), (0, 7, 0), (0, 7, 1), (1, 7, 0), (1, 7, 1)]


@pytest.mark.parametrize(
    ("answers", "drop_truncated", "kept", "end", "num_open"),
    [
        ([], False, [], "no_room", 3),
        ([said("x")], False, ["x"], "no_room", 2),
        ([said("x"), said("y"), said("z")], False, ["x", "y", "z"], "last_turn", 0),
        ([said("x"), said(" \n")], False, ["x"], "empty", 0),
        ([said("x"), said(" ", "length")], True, ["x"], "empty", 0),
        ([said("x", "length")], False, ["x"], "no_room", 2),
        ([said("x", "length")], True, [], "truncated", 0),
        ([said("x"), said("y"), said("z", "length")], True, ["x", "y"], "truncated", 0),
        # Asked for by an earlier command, without --drop_truncated.
        ([said("x", "length"), said("y"), said("z")], True, [], "truncated", 0),
    ],
)
def test_where_a_conversation_ends(answers, drop_truncated, kept, end, num_open):
    row = chat([*ASKED, turn("user", "q3")])
    dialogues = Dialogues({0: row}, num_answers=1, drop_truncated=drop_truncated)
    dialogues.answers = {Request(turn, 0, 0): answer for turn, answer in enumerate(answers)}
    assert dialogues.kept(0, 0) == kept
    assert dialogues.end(0, 0) == end
    assert dialogues.num_open == num_open


def test_what_is_asked_next():
    dialogues = Dialogues({0: chat(ASKED)}, num_answers=2, drop_truncated=True)
    dialogues.answers = {Request(0, 0, 0): said("x"), Request(0, 0, 1): said("cut", "length")}
    asked = dialogues.prompt(Request(1, 0, 0))
    assert asked is not None
    assert asked.messages == [ASKED[0], turn("assistant", "x"), ASKED[2]]
    assert dialogues.prompt(Request(1, 0, 1)) is None
