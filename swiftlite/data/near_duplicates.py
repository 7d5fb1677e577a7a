"""Find texts that are nearly equal to an earlier one."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

SHINGLE = 5
"""Length of a shingle (a substring that is compared) in characters. Shingles of characters suit every script, because
they need no word boundaries."""


def near_duplicates(texts: Sequence[str], similarity: float = 0.7) -> set[int]:
    """Return the indices of texts that resemble an earlier text. Texts in the result do not count as earlier texts.

    Two texts resemble each other if their sets of shingles (substrings of five characters, ignoring case and white
    space) have a Jaccard index of at least `similarity`.

    The search uses prefix filtering (Chaudhuri et al. 2006). Two sets of a and b shingles with Jaccard index J share at
    least J * max(a, b) shingles. If all sets are sorted in the same order, the two sets therefore share a shingle among
    the first a - ceil(J * a) + 1 shingles of the one set and the first b - ceil(J * b) + 1 of the other. Only texts
    that share such a shingle are compared. Sets are sorted with the rarest shingles first, so that few texts share one.
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
    """Return the indices of texts that resemble a reference. Each text is compared with each reference."""
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
