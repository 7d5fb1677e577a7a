"""Compare the trunk of a model with the trunk of its baseline, which shows what quantization or training changed.

The acceptance of drafts does not show a damaged trunk, because heads are compared with this trunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftlite.acceptance.teacher_forced import Measured
from swiftlite.data.sample import Sample
from swiftlite.engines.quantization import quantization_of, quantization_words
from swiftlite.families.resolved import HfModel
from swiftlite.report.figure import share
from swiftlite.report.page import Section, Table

COLUMNS = ["trunk", "channel", "tokens", "loss", "same token as baseline", "quantization"]
MEANING = (
    "Loss in nats per token of the answers in the rows, and the share of these tokens at which model and baseline have "
    "the same most likely token. Weights of a quantized model are decoded from its codes; activations are not "
    "rounded."
)


@dataclass(frozen=True)
class Trunk:
    """The trunk of one model.

    Attributes:
        quantization: from `quantization_of`; empty for a plain model.
        by_channel: for each channel and for "all", the figures from `Measured.trunk_to_json`.
    """

    quantization: dict[str, Any]
    by_channel: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the figures in the format of evaluation.json; `quantization` is omitted for a plain model."""
        found: dict[str, Any] = {"trunk": self.by_channel}
        if self.quantization:
            found["quantization"] = self.quantization
        return found


def trunk_of(model: HfModel, measured: Mapping[str, Measured], baseline: Mapping[str, Measured] | None = None) -> Trunk:
    """Return the figures of a model's trunk.

    Args:
        measured: from `measure_rows`.
        baseline: the same of another model on the same rows, with which predictions are compared.
    """
    by_channel = {}
    for channel, found in measured.items():
        other = baseline[channel] if baseline else None
        by_channel[channel] = found.trunk_to_json(other)
    return Trunk(quantization_of(model), by_channel)


def have_same_tokens(samples: Sequence[Sample], others: Sequence[Sample]) -> bool:
    """Return whether the tokenizers and templates of two models have made the same samples of the same rows."""
    if len(samples) != len(others):
        return False
    pairs = zip(samples, others, strict=True)
    return all(
        np.array_equal(mine.input_ids, its.input_ids) and np.array_equal(mine.labels, its.labels) for mine, its in pairs
    )


def trunk_section(trunks: Mapping[str, Trunk]) -> Section:
    """Return the table of trunks as a section of a page."""
    return Section("Trunk", MEANING, tables=[trunk_table(trunks)])


def trunk_table(trunks: Mapping[str, Trunk]) -> Table:
    """Return a table of trunks by name ("model", and "baseline" if there is one), a line for each channel."""
    rows = []
    for name, trunk in trunks.items():
        words = quantization_words(trunk.quantization) or "none"
        for channel, found in trunk.by_channel.items():
            agreement = share(found.get("top1_agreement"))
            rows.append([name, channel, str(found["tokens"]), f"{found['loss']:.4f}", agreement, words])
            words = ""  # once for each model
    return Table("Quality of the trunk", COLUMNS, rows)
