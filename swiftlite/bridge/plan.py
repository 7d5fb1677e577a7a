"""The plan of a transfer: rows bound to live parameters, complete or refused before a single tensor is read or written.

Pure: it knows shapes and ranges, not files and not process groups. A `Shard` comes from `placement.py`; the copies of a
finished plan are carried out by `transfer.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swiftlite.bridge.layout import ZEROS, clip, covers
from swiftlite.bridge.rows import Row, Shape
from swiftlite.bridge.tensors import Index, some
from swiftlite.errors import UserError


@dataclass(frozen=True)
class Shard:
    """One Megatron parameter (or persistent buffer) as this rank holds it.

    Args:
        name: whole Megatron name, layers counted over all pipeline stages.
        tensor: the local numbers.
        partition_dim: axis along which tensor-parallel ranks share the parameter; None where each holds all of it.
        tp_rank, tp_size: this rank's part of it.
        writes: whether this rank's numbers go into an export; False for replicas, so nothing is written twice.
    """

    name: str
    tensor: torch.Tensor
    partition_dim: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    writes: bool = True

    @property
    def global_shape(self) -> Shape:
        """Shape of the parameter over all tensor-parallel ranks."""
        shape = list(self.tensor.shape)
        if self.partition_dim is not None:
            shape[self.partition_dim] *= self.tp_size
        return tuple(shape)

    @property
    def first(self) -> int:
        """Where this rank's part begins along `partition_dim`."""
        return 0 if self.partition_dim is None else self.tp_rank * self.tensor.shape[self.partition_dim]


class Copy(NamedTuple):
    """`shard.tensor[local_index]` <-> `hf_key[hf_index]`; without an hf_key the local numbers are padding, zero."""

    shard: Shard
    local_index: Index
    hf_key: str | None
    hf_index: Index


@dataclass(frozen=True)
class Binding:
    """A row and the shard that it fills or reads."""

    row: Row
    shard: Shard
    is_copy: bool  # the shard is one of the row's mcore_copies

    def copies(self) -> Iterator[Copy]:
        """The slices that make up this rank's part, in the order of the parameter."""
        shard, axis = self.shard, self.row.layout.axis
        keys = list(self.row.hf)
        pieces_from, pieces_to = 0, shard.global_shape[axis]
        rest = [slice(None)] * shard.tensor.dim()  # the HF side of the axes that the layout leaves alone
        if shard.partition_dim == axis:
            pieces_from, pieces_to = shard.first, shard.first + shard.tensor.shape[axis]
        elif shard.partition_dim is not None:
            dim = shard.partition_dim
            rest[dim] = slice(shard.first, shard.first + shard.tensor.shape[dim])
        for source, start, length, local_start in clip(segments_of(self.row, shard), pieces_from, pieces_to):
            local_index, hf_index = [slice(None)] * shard.tensor.dim(), list(rest)
            local_index[axis] = slice(local_start, local_start + length)
            hf_index[axis] = slice(start, start + length)
            yield Copy(shard, tuple(local_index), None if source == ZEROS else keys[source], tuple(hf_index))


def segments_of(row: Row, shard: Shard):
    """The row's layout for the size and the tensor-parallel sharing of this parameter."""
    axis = row.layout.axis
    tp_size = 1 if shard.partition_dim is None else shard.tp_size
    return row.layout.segments([shape[axis] for shape in row.hf.values()], shard.global_shape[axis], tp_size)


