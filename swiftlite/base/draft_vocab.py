"""Convert a draft vocabulary to text and back.

The draft vocabulary is the set of tokens that MTP heads can draft. A head computes one logit per such token, which in a
small model is most of the head's work. Answers use only a part of the vocabulary, so it is sufficient to draft the most
frequent tokens; the trunk generates all others. `data/draft_vocab.py` chooses the tokens.

config.json contains the ids as text with ranges: "0-2 5 8-9" means 0, 1, 2, 5, 8, 9.
"""

import re
from collections.abc import Sequence

from swiftlite.base.errors import UserError

TOKEN_MAP_FILE = "speculative_token_map.pt"
"""File of an export for SGLang's option `speculative_token_map`: the ids as a list, written by `torch.save`."""


def to_text(ids: Sequence[int]) -> str:
    """Return ascending ids in the format of config.json; "" for an empty list."""
    runs: list[list[int]] = []
    for token in ids:
        if runs and runs[-1][-1] == token - 1:
            runs[-1].append(token)
        else:
            runs.append([token])
    return " ".join(_run_text(run) for run in runs)


def _run_text(run: Sequence[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}"


def from_text(text: object, vocab_size: int) -> tuple[int, ...]:
    """Parse a text in the format of `to_text` to ids.

    Raises:
        UserError: the text does not have this format, or an id is outside of the vocabulary.
    """
    ids: list[int] = []
    for run in str(text).split():
        if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", run):
            raise UserError(f"config.json: mtp_draft_vocab: '{run[:40]}' is not an id or a range of ids")
        first, _, last = run.partition("-")
        if int(last or first) >= vocab_size:
            raise UserError(f"config.json: mtp_draft_vocab: {run} exceeds vocab_size {vocab_size}")
        ids += range(int(first), int(last or first) + 1)
    if not ids or sorted(set(ids)) != ids:
        raise UserError("config.json: mtp_draft_vocab: the ids are not in ascending order")
    return tuple(ids)
