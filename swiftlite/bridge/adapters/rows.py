"""Derive the bridge rows of adapters from the bridge rows of their layers.

A bridge row maps a Megatron parameter to Hugging Face tensors. megatron-core fuses queries, keys and values in one
layer, and gate and up in another. PEFT has a separate A and B for each of them. An adapter here also has a separate A
and B for each: `linear_qkv.adapter.lora_A_q_proj` is PEFT's `q_proj.lora_A.weight`. The rows of each B are in the order
of the corresponding rows of the layer.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from swiftlite.base.lora import PART, Lora
from swiftlite.bridge.join import COPY, Join, SourceRange
from swiftlite.bridge.rows import Row

_LINEAR = re.compile(r"\.(linear_\w+|in_proj_\w+|out_proj|eh_proj)\.weight$")
_WEIGHT = ".weight"
A, B, MAGNITUDE = "lora_A_", "lora_B_", "lora_magnitude_"
"""Prefixes of the Megatron names of an adapter's parameters, followed by the last component of the HF module's name."""

HF_MAGNITUDE = "lora_magnitude_vector"
"""Suffix of PEFT's names of DoRA magnitudes."""


@dataclass(frozen=True)
class OnePart:
    """The ranges of a single HF tensor in a join of several HF tensors, as a join with only this tensor.

    A join describes how HF tensors are concatenated (`bridge/join.py`). The ranges of the tensor keep their order.

    Args:
        whole: the join of several HF tensors.
        lengths: length of each HF tensor along the axis.
        source: index of the single tensor.
    """

    whole: Join
    lengths: tuple[int, ...]
    source: int

    @property
    def axis(self) -> int:
        return self.whole.axis

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        ranges = self.whole.source_ranges(self.lengths, sum(self.lengths), tp_size)
        return [SourceRange(0, start, length) for source, start, length in ranges if source == self.source]


def module_of(name: str) -> str:
    """Return the module of a weight, from its Megatron or its HF name."""
    return name.removesuffix(_WEIGHT)


def leaf_of(module: str) -> str:
    """Return the last component of a module's name, such as `q_proj`."""
    return module.rpartition(".")[2]


def is_linear(row: Row) -> bool:
    """Return whether the row's parameter is the weight of a linear layer in a decoder layer or an MTP head.

    Experts of gpt-oss do not count: they are parts of tensors that are not modules in Hugging Face's files.
    """
    return _LINEAR.search(row.mcore) is not None and all(key.endswith(_WEIGHT) for key in row.hf)


def adapted_rows(rows: Iterable[Row], lora: Lora) -> list[Row]:
    """Return the bridge rows of linear layers for which at least one Hugging Face module gets an adapter."""
    return [row for row in rows if is_linear(row) and adapted_modules(row, lora)]


def adapted_modules(row: Row, lora: Lora) -> list[str]:
    """Return the HF modules of a fused layer that get an adapter, in the order of the row."""
    is_adapted = lora.on_trunk
    if row.mcore.startswith("mtp."):
        is_adapted = lora.heads == "lora"
    elif row.mcore.startswith("tower."):  # computed by a module of transformers, without the hooks of adapters
        is_adapted = False
    return [module for module in map(module_of, row.hf) if is_adapted and lora.adapts(module)]


def adapter_rows(rows: Iterable[Row], lora: Lora) -> list[Row]:
    """Return the bridge rows of all adapters, derived from those of the model.

    HF names are PEFT's names without PEFT's prefix.
    """
    return list(chain.from_iterable(_rows_of_layer(layer, lora) for layer in adapted_rows(rows, lora)))


def _rows_of_layer(layer: Row, lora: Lora) -> list[Row]:
    axis = layer.join.axis
    lengths = tuple(shape[axis] for shape in layer.hf.values())
    adapter = module_of(layer.mcore) + PART
    modules = adapted_modules(layer, lora)
    rows = []
    for source, (key, (size_out, size_in)) in enumerate(layer.hf.items()):
        module = module_of(key)
        if module not in modules:
            continue
        order = OnePart(layer.join, lengths, source)
        # A join along the inputs, such as that of MiMo's eh_proj, orders the columns of A. All others order the rows of
        # B, and the inputs of A are those of the layer.
        a, b = order, COPY
        if axis == 0:
            a, b = COPY, order
        rows += [
            Row(f"{adapter}{A}{leaf_of(module)}", {f"{module}.lora_A.weight": (lora.rank, size_in)}, a),
            Row(f"{adapter}{B}{leaf_of(module)}", {f"{module}.lora_B.weight": (size_out, lora.rank)}, b),
        ]
        if lora.has_magnitudes:
            key = f"{module}.{HF_MAGNITUDE}"
            rows.append(Row(f"{adapter}{MAGNITUDE}{leaf_of(module)}", {key: (size_out,)}, b))
    return rows


def saved_names(lora: Lora, rows: Iterable[Row]) -> set[str]:
    """Return the Megatron names of the trunk's parameters that are trained in full, including copies.

    Args:
        rows: the bridge rows of the trunk.
    """
    names: set[str] = set()
    for row in rows:
        if any(lora.saves(module) for module in modules_of(row)):
            names.update((row.mcore, *row.mcore_copies))
    return names


def modules_of(row: Row) -> list[str]:
    """Return the HF modules of a row's parameter, including a tied output layer."""
    return [key.rpartition(".")[0] for key in (*row.hf, *row.hf_copies)]
