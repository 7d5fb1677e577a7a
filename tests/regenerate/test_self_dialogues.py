"""Conversations that the model writes, without a model."""

import re
from typing import Any

import pytest

from swiftlite.regenerate.self_dialogues import SelfDialogues, WrittenMessage

SPECIAL = re.compile(r"<\|im_start\|>|<\|im_end\|>")
QUESTIONS = ("What is a lighthouse for?", "How do I make a good soup?", "Why do cats purr at night?")


def dialogues(number: int = 3, num_turns: int = 1, system: str | None = None, topics: tuple[str, ...] = ()):
    return SelfDialogues(number, num_turns, system, topics, SPECIAL)


def write(target: SelfDialogues, *texts: str, position: int = 0, finish_reason: Any = "stop") -> None:
    for conversation, text in enumerate(texts):
        target.written[conversation, position] = WrittenMessage(text, finish_reason)


def test_usable_prompts_are_kept_in_order():
    written = dialogues(system="Be brief.")
    write(written, *(f"  {question}\n" for question in QUESTIONS))
    result = written.select()
    assert [chat.messages for chat in result.conversations] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    assert [len(chat.weights) for chat in result.conversations] == [2, 2, 2]
    assert (result.total, result.dropped) == (3, {})


@pytest.mark.parametrize(
    ("text", "finish_reason", "reason"),
    [
        (QUESTIONS[1], "length", "truncated"),
        ("What?<|im_start|>assistant", "stop", "with special tokens"),
        ("  Hi!  ", "stop", "too short"),
        ("what is a LIGHTHOUSE for", "stop", "near-duplicates"),
    ],
)
def test_each_dropped_prompt_is_counted_once(text, finish_reason, reason):
    written = dialogues()
    write(written, QUESTIONS[0], "", QUESTIONS[2])
    written.written[1, 0] = WrittenMessage(text, finish_reason)
    result = written.select()
    assert [chat.messages[0]["content"] for chat in result.conversations] == [QUESTIONS[0], QUESTIONS[2]]
    assert result.dropped == {reason: 1}
    assert "2 of 3" in str(result)
    assert reason in str(result)


def test_user_and_assistant_write_in_turn():
    written = dialogues(num_turns=2)
    assert written.num_messages == 3
    assert written.unfinished(0) == [0, 1, 2]
    write(written, *QUESTIONS)
    written.written[1, 0] = WrittenMessage(QUESTIONS[1], "length")
    assert (written.unfinished(0), written.unfinished(1)) == ([], [0, 2])
    write(written, "For ships.", "Nobody asked.", "  ", position=1)
    assert written.unfinished(2) == [0]  # an empty answer ends the third
    assert [message["role"] for message in written.context(0)] == ["user", "assistant"]
    write(written, "And without ships?", position=2)
    (chat,) = written.select().conversations
    assert [message["content"] for message in chat.messages] == [QUESTIONS[0], "For ships.", "And without ships?"]


def test_an_answer_between_turns_may_be_truncated():
    written = dialogues(number=1, num_turns=2)
    write(written, QUESTIONS[0])
    write(written, "For ships, which", position=1, finish_reason="length")
    assert written.unfinished(2) == [0]


def test_a_conversation_without_room_is_dropped():
    written = dialogues(number=1, num_turns=2)
    write(written, QUESTIONS[0])
    assert written.select().dropped == {"truncated": 1}


def test_topics_steer_user_turns_alone():
    written = dialogues(num_turns=2, system="Be brief.", topics=("ships", "cats"))
    systems = [written.context(conversation)[0]["content"] for conversation in range(3)]
    assert all(system.startswith("Be brief.") for system in systems)
    assert ["ships" in system for system in systems] == [True, False, True]
    assert ["cats" in system for system in systems] == [False, True, False]
    write(written, *QUESTIONS)
    assert written.context(0)[0]["content"] == "Be brief."  # for the answer
    write(written, *QUESTIONS, position=1)
    assert "ships" in written.context(0)[0]["content"]
    write(written, *QUESTIONS, position=2)
    assert {chat.messages[0]["content"] for chat in written.select().conversations} == {"Be brief."}
    without_system = dialogues(topics=("ships",))
    assert without_system.context(0)[0]["content"].startswith("The next request")
