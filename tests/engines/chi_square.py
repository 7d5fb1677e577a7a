"""Test whether draws have a distribution, with Pearson's chi-square test."""

from collections.abc import Sequence

import torch

FALSE_ALARM = 1e-6
"""Share of seeds for which correct draws fail. Seeds are fixed, so a test always passes or always fails."""


def probability(found: Sequence[Sequence[int]], expected: torch.Tensor) -> float:
    """Return the probability that draws from `expected` differ from it at least as much as `found` does.

    Args:
        found: index in `expected` of each draw.
        expected: a distribution of any number of dimensions.
    """
    assert abs(float(expected.sum()) - 1) < 1e-5
    counts = torch.zeros(expected.shape, dtype=torch.float64)
    counts.index_put_(tuple(torch.tensor(found).T), torch.ones(len(found), dtype=torch.float64), accumulate=True)
    expected = expected.double().flatten() * len(found)
    counts = counts.flatten()
    if counts[expected == 0].any():
        return 0.0
    # The approximation is good for cells that expect 5 or more; the others are taken together.
    is_rare = expected < 5
    expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None]))
    counts = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
    used = expected > 0
    distance = ((counts - expected) ** 2 / expected)[used].sum()
    degrees = used.sum() - 1
    return float(torch.special.gammaincc(degrees.double() / 2, distance / 2))
