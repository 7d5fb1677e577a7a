"""Check the English of documentation, docstrings, comments and messages: standard terms, and how a docstring opens.

    python scripts/check_prose.py [FILE ...]

Prints FILE:LINE, the phrase and its replacement for each problem. The exit code is 1 if there are problems. Without
arguments, the script reads README.md, SECURITY.md, docs/en and the package.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parent.parent

REPLACEMENTS = {
    r"anew": "again",
    r"beside": "next to, in addition to",
    r"behind (?:it|them)": "after it",
    r"goes on|go on|going on|went on": "continues, resumes",
    r"once more": "again",
    r"for want of": "because there is no",
    r"(?:is|are|was) fed": "receives",
    r"(?:is|are) told": "receives",
    r"wants?": "requires, expects",
    r"nobody|whoever": "no user, anyone who",
    r"as many as": "N, the number of",
    r"so many": "N, the number of",
    r"begun": "started",
    r"mend(?:s|ed)?": "fix",
    r"can(?:not)? be had": "is (not) available",
    r"(?<!there )(?:is|are) no(?! longer)": "is not",
    r"in the place of": "instead of",
    r"(?:its|their) own accord": "automatically",
    r"likewise": "also",
    r"thereby": "by this",
    r"lies in|lie in": "is in",
    r"looked at": "checked, read",
    r"meanwhile": "at the same time",
    r"there is none": "does not exist, is missing",
    r"(?:is|are) others": "differs, is another one",
    r"made good": "repaired",
    r"by the way": "also",
    r"knows? of": "supports, recognizes",
    r"is gone": "was removed, no longer exists",
}
"""Phrases that are not standard in this field, and what to write instead."""

PHRASE = re.compile(r"\b(" + "|".join(f"(?:{pattern})" for pattern in REPLACEMENTS) + r")\b", re.IGNORECASE)
NO_SUBJECT = re.compile(r"(Of|As|What|Where|Those|By|How|With|In|From|Behind|Which|Why|Around|Under|Once|The same)\b")


def texts_of_python(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is_docstring) of the docstrings, comments and messages of a module."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):  # a definition comes before its docstring
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                docstrings.add(node.body[0].lineno)
                yield node.body[0].lineno, text, True
        elif _is_message(node) and node.lineno not in docstrings:
            yield node.lineno, str(node.value), False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def _is_message(node: ast.AST) -> TypeGuard[ast.Constant]:
    """Return whether a string can be a message. A single word is data: a key, a name, an option."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()


def texts_of_markdown(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, False) for each line of a page, without code blocks and inline code."""
    source = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), source, flags=re.DOTALL)
    for number, line in enumerate(source.split("\n"), 1):
        if not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "`", line), False


def problems_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for a Python or Markdown file."""
    source = path.read_text()
    texts = texts_of_python(source) if path.suffix == ".py" else texts_of_markdown(source)
    for first_line, text, is_docstring in texts:
        if is_docstring and NO_SUBJECT.match(text):
            yield first_line, "the docstring opens without a subject; use an imperative or a full sentence"
        for found in PHRASE.finditer(text):
            line = first_line + text.count("\n", 0, found.start())
            yield line, f"'{found[0]}': use {replacement_of(found[0])}"


def replacement_of(phrase: str) -> str:
    """Return what to write instead of a phrase that `PHRASE` found."""
    for pattern, replacement in REPLACEMENTS.items():
        if re.fullmatch(pattern, phrase, re.IGNORECASE):
            return replacement
    raise ValueError(phrase)


def default_files() -> list[Path]:
    """Return the pages in English and the modules of the package."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs" / "en").glob("*.md"))]
    return [*pages, *sorted((ROOT / "swiftlite").rglob("*.py"))]


def main(arguments: list[str]) -> int:
    count = 0
    for path in map(Path, arguments) if arguments else default_files():
        for line, problem in problems_in(path):
            print(f"{path}:{line}: {problem}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
