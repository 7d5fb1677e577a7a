"""Test conversations that the model writes, without a model."""

import itertools
import re
from typing import Any

import pytest

from swiftlite.improve.regenerate.self_dialogues import SelfDialogues, WrittenMessage, complete_sentences
from swiftlite.improve.regenerate.steering import Steering

SPECIAL = re.compile(r"<\|im_start\|>|<\|im_end\|>")
QUESTIONS = ("What is a lighthouse for?", "How do I make a good soup?", "Why do cats purr at night?")


def dialogues(number: int = 3, num_turns: int = 1, **steering: Any) -> SelfDialogues:
    return SelfDialogues(number, num_turns, Steering(**steering), SPECIAL)


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
        ("1. Ask\n", "length", "truncated"),
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


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Name two birds. Are they", "Name two birds."),
        ('He said "Where?" and then left', 'He said "Where?"'),
        ("Sort these:\n1. pears\n2. app", "Sort these:\n1. pears"),
        ("What is 3.5 times two", ""),
        ("把下面的句子翻译成英语。你好，世", "把下面的句子翻译成英语。"),
    ],
)
def test_a_truncated_prompt_ends_after_a_complete_sentence(text, kept):
    assert complete_sentences(text) == kept


def test_a_truncated_prompt_is_kept_without_its_last_sentence():
    written = dialogues(number=1)
    write(written, f"{QUESTIONS[0]} And if there were no", finish_reason="length")
    (chat,) = written.select().conversations
    assert chat.messages == [{"role": "user", "content": QUESTIONS[0]}]


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


def test_openings_start_a_share_of_the_conversations():
    written = dialogues(number=12, num_turns=2, openings=("Translate:", "Write code"), openings_share=0.25)
    openings = [written.opening(conversation, 0) for conversation in range(12)]
    assert [opening for opening in openings if opening] == ["Translate:", "Write code", "Translate:"]
    gaps = [number for number, opening in enumerate(openings) if opening]
    assert [after - before for before, after in itertools.pairwise(gaps)] == [4, 4]
    assert not any(written.opening(conversation, 2) for conversation in range(12))
    assert all(dialogues(openings=("Translate:",)).opening(conversation, 0) for conversation in range(3))
    assert not any(dialogues(topics=("ships",)).opening(conversation, 0) for conversation in range(3))


def test_an_opening_alone_is_no_prompt():
    written = dialogues(number=2, openings=("Translate the following text:",))
    write(written, "Translate the following text: ", "Translate the following text: Guten Tag")
    assert written.select().dropped == {"too short": 1}


@pytest.mark.parametrize(("share", "period"), [(1.0, 3), (0.5, 6), (0.3, 10)])
def test_the_period_has_every_topic_and_every_opening(share, period):
    steering = Steering(topics=("ships", "cats"), openings=("A", "B", "C"), openings_share=share)
    assert steering.period == period
    assert {steering.opening(number) for number in range(period)} >= {"A", "B", "C"}
    assert Steering(topics=("ships", "cats")).period == 2
    assert Steering().period == 1
