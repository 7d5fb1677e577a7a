"""Convert whole tensors between the Hugging Face names of two rows that describe the same Megatron parameter."""

from collections.abc import Callable, Mapping

import torch

from swiftlite.bridge.join import SourceRange
from swiftlite.bridge.rows import Row


def joined(row: Row, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return the Megatron parameter of a row, without tensor parallelism.

    Args:
        read: returns the HF tensor with a name.
    """
    axis, sources = row.join.axis, [read(key) for key in row.hf]
    parts = [sources[number].narrow(axis, start, length) for number, start, length in _ranges(row)]
    return torch.cat(parts, dim=axis)


def separated(row: Row, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the HF tensors of a row by name, from its Megatron parameter: the inverse of `joined`."""
    tensors = {key: parameter.new_empty(shape) for key, shape in row.hf.items()}
    axis, targets, place = row.join.axis, list(tensors.values()), 0
    for number, start, length in _ranges(row):
        targets[number].narrow(axis, start, length).copy_(parameter.narrow(axis, place, length))
        place += length
    return tensors


def _ranges(row: Row) -> list[SourceRange]:
    lengths = [shape[row.join.axis] for shape in row.hf.values()]
    # Both functions work on whole tensors, so GATE_UP has one part: all of gate, then all of up.
    return row.join.source_ranges(lengths, sum(lengths), tp_size=1)
