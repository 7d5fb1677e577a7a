"""Test near-duplicates found with an index against a comparison of all pairs."""

import hypothesis
from hypothesis import strategies

from swiftlite.data.near_duplicates import near_duplicates

QUESTION = "What are the main causes of the French Revolution?"


def test_nearly_equal_texts_are_found():
    texts = [
        QUESTION,
        "How do I bake sourdough bread at home?",
        "what are the  main causes of the french revolution",
        "What are the main causes of the Russian Revolution?",
        QUESTION,
        "法国大革命的主要原因是什么?",
        "法国大革命的主要原因是什么",
        "a",
        "A",
        "b",
    ]
    assert near_duplicates(texts) == {2, 4, 6, 8}
    assert near_duplicates([]) == set()


def shingles(text: str) -> set[str]:
    text = " ".join(text.casefold().split())
    return {text[start : start + 5] for start in range(max(1, len(text) - 4))}


def by_every_pair(texts: list[str], similarity: float) -> set[int]:
    kept: list[int] = []
    for index, text in enumerate(texts):
        one = shingles(text)
        if all(len(one & shingles(texts[other])) / len(one | shingles(texts[other])) < similarity for other in kept):
            kept.append(index)
    return set(range(len(texts))) - set(kept)


@hypothesis.given(
    texts=strategies.lists(strategies.text(alphabet="ab ", max_size=30), max_size=12),
    similarity=strategies.sampled_from([0.3, 0.5, 0.7, 0.9, 1.0]),
)
def test_the_index_misses_no_pair(texts, similarity):
    assert near_duplicates(texts, similarity) == by_every_pair(texts, similarity)
