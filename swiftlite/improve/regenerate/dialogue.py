"""Conversations that the model answers turn by turn, with its previous answers in the prompt.

This module uses neither engines nor files: `generate.py` generates answers, and `dataset_rows.py` creates a dataset.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.rows.image_parts import RowImage, num_images, texts_of

End = Literal["last_turn", "truncated", "empty", "no_room"]
"""Why a conversation ended: after its last turn, at a truncated or an empty answer, or without room for an answer."""


@dataclass(frozen=True)
class RegeneratedTurn:
    """The model's answer in one turn, as stored in answers.jsonl.

    Attributes:
        finish_reason: "length" if the answer was truncated, else "stop".
    """

    response: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Request:
    """A request for one answer. All numbers count from 0.

    Attributes:
        turn: number of the turn, counting only turns that the model answers.
        row: number of the row that contains the conversation.
        answer: number of the answer; a conversation can be answered several times.
    """

    turn: int
    row: int
    answer: int


def answered_turns(chat: Conversation) -> list[int]:
    """Return the indices of the assistant turns to regenerate.

    If the conversation ends with a question, the last index is the one after the question. Turns with tool calls are
    not regenerated, because the tool results that follow depend on them.
    """
    roles = [message["role"] for message in chat.messages]
    turns = []
    for place, message in enumerate(chat.messages):
        is_call = "tool_calls" in message or roles[place + 1 : place + 2] == ["tool"]
        if message["role"] == "assistant" and not is_call:
            turns.append(place)
    if roles[-1] != "assistant":
        turns.append(len(roles))
    return turns


def prompt_after(chat: Conversation, answers: Sequence[str]) -> Conversation:
    """Return the prompt that follows the model's `answers` to the first turns of a conversation.

    The model's answers are marked for training. Tool calls of the row are not, because the model did not generate them.
    The loss weights of the row are ignored, because they apply to the original answers.
    """
    turns = answered_turns(chat)
    end = turns[len(answers)]
    messages = chat.messages[:end]
    weights = chat.weights[:end]
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            weights[place] = 0.0
    for place, answer in zip(turns, answers, strict=False):
        messages[place] = {"role": "assistant", "content": answer}
        weights[place] = 1.0
    images = chat.images
    if images:
        images = _images_without(chat, turns[: len(answers)], end)
    return replace(chat, messages=messages, weights=weights, images=images)


def _images_without(chat: Conversation, answered: Sequence[int], end: int) -> tuple[RowImage, ...]:
    """Return the images of the turns before `end`, except those of the turns that are answered again."""
    left = iter(chat.images)
    kept: list[RowImage] = []
    for place, message in enumerate(chat.messages[:end]):
        images = [next(left) for _ in range(num_images([message]))]
        if place not in answered:
            kept += images
    return tuple(kept)


def longest_prompt(chat: Conversation) -> Conversation:
    """Return the prompt of a conversation's last turn. Previous turns have the original answers of the row."""
    turns = answered_turns(chat)
    return prompt_after(chat, ["".join(texts_of(chat.messages[place])) for place in turns[:-1]])


def distinct(chats: Mapping[int, Conversation]) -> dict[int, Conversation]:
    """Return the conversations without those whose prompt equals that of an earlier conversation.

    Args:
        chats: conversations with a prompt, by number of the row.
    """
    found: dict[str, int] = {}
    for row, chat in chats.items():
        asked = prompt_after(chat, [""] * (len(answered_turns(chat)) - 1))
        images = [image.to_text() for image in asked.images]
        found.setdefault(json.dumps([asked.messages, asked.tools, images], sort_keys=True), row)
    return {row: chats[row] for row in found.values()}


class Dialogues:
    """The state of the conversations that the model answers.

    Args:
        chats: conversations by number of the row.
        num_answers: number of times that each whole conversation is answered.
        drop_truncated: whether a truncated answer is removed and ends its conversation.

    Attributes:
        requests: all requests: first turns of all conversations, then second turns, and so on.
        answers: answers of the model.
    """

    def __init__(self, chats: Mapping[int, Conversation], num_answers: int, drop_truncated: bool):
        self.chats = chats
        self._num_answers = num_answers
        self._drop_truncated = drop_truncated
        self._num_turns = {row: len(answered_turns(chat)) for row, chat in chats.items()}
        self.requests = []
        for turn, row in itertools.product(range(self.longest), chats):
            if turn < self._num_turns[row]:
                self.requests += [Request(turn, row, answer) for answer in range(num_answers)]
        self.answers: dict[Request, RegeneratedTurn] = {}

    @property
    def longest(self) -> int:
        """Number of turns of the longest conversation."""
        return max(self._num_turns.values(), default=0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (row number, answer number) of every conversation."""
        return itertools.product(self.chats, range(self._num_answers))

    def turns_so_far(self, row: int, answer: int) -> list[RegeneratedTurn]:
        """Return the answers of one conversation so far. If an answer cannot be trained on, it is the last one."""
        said = []
        for turn in range(self._num_turns[row]):
            found = self.answers.get(Request(turn, row, answer))
            if found is None:
                break
            said.append(found)
            if not self.is_kept(found):
                break
        return said

    def is_kept(self, answer: RegeneratedTurn) -> bool:
        """Return whether an answer can be trained on. Otherwise the conversation ends."""
        return bool(answer.response.strip()) and not (self._drop_truncated and answer.finish_reason == "length")

    def kept(self, row: int, answer: int) -> list[str]:
        """Return the texts of the answers of one conversation that can be trained on."""
        return [said.response for said in self.turns_so_far(row, answer) if self.is_kept(said)]

    @property
    def num_open(self) -> int:
        """Number of missing answers of unfinished conversations."""
        open_rows = {each for each in self if all(map(self.is_kept, self.turns_so_far(*each)))}
        missing = [request for request in self.requests if request not in self.answers]
        return sum((request.row, request.answer) in open_rows for request in missing)

    def prompt(self, request: Request) -> Conversation | None:
        """Return the prompt of a request; None if the conversation has not reached this turn, or ended before it."""
        kept = self.kept(request.row, request.answer)
        if len(kept) < request.turn:
            return None
        return prompt_after(self.chats[request.row], kept[: request.turn])

    def end(self, row: int, answer: int) -> End:
        """Return how a conversation ended, after all requests."""
        said = self.turns_so_far(row, answer)
        if said and not said[-1].response.strip():
            return "empty"
        if said and not self.is_kept(said[-1]):
            return "truncated"
        if len(said) < self._num_turns[row]:
            return "no_room"
        return "last_turn"
