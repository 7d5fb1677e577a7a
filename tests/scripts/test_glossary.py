"""Test that the code uses the glossary's identifiers, and none of the excluded names."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_ENGINES = {"Step3p5AMultiTokenPredictor"}
"""Names of classes of engines from which ours are derived."""
ROW = re.compile(r"\| ([^|]+) \| [^|]+ \| (`[^|]+`) \| (`[^|]+`) \|")


def read_glossary(language: str) -> list[tuple[str, list[str], list[str]]]:
    """Return (term, identifiers, excluded names) of each line."""
    found = []
    for line in (ROOT / "docs" / language / "glossary.md").read_text().splitlines():
        if matched := ROW.fullmatch(line):
            term, used, excluded = matched.groups()
            found.append((term, re.findall(r"`(\w+)`", used), re.findall(r"`(\w+)`", excluded)))
    return found


@cache
def identifiers() -> frozenset[str]:
    """Return all names of the package: identifiers in the code, and names of files."""
    names = set()
    for path in (ROOT / "swiftlite").rglob("*.py"):
        names.add(path.stem)
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        names.update(token.string for token in tokens if token.type == tokenize.NAME)
    return frozenset(names)


def words_of(name: str) -> list[str]:
    """Split `_TrainState` or `train_state` into train and state."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def contains(name: str, part: str) -> bool:
    """Return whether consecutive words of a name are those of `part`, with or without a plural s."""
    return re.search(rf"_{'_'.join(words_of(part))}s?_", f"_{'_'.join(words_of(name))}_") is not None


GLOSSARY = read_glossary("en")


@pytest.mark.parametrize(("term", "used", "excluded"), GLOSSARY, ids=[term for term, _, _ in GLOSSARY])
def test_code_uses_the_terms(term, used, excluded):
    assert set(used) <= identifiers()
    assert not [name for name in identifiers() - OF_ENGINES for part in excluded if contains(name, part)]


def test_both_languages_list_the_same_identifiers():
    assert len(GLOSSARY) > 40
    assert [line[1:] for line in read_glossary("zh")] == [line[1:] for line in GLOSSARY]


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        ("describe_surroundings", "surroundings", True),
        ("MetricSinks", "sink", True),
        ("_sinking", "sink", False),
        ("past_key_values", "past", True),
    ],
)
def test_names_are_compared_by_words(name, part, expected):
    assert contains(name, part) is expected
