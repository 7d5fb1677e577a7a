"""Find texts that are nearly equal to an earlier one."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

SHINGLE = 5
"""Length of a shingle in characters, which needs no word boundaries and therefore suits every script."""


def near_duplicates(texts: Sequence[str], similarity: float = 0.7) -> set[int]:
    """Return the indices of texts that resemble an earlier text that is not itself in the result.

    Two texts resemble each other if their shingles (substrings of five characters, without regard to case and white
    space) have a Jaccard index of at least `similarity`.

    Two sets of a and b shingles with Jaccard index J share at least J * max(a, b) of them. If all sets are sorted in
    the same order, two such sets therefore share a shingle that is among the first a - ceil(J * a) + 1 of one set and
    among the first b - ceil(J * b) + 1 of the other. Only texts that share one of these are compared; with the rarest
    shingles first, these are few (prefix filtering, Chaudhuri et al. 2006).
    """
    all_shingles = [_shingles(text) for text in texts]
    frequencies: Counter[str] = Counter()
    for shingles in all_shingles:
        frequencies.update(shingles)
    with_shingle: dict[str, list[int]] = defaultdict(list)
    duplicates = set()
    for index, shingles in enumerate(all_shingles):
        in_order = sorted(shingles, key=lambda shingle: (frequencies[shingle], shingle))
        shared = math.ceil(similarity * len(shingles) - 1e-9)  # 0.7 * 10 may be slightly more than 7
        prefix = in_order[: len(shingles) - shared + 1]
        candidates = set()
        for shingle in prefix:
            candidates.update(with_shingle[shingle])
        if any(_jaccard(shingles, all_shingles[other]) >= similarity for other in candidates):
            duplicates.add(index)
            continue
        for shingle in prefix:
            with_shingle[shingle].append(index)
    return duplicates


def resembling(texts: Sequence[str], references: Sequence[str], similarity: float = 0.7) -> set[int]:
    """Return the indices of texts that resemble a reference; each text is compared with each reference."""
    of_references = [_shingles(reference) for reference in references]
    found = set()
    for index, text in enumerate(texts):
        shingles = _shingles(text)
        if any(_jaccard(shingles, other) >= similarity for other in of_references):
            found.add(index)
    return found


def _shingles(text: str) -> set[str]:
    normalized = " ".join(text.casefold().split())
    if len(normalized) <= SHINGLE:
        return {normalized}
    return {normalized[start : start + SHINGLE] for start in range(len(normalized) - SHINGLE + 1)}


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)
