"""Checkpoints in the formats of the library compressed-tensors (llm-compressor).

A matrix `X.weight` is stored in one of these ways; scales `X.weight_scale` are in the dtype of the model:

- float-quantized, int-quantized: codes `X.weight` in float8_e4m3fn or int8
- pack-quantized: codes `X.weight_packed`, several per int32 word, and `X.weight_shape`
- nvfp4-pack-quantized: codes `X.weight_packed`, two FP4 numbers per byte, scales in float8_e4m3fn, and
  `X.weight_global_scale`, by which scales are divided

Asymmetric formats also have `X.weight_zero_point`. Integer codes in words are unsigned. `quantization.py` checks
config.json, whose `config_groups` define the number of bits and the size of blocks for groups of modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.blocks import FP4_VALUES, LARGEST_FP8, Blocks, Layout, Packing
from swiftlite.bridge.encoding.encoding import EncodedTensor
from swiftlite.bridge.encoding.stored import check_shapes, dtype_name, is_for_serving, matrix_shape
from swiftlite.bridge.entry import Entry

_CODES = (torch.float8_e4m3fn, torch.int8)
_SHAPE = ("weight_shape", (2,))


@dataclass(frozen=True)
class WeightArgs:
    """The `weights` of a group in config.json.

    Attributes:
        bits: bits of a code.
        type: "int" or "float".
        strategy: the numbers with a common scale: "tensor", "channel", "group", "tensor_group" or "block".
        size: columns of a group.
        block: rows and columns of a block.
        symmetric: whether there are no zero points.
        orders_columns: whether `weight_g_idx` assigns columns to groups (act-order).
    """

    bits: int
    type: str
    strategy: str
    size: int = 0
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True
    orders_columns: bool = False

    @classmethod
    def from_json(cls, weights: Mapping[str, Any]) -> "WeightArgs":
        block = weights.get("block_structure") or (0, 0)
        if isinstance(block, str):
            block = [int(length) for length in block.split("x")]
        size = weights.get("group_size") or 0
        strategy = weights.get("strategy")
        # The defaults of QuantizationArgs in compressed_tensors/quantization/quant_args.py.
        if strategy is None:
            strategy = "tensor"
            if size:
                strategy = "group" if size > 0 else "channel"
        return cls(
            bits=weights.get("num_bits", 8),
            type=weights.get("type", "int"),
            strategy=strategy,
            size=size,
            block=(block[0], block[1]),
            symmetric=weights.get("symmetric", True),
            # "weight" and "static" order columns only during calibration, without weight_g_idx in the files.
            orders_columns=weights.get("actorder") in ("group", "dynamic", True),
        )

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of the numbers of a matrix that have a common scale."""
        if self.strategy == "tensor":
            return shape
        if self.strategy == "channel":
            return 1, shape[1]
        if self.strategy == "block":
            return self.block
        return 1, self.size


