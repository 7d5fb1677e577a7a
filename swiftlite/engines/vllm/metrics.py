"""Read the counters of vLLM's server from the text of /metrics. All counters are totals since the server started."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from swiftlite.acceptance.counts import DraftCounts


def read_metrics(text: str, num_speculative_tokens: int) -> DraftCounts:
    """Return vLLM's draft counts, summed over all engines of the server; zeros if the server does not draft."""
    return read_draft_counts(text) or DraftCounts(0, 0, (0,) * num_speculative_tokens)


def read_draft_counts(text: str) -> DraftCounts | None:
    """Return vLLM's draft counts, summed over all engines of the server; None if the server does not draft.

    Raises:
        ValueError: the text is not in the format of /metrics.
    """
    counted: Counter[str] = Counter()
    accepted: Counter[int] = Counter()
    for sample in _samples(text):
        name = sample.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if name in ("num_drafts", "num_draft_tokens"):
            counted[name] += int(sample.value)
        elif name == "num_accepted_tokens_per_pos":
            accepted[int(sample.labels["position"])] += int(sample.value)
    if not counted:
        return None
    per_position = tuple(accepted[position] for position in sorted(accepted))
    return DraftCounts(counted["num_drafts"], counted["num_draft_tokens"], per_position)


def read_cached_tokens(text: str) -> int:
    """Return the number of prompt tokens found in the prefix cache, summed over all engines of the server."""
    return sum(int(sample.value) for sample in _samples(text) if sample.name == "vllm:prefix_cache_hits_total")


def _samples(text: str) -> Iterator[Any]:
    from prometheus_client.parser import text_string_to_metric_families  # vLLM's own requirement

    for family in text_string_to_metric_families(text):
        yield from family.samples
