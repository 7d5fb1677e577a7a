"""Define how Hugging Face tensors become GGUF tensors. Every transform can be inverted.

A transform receives all Hugging Face tensors of a `Conversion` (`tensors.py`) and returns its GGUF tensors. Shapes are
those of torch; a GGUF file lists the same dimensions in reverse order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """The interface of a transform."""

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the GGUF tensors."""
        ...

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the Hugging Face tensors. This is the inverse of `to_gguf`."""
        ...


@dataclass(frozen=True)
class Each:
    """A function of each tensor.

    Attributes:
        forward: returns a GGUF tensor.
        back: its inverse, which returns the Hugging Face tensor.
        is_exact: whether the inverse always returns the bits of the Hugging Face tensor.
    """

    forward: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    is_exact: bool = True

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(map(self.forward, tensors))

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(map(self.back, tensors))


COPY = Each(lambda tensor: tensor, lambda tensor: tensor)
"""Equal tensors with other names."""
ADD_ONE = Each(lambda tensor: tensor.float() + 1, lambda tensor: tensor.float() - 1, is_exact=False)
"""Weights of norms that multiply by 1 + weight; llama.cpp multiplies by the weight."""
NEGATIVE_EXP = Each(lambda tensor: -tensor.float().exp(), lambda tensor: (-tensor.float()).log(), is_exact=False)
"""The decay of a gated delta net or of Mamba-2: `A_log` in Hugging Face files, -exp(A_log) in GGUF files."""
SQUEEZE = Each(lambda tensor: tensor.squeeze(1), lambda tensor: tensor.unsqueeze(1))
"""The kernels of a convolution, [channels, 1, kernel] in Hugging Face files, [channels, kernel] in GGUF files."""


def reshape(hf: tuple[int, ...], gguf: tuple[int, ...]) -> Each:
    """Return the transform of a tensor with other dimensions, for example the norm [groups * channels] of Mamba-2 as
    [groups, channels].

    Args:
        hf, gguf: shapes in the files.
    """
    return Each(lambda tensor: tensor.reshape(gguf), lambda tensor: tensor.reshape(hf))


@dataclass(frozen=True)
class Reorder:
    """Concatenate the Hugging Face tensors along an axis, reorder the result, and split it.

    For example, the queries, keys, values and gates of two groups are in one Hugging Face tensor, ordered by group.
    With one row each, its rows are q0 k0 v0 z0 q1 k1 v1 z1. llama.cpp has a tensor of queries, keys and values and a
    tensor of gates, so the order is (0, 4, 1, 5, 2, 6, 3, 7) and the parts have 6 and 2 rows: q0 q1 k0 k1 v0 v1 and z0
    z1.

    Attributes:
        axis: the axis.
        order: for each index of the concatenated GGUF tensors, the index in the concatenated Hugging Face tensors.
        hf_parts: lengths of the Hugging Face tensors.
        gguf_parts: lengths of the GGUF tensors.
    """

    axis: int
    order: tuple[int, ...]
    hf_parts: tuple[int, ...]
    gguf_parts: tuple[int, ...]

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        order = torch.tensor(self.order)
        return list(
            torch.cat(list(tensors), self.axis).index_select(self.axis, order).split(self.gguf_parts, self.axis)
        )

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        order = torch.tensor(self.order).argsort()
        return list(torch.cat(list(tensors), self.axis).index_select(self.axis, order).split(self.hf_parts, self.axis))


@dataclass(frozen=True)
class Stack:
    """The matrices of all experts in one tensor [experts, out, in]."""

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors))]

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (stacked,) = tensors
        return list(stacked.unbind())


@dataclass(frozen=True)
class SplitKeysAndValues:
    """The up-projection of latent attention: `kv_b` in Hugging Face files, `k_b` and `v_b` in GGUF files.

    The rows of `kv_b` [heads * (key + value), latent] are ordered by head. llama.cpp multiplies queries by the
    projection of keys, so `k_b` is transposed: [heads, latent, key]. `v_b` is [heads, value, latent].

    Attributes:
        heads: number of heads.
        key: size of a key without rotary channels.
        value: size of a value.
    """

    heads: int
    key: int
    value: int

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (both,) = tensors
        keys, values = both.view(self.heads, self.key + self.value, -1).split((self.key, self.value), dim=1)
        return [keys.transpose(1, 2), values]

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        keys, values = tensors
        both = torch.cat((keys.transpose(1, 2), values), dim=1)
        return [both.reshape(self.heads * (self.key + self.value), -1)]


@dataclass(frozen=True)
class Constant:
    """GGUF tensors that no Hugging Face tensor corresponds to.

    Attributes:
        make: returns the tensors.
    """

    make: Callable[[], list[Tensor]]

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.make()

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return []


def zeros(*shapes: tuple[int, ...]) -> Constant:
    """Return the transform of tensors of zeros with these shapes."""
    return Constant(lambda: list(map(torch.zeros, shapes)))


@dataclass(frozen=True)
class Chain:
    """Several transforms, one after the other."""

    transforms: tuple[Transform, ...]

    def to_gguf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        result = list(tensors)
        for transform in self.transforms:
            result = transform.to_gguf(result)
        return result

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        result = list(tensors)
        for transform in reversed(self.transforms):
            result = transform.to_hf(result)
        return result


def is_exact(transform: Transform) -> bool:
    """Return whether `to_hf` always returns the bits of the Hugging Face tensors."""
    if isinstance(transform, Chain):
        return all(is_exact(each) for each in transform.transforms)
    return not isinstance(transform, Each) or transform.is_exact