@dataclass(frozen=True)
class CompressedTensors:
    """The `Format` of compressed-tensors.

    Args:
        groups: the weights of each group in config.json. The stored tensors of a matrix must match exactly one of them.
    """

    groups: tuple[WeightArgs, ...]

    @classmethod
    def declared(cls, quantization: Mapping[str, Any]) -> "CompressedTensors":
        """Create the format from a quantization_config that `quantization.CHECKS` accepts."""
        groups = [WeightArgs.from_json(group["weights"]) for group in quantization["config_groups"].values()]
        return cls(tuple(dict.fromkeys(groups)))

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        entry = entries[key]
        if key.endswith(".weight_packed"):
            name = key.removesuffix("_packed")
        elif entry.dtype in _CODES and key.endswith(".weight"):
            name = key
        else:
            return None
        fitting: dict[Blocks, None] = {}
        problems = []
        # `targets` name modules or classes of transformers; the stored tensors show the group without them.
        for group in self.groups:
            encoding = self._encoding(name, group, entries)
            if encoding is None:
                continue
            try:
                check_shapes(key, encoding, entries)
                fitting[encoding] = None
            except UserError as error:
                problems.append(error.problem)
        if len(fitting) > 1:
            raise UserError(f"{key} matches several groups of quantization_config")
        if not fitting:
            unknown = f"{key} is {dtype_name(entry)}, which no group of quantization_config has"
            raise UserError("; ".join(problems) or unknown)
        (encoding,) = fitting
        dtype = entries[f"{name}_scale"].dtype
        if encoding.factor:
            dtype = torch.bfloat16
        return EncodedTensor(name, replace(entry, dtype=dtype, shape=encoding.shape), encoding)

    def is_for_serving(self, key: str) -> bool:
        return is_for_serving(key)

    def _encoding(self, name: str, group: WeightArgs, entries: Mapping[str, Entry]) -> Blocks | None:
        """Return the encoding of a tensor if it belongs to a group; None if its stored tensors show that it does not.

        Raises:
            UserError: the stored tensors have invalid shapes.
        """
        packed = entries.get(f"{name}_packed")
        scale = entries.get(f"{name}_scale")
        if scale is None:
            raise UserError(f"{name}_scale is missing")
        if packed is None:
            return self._unpacked(name, group, entries)
        rows, words = matrix_shape(f"{name}_packed", packed.shape)
        if group.type == "float":
            if packed.dtype is not torch.uint8 or group.bits != 4:
                return None
            return fp4((rows, 2 * words), group.size)
        if packed.dtype is not torch.int32:
            return None
        packing = Packing(group.bits, axis=1)
        # The last word of a row can be padded, which only the number of groups shows.
        columns = words * packing.per_word
        if group.strategy in ("group", "tensor_group"):
            columns = scale.shape[-1] * group.size
        return packed_integers((rows, columns), group)

    def _unpacked(self, name: str, group: WeightArgs, entries: Mapping[str, Entry]) -> Blocks | None:
        codes = entries[name]
        if group.bits != 8 or (codes.dtype is torch.int8) != (group.type == "int"):
            return None
        shape = matrix_shape(name, codes.shape)
        axes = len(entries[f"{name}_scale"].shape)
        encoding = Blocks(shape, group.block_of(shape), Layout("weight"), Layout("weight_scale", axes=axes))
        if group.symmetric:
            return encoding
        return replace(encoding, zero_points=Layout("weight_zero_point", axes=axes))


def packed_integers(shape: tuple[int, int], group: WeightArgs) -> Blocks:
    """Return the encoding of a matrix whose codes are packed in int32 words."""
    packing = Packing(group.bits, axis=1)
    codes = Layout("weight_packed", packing=packing)
    encoding = Blocks(shape, group.block_of(shape), codes, Layout("weight_scale"), unread=(_SHAPE,))
    if group.orders_columns:
        encoding = replace(encoding, group_of_column="weight_g_idx")
    if group.symmetric:
        return replace(encoding, zero_point=1 << (group.bits - 1))
    # Codes and zero points are stored with the same offset, so it cancels.
    zero_points = Layout("weight_zero_point", packing=Packing(group.bits, axis=0))
    return replace(encoding, zero_points=zero_points)


def fp4(shape: tuple[int, int], size: int) -> Blocks:
    """Return the encoding of a matrix in NVFP4 with groups of `size` columns."""
    return Blocks(
        shape,
        (1, size),
        Layout("weight_packed", packing=Packing(4, axis=1, word=torch.uint8)),
        Layout("weight_scale"),
        factor=("weight_global_scale", 1),
        dtype=torch.float32,
        values=FP4_VALUES,
    )


