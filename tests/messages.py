"""What a test asks of a message: the names and the numbers in it, whatever the sentence around them says.

Tokens are option names, file names, fields, values and commands, separated by spaces. A text names a token that stands
in it whole (5 is not named by 0.5, nor --lr by --lr_decay_style); the order does not matter.
"""

import re
from collections.abc import Sequence


def naming(tokens: str) -> str:
    """Return a pattern, for `pytest.raises(match=...)`, of the texts that name each token."""
    assert tokens.split(), "a pattern without tokens matches every text"
    return r"(?s)\A" + "".join(rf"(?=.*{_whole(token)})" for token in tokens.split())


def mentions(text: str, tokens: str) -> bool:
    """Whether a text names each token; where nothing can be asked (a row of a table), there are none."""
    return all(re.search(_whole(token), text) for token in tokens.split())


def has_line(text: str, tokens: str) -> bool:
    """Whether one line of a text, of a report or a log, names each token."""
    return any(mentions(line, tokens) for line in text.splitlines())


def answers_equal(text: str, number: int) -> bool:
    """Whether `infer --compare` reported that all of so many answers are equal with and without speculation.

    The one place in the tests that knows the words of this line: another line of the same log, about the file of
    answers, has the same two numbers.
    """
    return re.search(rf"answers equal: {number} of {number}$", text, re.MULTILINE) is not None


def mention_each(texts: Sequence[str | tuple[str, ...]], tokens: Sequence[str]) -> bool:
    """Whether there are as many texts as lists of tokens, and each names its own; a problem and its hint are one."""
    whole = ["\n".join(text) if isinstance(text, tuple) else text for text in texts]
    return len(whole) == len(tokens) and all(map(mentions, whole, tokens))


def _whole(token: str) -> str:
    before = r"(?<![\w.-])" if re.match(r"[\w.-]", token) else ""
    after = r"(?!\w|\.\w)" if re.search(r"\w\Z", token) else ""
    return before + re.escape(token) + after
