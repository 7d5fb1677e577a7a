"""Read the counters of vLLM's server from the text of /metrics. All counters are totals since the server started."""

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.server import metrics


def read_metrics(text: str, num_speculative_tokens: int) -> DraftCounts:
    """Return vLLM's draft counts, summed over all engines of the server; zeros if the server does not draft."""
    return read_draft_counts(text) or DraftCounts(0, 0, (0,) * num_speculative_tokens)


def read_draft_counts(text: str) -> DraftCounts | None:
    """Return vLLM's draft counts, summed over all engines of the server; None if the server does not draft.

    Raises:
        ValueError: the text is not in the format of /metrics.
    """
    return metrics.read_draft_counts(text, "vllm:")


def read_throughput(text: str) -> metrics.Throughput:
    """Return what vLLM has generated, summed over all engines of the server."""
    return metrics.read_throughput(text, "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_sum")


def read_cached_tokens(text: str) -> int:
    """Return the number of prompt tokens found in the prefix cache, summed over all engines of the server."""
    return int(metrics.total(text, "vllm:prefix_cache_hits_total"))
