"""Bind bridge rows to parameters in memory, and report all mismatches before any tensor is read or written.

A bridge row maps a Megatron parameter to Hugging Face tensors (`rows.py`). The functions here operate on shapes and
ranges, without files or process groups. `placement.py` creates each `Shard`, and `transfer.py` copies the slices of a
binding.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.join import ZEROS, SourceRange, clip, covers
from swiftlite.bridge.rows import Row, Shape
from swiftlite.bridge.tensors import Index, some


@dataclass(frozen=True)
class Shard:
    """This rank's part of a Megatron parameter or persistent buffer.

    Attributes:
        name: Megatron name in the whole model, with layers counted over all pipeline stages.
        tensor: the part of this rank.
        partition_dim: axis along which ranks split the parameter; None if each rank holds the whole parameter.
        tp_rank, tp_size: index of this rank among the ranks that split the parameter, and number of these ranks.
        writes: whether this rank writes the part into an export. False if another rank holds the same part and writes
            it.
    """

    name: str
    tensor: torch.Tensor
    partition_dim: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    writes: bool = True

    @property
    def global_shape(self) -> Shape:
        """Shape of the whole parameter, over all ranks that split it."""
        shape = list(self.tensor.shape)
        if self.partition_dim is not None:
            shape[self.partition_dim] *= self.tp_size
        return tuple(shape)

    @property
    def first(self) -> int:
        """Start of this rank's part along `partition_dim` of the whole parameter."""
        if self.partition_dim is None:
            return 0
        return self.tp_rank * self.tensor.shape[self.partition_dim]


class SlicePair(NamedTuple):
    """A slice of a shard, `shard.tensor[local_index]`, and the equal slice of an HF tensor, `hf_key[hf_index]`.

    If `hf_key` is None, the slice of the shard is padding with zeros.
    """

    shard: Shard
    local_index: Index
    hf_key: str | None
    hf_index: Index


@dataclass(frozen=True)
class Binding:
    """A bridge row (a Megatron parameter and its HF tensors), and this rank's shard of the parameter."""

    row: Row
    shard: Shard
    is_copy: bool  # the shard is one of the row's mcore_copies

    def slices(self) -> Iterator[SlicePair]:
        """Yield the slices that make up this rank's part, in the order of the parameter.

        Example: rank 1 of 2 holds positions 2 and 3 along axis 0 of a parameter [4, 8] that joins `a` [3, 8] and `b`
        [1, 8]. The slices are `local[0:1] <-> a[2:3]` and `local[1:2] <-> b[0:1]`, with all 8 columns.
        """
        shard = self.shard
        axis = self.row.join.axis
        keys = list(self.row.hf)
        local_shape = shard.tensor.shape
        begin = 0
        end = shard.global_shape[axis]
        others = [slice(None)] * shard.tensor.dim()  # this rank's part along other axes
        # The ranks can split another axis than that of the join: the columns of linear_proj, whose COPY has axis 0, or
        # the rows of MiMo's eh_proj, whose halves of columns are swapped.
        if shard.partition_dim == axis:
            begin = shard.first
            end = begin + local_shape[axis]
        elif shard.partition_dim is not None:
            dim = shard.partition_dim
            others[dim] = slice(shard.first, shard.first + local_shape[dim])

        for source, start, length, local_start in clip(source_ranges_of(self.row, shard), begin, end):
            local_index = [slice(None)] * shard.tensor.dim()
            local_index[axis] = slice(local_start, local_start + length)
            hf_index = list(others)
            hf_index[axis] = slice(start, start + length)
            hf_key = None
            if source != ZEROS:
                hf_key = keys[source]
            yield SlicePair(shard, tuple(local_index), hf_key, tuple(hf_index))


def source_ranges_of(row: Row, shard: Shard) -> list[SourceRange]:
    """Return the ranges of the row's join for this parameter's size and number of tensor-parallel ranks."""
    axis = row.join.axis
    tp_size = 1 if shard.partition_dim is None else shard.tp_size
    return row.join.source_ranges([shape[axis] for shape in row.hf.values()], shard.global_shape[axis], tp_size)


