"""Conversations whose user turns the model writes itself, and the selection of the usable ones.

This module uses no engine and no file; `self_prompts.py` generates the messages.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from swiftlite.data.near_duplicates import near_duplicates
from swiftlite.data.rows.conversation import Conversation, Message
from swiftlite.data.user_turn import CHANNEL
from swiftlite.improve.regenerate.steering import Steering

MIN_CHARACTERS = 10
_COMPLETE = re.compile(r"""([!?…。！？]|(?<!\d)\.)["'”’)\]*`]*(?=\s)|[。！？]|\n""")
"""The end of a sentence or a line. A number with a dot begins a line of a list."""

Role = Literal["user", "assistant"]
Reason = Literal["truncated", "with special tokens", "too short", "near-duplicates"]
"""Why a conversation is dropped."""


@dataclass(frozen=True)
class WrittenMessage:
    """A message that the model wrote, as stored in prompts.jsonl.

    Attributes:
        text: the message. A user turn keeps its special tokens, except the one that ends it.
        finish_reason: stop, or length if the message was truncated, as in `Completion`.
    """

    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class SelfPrompts:
    """The usable conversations that the model wrote, and the number of dropped ones by reason.

    Each conversation ends with a user turn.
    """

    conversations: list[Conversation] = field(default_factory=list)
    dropped: dict[Reason, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of conversations that the model wrote."""
        return len(self.conversations) + sum(self.dropped.values())

    def __str__(self) -> str:
        line = f"{len(self.conversations)} of {self.total} prompts of the model are kept"
        if self.dropped:
            line += "; dropped: " + ", ".join(f"{number} {reason}" for reason, number in self.dropped.items())
        return line


class SelfDialogues:
    """Conversations while the model writes them.

    Args:
        number: number of conversations.
        num_turns: number of user turns of each conversation.
        steering: settings that decide what the conversations are about.
        special_token: pattern that matches any special token.

    Attributes:
        written: messages by (conversation, position), both counted from 0.
    """

    def __init__(self, number: int, num_turns: int, steering: Steering, special_token: re.Pattern[str]):
        self.number = number
        self.num_messages = 2 * num_turns - 1
        self.written: dict[tuple[int, int], WrittenMessage] = {}
        self._steering = steering
        self._special_token = special_token

    def role(self, position: int) -> Role:
        """Return who speaks at a position: the user at 0, 2, 4, ..."""
        if position % 2 == 0:
            return "user"
        return "assistant"

    def unfinished(self, position: int) -> list[int]:
        """Return the conversations whose next message is at this position."""
        numbers = []
        for conversation in range(self.number):
            messages = self._messages(conversation)
            if len(messages) == position and self._first_problem(conversation, messages) is None:
                numbers.append(conversation)
        return numbers

    def context(self, conversation: int) -> list[Message]:
        """Return the messages that precede the next one.

        A topic is added to the system prompt only if the user speaks next.
        """
        messages = self._messages(conversation)
        system = self._steering.system
        if self.role(len(messages)) == "user":
            system = self._steering.user_system(conversation)
        return _conversation(system, messages)

    def opening(self, conversation: int, position: int) -> str:
        """Return the first words of a message; only the first message of a conversation may have an opening."""
        if position > 0:
            return ""
        return self._steering.opening(conversation)

    def select(self) -> SelfPrompts:
        """Return the complete conversations whose messages are all usable.

        If the first turns of several conversations are similar, only the first of these conversations is returned.
        """
        dropped: Counter[Reason] = Counter()
        usable = []
        for conversation in range(self.number):
            messages = self._messages(conversation)
            problem = self._first_problem(conversation, messages)
            if problem is None and len(messages) < self.num_messages:
                problem = "truncated"  # no room for the next message
            if problem:
                dropped[problem] += 1
            else:
                usable.append(conversation)
        duplicates = near_duplicates([self._messages(conversation)[0].text for conversation in usable])
        if duplicates:
            dropped["near-duplicates"] = len(duplicates)
        conversations = []
        for index, conversation in enumerate(usable):
            if index not in duplicates:
                messages = _conversation(self._steering.system, self._messages(conversation))
                source = f"prompt {conversation + 1}"
                conversations.append(Conversation(messages, [1.0] * len(messages), channel=CHANNEL, source=source))
        return SelfPrompts(conversations, dict(sorted(dropped.items())))

    def _messages(self, conversation: int) -> list[WrittenMessage]:
        """Return the messages of a conversation up to the first missing one."""
        messages = []
        for position in range(self.num_messages):
            message = self.written.get((conversation, position))
            if message is None:
                break
            if self.role(position) == "user" and message.finish_reason == "length":
                message = replace(message, text=complete_sentences(message.text))
            messages.append(message)
        return messages

    def _first_problem(self, conversation: int, messages: Sequence[WrittenMessage]) -> Reason | None:
        for position, message in enumerate(messages):
            problem = self._problem(message, position, self.opening(conversation, position))
            if problem:
                return problem
        return None

    def _problem(self, message: WrittenMessage, position: int, opening: str) -> Reason | None:
        """Return why a message makes its conversation unusable; None if it does not.

        An answer of the model may be truncated. A truncated user turn needs a complete sentence.
        """
        text = message.text.strip()
        if self.role(position) == "assistant":
            return None if text else "too short"
        if self._special_token.search(text):
            return "with special tokens"
        if len(text) < MIN_CHARACTERS or opening.startswith(text):
            return "truncated" if message.finish_reason == "length" else "too short"
        return None


def complete_sentences(text: str) -> str:
    """Return a truncated text up to its last complete sentence or line; "" if it has none.

    Example: "Name two birds. Are they" becomes "Name two birds."
    """
    end = 0
    for match in _COMPLETE.finditer(text):
        end = match.end()
    return text[:end].strip()


def _conversation(system: str | None, written: Sequence[WrittenMessage]) -> list[Message]:
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": system})
    for position, message in enumerate(written):
        role = "user" if position % 2 == 0 else "assistant"
        messages.append({"role": role, "content": message.text.strip()})
    return messages
