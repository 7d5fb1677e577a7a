"""Count the parameters and operations that adapters add. Arithmetic, no torch."""

import re
from collections.abc import Iterable, Sequence

from swiftlite.bridge.adapters.rows import adapted_modules, adapted_rows, module_of, saved_names
from swiftlite.bridge.rows import Row
from swiftlite.families.layer import Layer
from swiftlite.families.rank import ParameterCount, Rank
from swiftlite.lora import Lora

_SPLIT_BY_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.weight$")


def is_split_by_columns(name: str) -> bool:
    """Return whether tensor-parallel ranks split the input of this layer (by Megatron name) instead of its output."""
    return _SPLIT_BY_COLUMNS.search(name) is not None


def adapter_parameters(rows: Iterable[Row], lora: Lora, rank: Rank) -> ParameterCount:
    """The adapters of these rows on a rank: one of A and B is split with the layer, the other whole."""
    dense, expert_total = 0, 0
    for row in adapted_rows(rows, lora):
        is_expert = ".experts." in row.mcore
        ranks = rank.etp if is_expert else rank.tp
        number = 0
        for module, (size_out, size_in) in zip(map(module_of, row.hf), row.hf.values(), strict=True):
            if module in adapted_modules(row, lora):
                whole, split = (size_out, size_in) if is_split_by_columns(row.mcore) else (size_in, size_out)
                number += lora.rank * (whole + split // ranks)
                if lora.has_magnitudes:
                    number += size_out if is_split_by_columns(row.mcore) else size_out // ranks
        if is_expert:
            expert_total += number
        else:
            dense += number
    return ParameterCount(dense, expert_total // rank.ep)


def adapter_macs(layer: Layer, rows: Sequence[Row], lora: Lora) -> int:
    """Return the multiply-adds per token of a layer's adapters, with only the experts that the router selects."""
    count = adapter_parameters(rows, lora, Rank())
    experts = layer.mlp.experts
    return count.dense + (count.expert * layer.mlp.topk // experts if experts else 0)


def adapter_activation_bytes(layer: Layer, rows: Iterable[Row], lora: Lora, rank: Rank) -> int:
    """Bytes that DoRA keeps of a layer for the backward pass: what lengths are given to, as large as the outputs.

    Args:
        layer: whose experts these rows are of, if they are.
    """
    if not lora.has_magnitudes:
        return 0
    dense, expert_total = 0, 0
    for row in adapted_rows(rows, lora):
        size = sum(shape[0] for shape in row.hf.values())
        is_whole, is_expert = is_split_by_columns(row.mcore), ".experts." in row.mcore
        if is_expert:
            expert_total += size if is_whole else size // rank.etp
        else:
            dense += size * rank.sequence_tokens if is_whole else size // rank.tp * rank.tokens
    if expert_total:
        expert_total = expert_total // layer.mlp.experts * rank.sequence_tokens * rank.etp * layer.mlp.topk
    return (dense + expert_total) * rank.itemsize


def saved_parameters(rows: Iterable[Row], lora: Lora, rank: Rank) -> dict[str, int]:
    """Parameters on a rank of the modules that learn in full, by Megatron name."""
    rows = list(rows)
    names = saved_names(lora, rows)
    found = {}
    for row in rows:
        for name in (row.mcore, *row.mcore_copies):
            if name in names:
                ((size, *others),) = row.hf.values()
                found[name] = -(-size // rank.tp) * others[0] if others else size
    return found
