"""Count the parameters and operations that adapters add. Does not import torch."""

import re
from collections.abc import Iterable, Sequence

from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.rows import adapted_modules, adapted_rows, module_of, saved_names
from swiftlite.bridge.rows import Row
from swiftlite.families.layer import Layer
from swiftlite.families.rank import ParameterCount, Rank

_SPLIT_BY_COLUMNS = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.weight$")


def is_split_by_columns(name: str) -> bool:
    """Return whether tensor-parallel ranks split a layer's input instead of its output.

    Args:
        name: Megatron name of the layer.
    """
    return _SPLIT_BY_COLUMNS.search(name) is not None


def adapter_parameters(rows: Iterable[Row], lora: Lora, rank: Rank) -> ParameterCount:
    """Count the parameters of the adapters of these layers on a rank.

    Ranks split one of the matrices A and B as they split the layer, and each rank holds the whole other matrix.

    Args:
        rows: bridge rows of the layers.
    """
    dense, expert_total = 0, 0
    for row in adapted_rows(rows, lora):
        if ".experts." in row.mcore:
            expert_total += _adapter_size(row, lora, rank.etp)
        else:
            dense += _adapter_size(row, lora, rank.tp)
    return ParameterCount(dense, expert_total // rank.ep)


def _adapter_size(row: Row, lora: Lora, ranks: int) -> int:
    """Count the parameters of a layer's adapters on one of the ranks that split the layer."""
    number = 0
    for module, (size_out, size_in) in zip(map(module_of, row.hf), row.hf.values(), strict=True):
        if module not in adapted_modules(row, lora):
            continue
        if is_split_by_columns(row.mcore):
            magnitudes = size_out
            number += lora.rank * (size_out + size_in // ranks)
        else:
            magnitudes = size_out // ranks
            number += lora.rank * (size_in + size_out // ranks)
        if lora.has_magnitudes:
            number += magnitudes
    return number


def adapter_macs(layer: Layer, rows: Sequence[Row], lora: Lora) -> int:
    """Return the multiply-adds per token of a layer's adapters.

    Only the experts that the router selects are counted.
    """
    count = adapter_parameters(rows, lora, Rank())
    if not layer.mlp.experts:
        return count.dense
    return count.dense + count.expert * layer.mlp.topk // layer.mlp.experts


def adapter_activation_bytes(layer: Layer, rows: Iterable[Row], lora: Lora, rank: Rank) -> int:
    """Count the bytes that DoRA stores for the backward pass of a layer: the outputs before they are scaled.

    Args:
        rows: bridge rows of `layer`.
    """
    if not lora.has_magnitudes:
        return 0
    dense, expert_total = 0, 0
    for row in adapted_rows(rows, lora):
        size = sum(shape[0] for shape in row.hf.values())
        is_whole = is_split_by_columns(row.mcore)
        if ".experts." in row.mcore and is_whole:
            expert_total += size
        elif ".experts." in row.mcore:
            expert_total += size // rank.etp
        elif is_whole:
            dense += size * rank.sequence_tokens
        else:
            dense += size // rank.tp * rank.tokens
    if expert_total:
        expert_total = expert_total // layer.mlp.experts * rank.sequence_tokens * rank.etp * layer.mlp.topk
    return (dense + expert_total) * rank.itemsize


def saved_parameters(rows: Iterable[Row], lora: Lora, rank: Rank) -> dict[str, int]:
    """Return the sizes of a rank's parameters that are trained in full in addition to adapters, by Megatron name."""
    rows = list(rows)
    names = saved_names(lora, rows)
    found = {}
    for row in rows:
        for name in (row.mcore, *row.mcore_copies):
            if name in names:
                ((size, *others),) = row.hf.values()
                if others:  # a matrix, whose rows are split
                    size = -(-size // rank.tp) * others[0]
                found[name] = size
    return found
