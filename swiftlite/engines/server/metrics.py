"""Read counters from the text of /metrics. Engines have the same counters with different prefixes; all are totals since
the server started."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from swiftlite.acceptance.counts import DraftCounts

TOKENS, SECONDS = "generation_tokens_total", "e2e_request_latency_seconds_sum"
"""Names of the counters of `Throughput`, without the prefix of the engine."""


def read_draft_counts(text: str, prefix: str) -> DraftCounts | None:
    """Return the draft counts since the start of a server, summed over all its engines; None if it does not draft.

    Args:
        prefix: `EngineInfo.metrics_prefix`.

    Raises:
        ValueError: the text is not in the format of /metrics.
    """
    counted: Counter[str] = Counter()
    accepted: Counter[int] = Counter()
    for sample in samples(text):
        name = sample.name.removeprefix(f"{prefix}spec_decode_").removesuffix("_total")
        if name in ("num_drafts", "num_draft_tokens"):
            counted[name] += int(sample.value)
        elif name == "num_accepted_tokens_per_pos":
            accepted[int(sample.labels["position"])] += int(sample.value)
    if not counted:
        return None
    per_position = tuple(accepted[position] for position in sorted(accepted))
    return DraftCounts(counted["num_drafts"], counted["num_draft_tokens"], per_position)


def counts_of(text: str, prefix: str, num_tokens: int) -> DraftCounts:
    """Return the result of `read_draft_counts`, or zeros if the server does not draft.

    Args:
        num_tokens: number of tokens drafted per step. llama.cpp has no counter for positions without accepted drafts.
    """
    zeros = DraftCounts(0, 0, (0,) * num_tokens)
    found = read_draft_counts(text, prefix)
    if found is None:
        return zeros
    return zeros + found


@dataclass(frozen=True)
class Throughput:
    """The tokens that a server has generated since its start, and the time it took.

    Attributes:
        tokens: number of generated tokens.
        seconds: sum of the seconds of all finished requests, from their arrival to the end of the answer.
    """

    tokens: int
    seconds: float

    def since(self, before: "Throughput") -> "Throughput":
        """Return the generation after the earlier reading `before`."""
        return Throughput(self.tokens - before.tokens, self.seconds - before.seconds)


def read_throughput(text: str, prefix: str) -> Throughput:
    """Return the throughput of a server since its start, summed over all its engines.

    Args:
        prefix: `EngineInfo.metrics_prefix`.
    """
    tokens, seconds = (total(text, prefix + name) for name in (TOKENS, SECONDS))
    return Throughput(int(tokens), seconds)


def total(text: str, name: str) -> float:
    """Return the sum of a metric over all engines of a server; 0 without the metric."""
    return sum(sample.value for sample in samples(text) if sample.name == name)


def samples(text: str) -> Iterator[Any]:
    """Yield the samples of the text, each with a name, labels and a value."""
    for family in text_string_to_metric_families(text):
        yield from family.samples
