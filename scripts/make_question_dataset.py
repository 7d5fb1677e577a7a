"""Make a dataset of questions from the documentation of Python's standard library.

Each row is a line of JSON with `messages` (one question, no answer) and `channel` (explain, summary, code, example,
purpose). `swiftlite regenerate` lets a model answer the questions. The rows depend only on the Python version.

    python scripts/make_question_dataset.py --output questions.jsonl --max_rows 400
"""

import argparse
import random
from pathlib import Path

from make_docstring_dataset import Entry, stdlib_entries, write

SHORTEST, LONGEST = 80, 600  # characters of a docstring
QUESTIONS = {
    "explain": "What does the Python function `{name}` do? Its documentation says:\n\n{documentation}",
    "summary": "Summarize this in one sentence:\n\n{documentation}",
    "code": "Write a Python function that does this: {first_sentence}",
    "example": "Show a short example of how to use `{short}` from Python's module `{module}`.",
    "purpose": "What is `{short}` in Python's module `{module}` for?",
}


def documentation(entry: Entry) -> str:
    """Return the entry's docstring on one line."""
    return " ".join(entry.docstring.split())


def question(entry: Entry, channel: str) -> dict:
    """Return a row with a question about one entry."""
    text = documentation(entry)
    asked = QUESTIONS[channel].format(
        name=entry.name,
        short=entry.short,
        module=entry.module,
        documentation=text,
        first_sentence=text.split(". ")[0].rstrip(".") + ".",
    )
    return {"messages": [{"role": "user", "content": asked}], "channel": channel}


def make_rows(max_rows: int) -> list[dict]:
    """Return one question about each entry, in a fixed shuffled order."""
    rng = random.Random(0)
    entries = [entry for entry in stdlib_entries() if SHORTEST < len(documentation(entry)) < LONGEST]
    rng.shuffle(entries)
    return [question(entry, rng.choice(list(QUESTIONS))) for entry in entries[:max_rows]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON-lines file for the questions")
    parser.add_argument("--max_rows", type=int, default=2000, help="questions at most (default: 2000)")
    args = parser.parse_args()
    write(args.output, make_rows(args.max_rows))


if __name__ == "__main__":
    main()