@dataclass(frozen=True)
class WritableBlocks(Blocks):
    """Symmetric codes with one scale per channel or group of columns, as a `WritableEncoding`.

    A scale maps the largest absolute value of its numbers to the largest code, as in compressed-tensors: integers of
    b bits have a range of 2^b - 1. Codes are computed in float32
    with the stored scale, so the error is at most half a step, except at the largest values.

    Args:
        bits, type: as in `WeightArgs`.
        scale_dtype: dtype of the stored scales.
    """

    bits: int = 8
    type: str = "int"
    scale_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, shape: tuple[int, int], group: WeightArgs, scale_dtype: torch.dtype) -> "WritableBlocks":
        """Create the encoding of a matrix for the `weights` of a group in config.json.

        Raises:
            ValueError: the matrix does not consist of whole groups.
        """
        block = group.block_of(shape)
        if shape[1] % block[1]:
            raise ValueError(f"{shape[1]} columns do not consist of whole groups of {block[1]}")
        is_packed = group.type == "int" and group.bits < 8
        base = Blocks(shape, block, Layout("weight"), Layout("weight_scale"))
        if is_packed:
            base = packed_integers(shape, group)
        return cls(**vars(base), bits=group.bits, type=group.type, scale_dtype=scale_dtype)

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = tensor.float().unflatten(1, (-1, self.block[1]))
        if self.type == "float":
            lowest, highest = -LARGEST_FP8, LARGEST_FP8
        else:
            # Not symmetric, -8 to 7, as in compressed_tensors (quantization/utils/helpers.py: calculate_range).
            lowest, highest = -float(1 << (self.bits - 1)), float((1 << (self.bits - 1)) - 1)
        scales = (groups.abs().amax(dim=2) / ((highest - lowest) / 2)).to(self.scale_dtype)
        # For groups of zeros, as in calculate_qparams there: the division below would make NaN of 0 / 0.
        scales = torch.where(scales == 0, torch.finfo(self.scale_dtype).eps, scales)
        codes = (groups / scales.float()[..., None]).clamp(lowest, highest).flatten(1)
        if self.type == "float":
            return codes.to(torch.float8_e4m3fn), scales
        codes = codes.round().to(torch.int8)
        if self.codes.packing is None:
            return codes, scales
        # Packed codes are unsigned: -8 to 7 become 0 to 15.
        words = self.codes.pack(codes.int() + self.zero_point)
        return words, scales, torch.tensor(self.shape)


@dataclass(frozen=True)
class WritableFp4(Blocks):
    """NVFP4 codes with one scale per group of columns, as a `WritableEncoding`.

    Scales are relative to `weight_global_scale`, which maps `largest` to the largest scale (448) times the largest code
    (6).

    Args:
        largest: largest absolute value of the matrix, and of the matrices that engines merge with it.
    """

    largest: float = 1.0

    @classmethod
    def of(cls, shape: tuple[int, int], size: int, largest: float) -> "WritableFp4":
        return cls(**vars(fp4(shape, size)), largest=largest)

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        highest = FP4_VALUES[7]
        # quantization/utils/helpers.py: generate_gparam, then calculate_qparams.
        # In float32, and in this order, as in compressed-tensors.
        largest = torch.tensor([self.largest], device=tensor.device).clamp(min=torch.finfo(torch.float32).tiny)
        global_scale = (LARGEST_FP8 * highest / largest).nan_to_num(posinf=1.0)
        groups = tensor.float().unflatten(1, (-1, self.block[1]))
        scales = global_scale * (groups.abs().amax(dim=2) / highest)
        scales = scales.clamp(max=LARGEST_FP8).to(torch.float8_e4m3fn)
        scales = torch.where(scales.float() == 0, torch.finfo(torch.float8_e4m3fn).eps, scales.float())
        codes = _fp4_codes((groups / (scales / global_scale)[..., None]).flatten(1))
        return self.codes.pack(codes), scales.to(torch.float8_e4m3fn), global_scale


def _fp4_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest FP4 numbers; of two equally near ones, that with the even code."""
    # The first middle, between the codes 0 and 1, belongs to the lower one, which is even; the second to the upper.
    middles = [(low + high) / 2 for low, high in pairwise(FP4_VALUES[:8])]
    is_above, reaches = (torch.tensor(part, device=numbers.device) for part in (middles[::2], middles[1::2]))
    sizes = numbers.abs()
    codes = torch.bucketize(sizes, is_above) + torch.bucketize(sizes, reaches, right=True)
    return codes + 8 * numbers.signbit()