def bind(
    shards: Sequence[Shard],
    rows: Sequence[Row],
    *,
    borrowed: Sequence[Row] = (),
    made: Collection[str] = (),
    others_hold: Callable[[str], bool] = lambda name: False,
    hf_shapes: Mapping[str, Shape] | None = None,
    ignored: Collection[str] = (),
    what: str = "the checkpoint",
    hint: str = "",
) -> list[Binding]:
    """Match both sides, or say everything that does not match.

    Args:
        shards: the parameters of this rank.
        rows: rows that claim their HF keys.
        borrowed: rows that read HF keys claimed by others (a head that starts as a copy of the last layer).
        made: Megatron names that get their numbers elsewhere.
        others_hold: whether a parameter that is not in `shards` may be on another rank.
        hf_shapes: what the HF side has, when it exists (loading); every key of it must be claimed or ignored.
        ignored: HF keys that are declared not to be read.
        what, hint: how the error names the HF side, and what it advises.

    Raises:
        UserError: listing every Megatron parameter without a source, every row without a parameter, every HF key that
            is missing or unexpected, every shape that differs.
        ValueError: two rows claim one HF key or one parameter, or a layout does not use each number once: a mistake in
            a family's table.
    """
    row_of: dict[str, tuple[Row, bool]] = {}
    for row in (*rows, *borrowed):
        for name in (row.mcore, *row.mcore_copies):
            if name in row_of:
                raise ValueError(f"two rows fill {name}")
            row_of[name] = (row, name != row.mcore)
    claimed = Counter(key for row in rows for key in (*row.hf, *row.hf_copies))
    if twice := [key for key, count in claimed.items() if count > 1]:
        raise ValueError(f"two rows claim {', '.join(twice)}")

    names = {shard.name for shard in shards}
    problems = [f"no source for {name}" for name in sorted(names - row_of.keys() - set(made))]
    problems += [
        f"the Megatron model has no {row.mcore}"
        for row in (*rows, *borrowed)
        if names.isdisjoint((row.mcore, *row.mcore_copies)) and not others_hold(row.mcore)
    ]
    problems += [f"the Megatron model has no {name}" for name in made if name not in names and not others_hold(name)]
    if hf_shapes is not None:
        expected = {key: shape for row in (*rows, *borrowed) for key, shape in row.hf.items()}
        expected |= {key: shape for row in rows for key, shape in row.hf_shapes().items() if key in hf_shapes}
        problems += compare_shapes(expected, hf_shapes, ignored)

    bindings = []
    for shard in shards:
        if shard.name not in row_of:
            continue
        row, is_copy = row_of[shard.name]
        if problem := _misfit(row, shard):
            problems.append(problem)
        else:
            bindings.append(Binding(row, shard, is_copy))
    if problems:
        raise UserError(f"{what} and the Megatron model do not match:\n  " + "\n  ".join(some(problems)), hint)
    return bindings


def compare_shapes(
    expected: Mapping[str, Shape], found: Mapping[str, Shape], ignored: Collection[str] = ()
) -> list[str]:
    """One line for every HF key that is missing, unexpected, or of another shape."""
    problems = [f"missing: {key}" for key in expected if key not in found]
    problems += [f"unexpected: {key}" for key in found if key not in expected and key not in ignored]
    problems += [
        f"{key} has shape {list(found[key])}, config.json asks for {list(shape)}"
        for key, shape in expected.items()
        if key in found and tuple(found[key]) != tuple(shape)
    ]
    return problems


def report_missing(names: Iterable[str]) -> str:
    """Names for a message, one per line."""
    return "".join(f"\n  {name}" for name in some(names))


def _misfit(row: Row, shard: Shard) -> str:
    """Why the HF tensors of a row cannot fill this parameter; empty when they can."""
    axis, shapes = row.layout.axis, list(row.hf.values())
    other_axes = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if len(other_axes) > 1:
        raise ValueError(f"the HF tensors of {row.mcore} cannot be joined along axis {axis}: {shapes}")
    lengths = [shape[axis] for shape in shapes]
    is_same_elsewhere = shard.global_shape[:axis] + shard.global_shape[axis + 1 :] in other_axes
    if len(shard.global_shape) == len(shapes[0]) and is_same_elsewhere:
        if covers(segments_of(row, shard), lengths, shard.global_shape[axis]):
            return ""
        if sum(lengths) == shard.global_shape[axis]:
            raise ValueError(f"the layout of {row.mcore} does not use every number once")
    sources = ", ".join(f"{key} {list(shape)}" for key, shape in row.hf.items())
    return f"{shard.name} has shape {list(shard.global_shape)}, which cannot hold {sources}"
