"""Read draft counters from the text of /metrics. vLLM and llama.cpp have the same counters with different prefixes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from swiftlite.acceptance.counts import DraftCounts


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


@dataclass(frozen=True)
class Generation:
    """The tokens that a server has generated since its start, and their time.

    Attributes:
        tokens: number of generated tokens.
        seconds: sum of the seconds of all finished requests, from their arrival to the end of the answer.
    """

    tokens: int
    seconds: float

    def since(self, before: "Generation") -> "Generation":
        """Return the generation after the earlier reading `before`."""
        return Generation(self.tokens - before.tokens, self.seconds - before.seconds)


def read_generation(text: str, tokens: str, seconds: str) -> Generation:
    """Return what a server has generated.

    Args:
        tokens, seconds: names of the metrics.
    """
    return Generation(int(total(text, tokens)), total(text, seconds))


def total(text: str, name: str) -> float:
    """Return the sum of a metric over all engines of a server; 0 if there is none."""
    return sum(sample.value for sample in samples(text) if sample.name == name)


def samples(text: str) -> Iterator[Any]:
    """Yield the samples of the text, each with a name, labels and a value."""
    for family in text_string_to_metric_families(text):
        yield from family.samples
