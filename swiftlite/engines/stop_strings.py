"""End answers at texts. Engines generate tokens; the first and the last token of a text can have more than the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StopStrings:
    """Texts that end an answer.

    Attributes:
        strings: the texts, not empty.
        tokenizer: decodes tokens.
    """

    strings: tuple[str, ...]
    tokenizer: Any

    def end(self, token_ids: Sequence[int], num_checked: int = 0) -> int | None:
        """Return the number of tokens of an answer up to the one that completes a text; None if no text is complete.

        Args:
            num_checked: number of first tokens that do not contain a text.
        """
        # A token of the text has at least one byte of it. One more token completes its first character.
        window = max(len(each.encode()) for each in self.strings) + 1
        # Token by token, because a step can append several tokens, and the text can end in any of them.
        for end in range(num_checked + 1, len(token_ids) + 1):
            tail = self.tokenizer.decode(token_ids[max(end - window, 0) : end], skip_special_tokens=False)
            if any(each in tail for each in self.strings):
                return end
        return None


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStrings | None:
    """Return the texts that end an answer; None if there are none."""
    return StopStrings(tuple(strings), tokenizer) if strings else None
