"""Check the names and numbers in messages, independent of the sentences.

Tokens are option names, file names, fields, values and commands, separated by spaces. A text names a token if it
contains the whole token (0.5 does not name 5, and --lr_decay_style does not name --lr). The order does not matter.
"""

import re
from collections.abc import Sequence


def naming(tokens: str) -> str:
    """Return a pattern, for `pytest.raises(match=...)`, that matches texts which name each token."""
    assert tokens.split(), "a pattern without tokens matches every text"
    return r"(?s)\A" + "".join(rf"(?=.*{_whole(token)})" for token in tokens.split())


def mentions(text: str, tokens: str) -> bool:
    """Return whether a text names each token. True if there are no tokens."""
    return all(re.search(_whole(token), text) for token in tokens.split())


def has_line(text: str, tokens: str) -> bool:
    """Return whether one line of a text names each token."""
    return any(mentions(line, tokens) for line in text.splitlines())


def answers_equal(text: str, number: int) -> bool:
    """Return whether `infer --compare` reported that all `number` answers are equal with and without speculation.

    This is the only test code that depends on the words of this line, because another line of the log has the same two
    numbers.
    """
    return re.search(rf"answers equal: {number} of {number}$", text, re.MULTILINE) is not None


def mention_each(texts: Sequence[str | tuple[str, ...]], tokens: Sequence[str]) -> bool:
    """Return whether there are as many texts as lists of tokens, and each text names its tokens.

    A problem and its hint count as one text.
    """
    whole = ["\n".join(text) if isinstance(text, tuple) else text for text in texts]
    return len(whole) == len(tokens) and all(map(mentions, whole, tokens))


def _whole(token: str) -> str:
    before = r"(?<![\w.-])" if re.match(r"[\w.-]", token) else ""
    after = r"(?!\w|\.\w)" if re.search(r"\w\Z", token) else ""
    return before + re.escape(token) + after
