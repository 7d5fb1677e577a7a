"""Test drafts from the text against a search that compares lists."""

import random

import pytest

from swiftlite.engines.ngram import Ngrams, ngrams_of


def search(text: list[int], ngrams: Ngrams, least: int) -> list[int]:
    """Try matches from the longest to the smallest, the most recent first."""
    for length in range(min(ngrams.max_match, len(text) - 1), least - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                drafts = list(text)
                for index in range(min(2 * length - 1, ngrams.max_tokens)):
                    drafts.append(drafts[end + index])
                return drafts[len(text) :]
    return []


@pytest.mark.parametrize("vocab_size", [2, 3, 8])
def test_proposals_are_those_of_a_search(vocab_size):
    numbers = random.Random(vocab_size)
    ngrams = Ngrams(max_match=4, max_tokens=6)
    num_found = 0
    for _ in range(500):
        text = [numbers.randrange(vocab_size) for _ in range(numbers.randrange(1, 30))]
        for is_drawn, least in ((False, 2), (True, 3)):
            found = ngrams.propose(text, is_drawn=is_drawn)
            assert found == search(text, ngrams, least)
            num_found += bool(found)
    assert 50 < num_found < 1000


def test_longer_matches_have_longer_proposals():
    text = list(range(10, 30))
    lengths = [len(Ngrams().propose([*text, 5, *text[: 1 + match]])) for match in range(1, 6)]
    assert lengths == [3, 5, 7, 8, 8]
    assert Ngrams().propose([*text, 5, text[0]]) == []


def test_the_option_selects_them():
    assert ngrams_of("mtp,ngram") == ngrams_of("ngram") == Ngrams()
    assert ngrams_of("mtp") is ngrams_of("none") is ngrams_of(None) is None