def bind(
    shards: Sequence[Shard],
    rows: Sequence[Row],
    *,
    borrowed: Sequence[Row] = (),
    not_read: Collection[str] = (),
    others_hold: Callable[[str], bool] = lambda name: False,
    hf_shapes: Mapping[str, Shape] | None = None,
    ignored: Collection[str] = (),
    what: str = "the checkpoint",
    hint: str = "",
) -> list[Binding]:
    """Match the parameters of this rank with HF keys, or report every mismatch.

    Args:
        shards: the parameters of this rank.
        rows: bridge rows. Each row claims its HF keys: no other row may contain these keys.
        borrowed: bridge rows that read HF keys which other rows claim, for example to initialize a head from the last
            layer.
        not_read: names of Megatron parameters that are not filled from HF tensors and require no row.
        others_hold: returns whether another rank can hold the parameter with a given name, which is not in `shards`.
        hf_shapes: when loading, shapes of the HF tensors; every key must be claimed or ignored.
        ignored: HF keys that are deliberately not read.
        what, hint: for error messages, the name of the HF tensors' source, such as "the checkpoint", and the hint.

    Raises:
        UserError: there are mismatches. The error lists Megatron parameters without a source, rows without a parameter,
            missing and unexpected HF keys, and different shapes.
        ValueError: two rows claim the same HF key or parameter, or a join does not use each element once. This is a bug
            in the rows of a family.
    """
    all_rows = (*rows, *borrowed)
    row_of = _rows_by_name(all_rows)
    _check_claims(rows)

    names = {shard.name for shard in shards}
    problems = [f"no source for {name}" for name in sorted(names - row_of.keys() - set(not_read))]
    for row in all_rows:
        # A later pipeline stage can hold only a copy, such as the output layer of a tied model.
        if names.isdisjoint((row.mcore, *row.mcore_copies)) and not others_hold(row.mcore):
            problems.append(f"the Megatron model has no {row.mcore}")
    for name in not_read:
        if name not in names and not others_hold(name):
            problems.append(f"the Megatron model has no {name}")
    # Only when loading: an export writes the tensors of the rows, and no file exists yet.
    if hf_shapes is not None:
        problems += compare_shapes(expected_shapes(all_rows, hf_shapes), hf_shapes, ignored)

    bindings = []
    for shard in shards:
        row = row_of.get(shard.name)
        if row is None:
            continue
        problem = _misfit(row, shard)
        if problem:
            problems.append(problem)
        else:
            bindings.append(Binding(row, shard, is_copy=shard.name != row.mcore))
    if problems:
        raise UserError(f"{what} and the Megatron model do not match:\n  " + "\n  ".join(some(problems)), hint)
    return bindings


def _rows_by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the bridge rows by the name of their Megatron parameter."""
    row_of: dict[str, Row] = {}
    for row in rows:
        for name in (row.mcore, *row.mcore_copies):
            if name in row_of:
                raise ValueError(f"two rows fill {name}")
            row_of[name] = row
    return row_of


def _check_claims(rows: Iterable[Row]) -> None:
    """Check that no HF key is in two rows."""
    claims: Counter[str] = Counter()
    for row in rows:
        claims.update((*row.hf, *row.hf_copies))
    twice = [key for key, count in claims.items() if count > 1]
    if twice:
        raise ValueError(f"two rows claim {', '.join(twice)}")


def expected_shapes(rows: Sequence[Row], present: Container[str]) -> dict[str, Shape]:
    """Return the shapes of the HF keys that the rows require, and of the copies whose keys are in `present`."""
    expected: dict[str, Shape] = {}
    # In a second pass, and only if the files have them: copies are optional.
    for row in rows:
        expected |= row.hf
    for row in rows:
        expected |= {key: shape for key, shape in row.hf_shapes().items() if key in present}
    return expected


def compare_shapes(
    expected: Mapping[str, Shape], found: Mapping[str, Shape], ignored: Collection[str] = ()
) -> list[str]:
    """Return a problem (one line) for every HF key that is missing, unexpected, or of another shape."""
    problems = [f"missing: {key}" for key in expected if key not in found]
    problems += [f"unexpected: {key}" for key in found if key not in expected and key not in ignored]
    for key, shape in expected.items():
        if key in found and tuple(found[key]) != tuple(shape):
            problems.append(f"{key} has shape {list(found[key])}, config.json requires {list(shape)}")
    return problems


def whole_numbers(rows: Iterable[Row], entries: Mapping[str, Entry]) -> list[str]:
    """Return a problem (one line) for each HF tensor of these bridge rows with an integer dtype, and for each that must
    have one (`Row.is_integer`).

    Integers mean quantized weights otherwise.
    """
    problems = []
    for row in rows:
        required = "these numbers must be integers" if row.is_integer else "weights must be floating-point"
        for key in (*row.hf, *row.hf_copies):
            if key in entries and entries[key].dtype.is_floating_point == row.is_integer:
                problems.append(f"{key} is {entries[key].dtype}; {required}")
    return problems


def _misfit(row: Row, shard: Shard) -> str:
    """Return why the HF tensors of a bridge row cannot fill a parameter; empty if they can."""
    axis = row.join.axis
    shapes = list(row.hf.values())
    other_axes = {_without(shape, axis) for shape in shapes}
    # A fault of the family's rows and not of the files, whose shapes are compared elsewhere.
    if len(other_axes) > 1:
        raise ValueError(f"the HF tensors of {row.mcore} cannot be joined along axis {axis}: {shapes}")
    lengths = [shape[axis] for shape in shapes]
    total = shard.global_shape[axis]
    if len(shard.global_shape) == len(shapes[0]) and _without(shard.global_shape, axis) in other_axes:
        if covers(source_ranges_of(row, shard), lengths, total):
            return ""
        # The lengths add up, so the files fit, and only the order in the family's row can be wrong.
        if sum(lengths) == total:
            raise ValueError(f"the join of {row.mcore} does not use every number once")
    sources = ", ".join(f"{key} {list(shape)}" for key, shape in row.hf.items())
    return f"{shard.name} has shape {list(shard.global_shape)}, which does not match {sources}"


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]
