"""Describe training with matrix products in 8 and 4 bits: options, requirements and memory.

Transformer Engine defines the formats of the quantized copies of tensors and of their scales, and torch those of its
own products (`model/layers/fp8.py`). This module does not import torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from swiftlite.args.config import Problem
from swiftlite.args.fields import KernelArgs, ParallelLayout
from swiftlite.bridge.rows import Row
from swiftlite.families.architecture import Architecture
from swiftlite.families.rank import Quantized

_LOCAL_RECIPES = ("rowwise", "tensorwise")
"""Recipes that torch supports without Transformer Engine."""


@dataclass(frozen=True)
class LowPrecision:
    """Precision of 8 or 4 bits for the products of linear layers and experts in training.

    Attributes:
        format: megatron-core's `fp8` ("e4m3", "hybrid") or `fp4` ("e2m1").
        recipe: granularity of scales, by megatron-core's names.
        bf16_at_start, bf16_at_end: number of first and last decoder layers that remain in bfloat16.
        is_local: whether torch computes the products instead of Transformer Engine. Gradients of weights and experts
            then stay in bfloat16.
    """

    format: str
    recipe: str
    bf16_at_start: int = 1
    bf16_at_end: int = 1
    is_local: bool = False

    @property
    def is_fp4(self) -> bool:
        return self.format == "e2m1"

    @property
    def described(self) -> str:
        """Return a description for reports."""
        described = f"{self.name.upper()} {self.format}, {self.recipe}"
        if self.is_local:
            return f"{described}, weight gradients in bfloat16"
        return described

    @property
    def name(self) -> Literal["fp4", "fp8"]:
        """Name in the options of megatron-core and swiftlite."""
        if self.is_fp4:
            return "fp4"
        return "fp8"

    @property
    def option(self) -> str:
        """The option that selects this precision, with its value."""
        return f"--{self.name}_format {self.format}"

    @property
    def flag(self) -> str:
        """The options that select this precision, for messages."""
        if self.is_fp4:
            return self.option
        return f"{self.option} with {self.recipe} scales"

    @property
    def tokens(self) -> int:
        """The number by which a rank's number of tokens must be divisible.

        It is defined by megatron-core's fp8_utils.py:168, and by the first dimension of a scale of Transformer Engine's
        NVFP4Quantizer. torch's products accept any number of tokens.
        """
        if self.is_local:
            return 1
        return self.sizes

    @property
    def sizes(self) -> int:
        """The number by which the sizes of a rank's part of a matrix must be divisible."""
        return {"mxfp8": 32, "nvfp4": 32}.get(self.recipe, 16)

    @property
    def quantized(self) -> Quantized:
        """Bytes per element in memory, from transformer_engine's tensor/*.py (2.20.2).
        `tests/parallel/test_low_precision.py` counts these bytes. With the recipe `tensorwise`, a Blackwell GPU stores
        weights in only one memory order, which takes half of these bytes. torch's products store no copy of a weight,
        and of an input only the unquantized one."""
        if self.is_local:
            return Quantized(1, 0)
        copy, weights = {
            "tensorwise": (1, 2),
            "blockwise": (1 + 4 / 128, 2 + 2 * 4 / 128**2),
            "mxfp8": (1 + 1 / 32, 2 + 2 / 32),
            "nvfp4": (1 / 2 + 1 / 16, 1 + 2 / 16),
        }[self.recipe]
        return Quantized(copy, weights)

    @property
    def moved(self) -> float:
        """Bytes moved to quantize a 16-bit element, counted from the kernels.

        These are one read (two if one scale is used for the whole tensor), and one write in each of two memory orders;
        for torch's products, which are quantized separately in each pass, in one order.
        """
        reads, writes = 1, 2
        if self.recipe in ("tensorwise", "nvfp4"):
            reads = 2
        if self.is_local:
            writes = 1
        return 2 * reads + writes * self.quantized.copy

    @property
    def speedup(self) -> int:
        """Speed relative to bfloat16, from the vendors' specifications of tensor cores."""
        return {"fp8": 2, "fp4": 4}[self.name]

    @property
    def capability(self) -> float:
        """Minimum compute capability that torch or Transformer Engine requires (pytorch/quantization.py:149 of
        2.20.2)."""
        return {"rowwise": 8.9, "tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}[self.recipe]

    def is_in_layer(self, number: int, num_layers: int) -> bool:
        """Return whether decoder layer `number` (from 0) uses this precision."""
        return self.bf16_at_start <= number < num_layers - self.bf16_at_end

    def mcore_config(self) -> dict[str, Any]:
        """Return the arguments of TransformerConfig. With them, megatron-core calls Transformer Engine."""
        if self.is_local:
            return {}
        return {
            self.name: self.format,
            f"{self.name}_recipe": self.recipe,
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": self.bf16_at_start,
            "num_layers_at_end_in_bf16": self.bf16_at_end,
        }


def low_precision_of(args: KernelArgs) -> LowPrecision | None:
    """Return the low precision that the options select."""
    layers = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    if args.fp4_format != "none":
        return LowPrecision(args.fp4_format, "nvfp4", *layers)
    if args.fp8_format != "none":
        is_local = args.transformer_impl == "local"
        recipe = args.fp8_recipe or ("rowwise" if is_local else "blockwise")
        return LowPrecision(args.fp8_format, recipe, *layers, is_local=is_local)
    return None


def precision_problems(args: KernelArgs, is_float32: bool) -> Iterator[Problem]:
    """Yield invalid combinations of options, independent of model and GPU."""
    low = low_precision_of(args)
    if args.fp8_recipe and args.fp8_format == "none":
        yield f"--fp8_recipe {args.fp8_recipe} requires --fp8_format", "add --fp8_format hybrid, or remove it"
    if low is None:
        return
    if low.is_fp4 and args.fp8_format != "none":
        yield f"{low.option} cannot be combined with --fp8_format {args.fp8_format}", "remove one of the two"
    other, added = (
        "transformer_engine",
        "add --transformer_impl transformer_engine, on an NVIDIA GPU that supports this",
    )
    if low.is_fp4 and args.transformer_impl == "local":
        yield f"{low.option} requires --transformer_impl {other}", added
    elif low.is_local and low.recipe not in _LOCAL_RECIPES:
        yield f"--fp8_recipe {low.recipe} requires --transformer_impl {other}", f"use --fp8_recipe rowwise, or {added}"
    elif low.recipe == "rowwise" and not low.is_local:
        yield (
            f"--fp8_recipe rowwise requires --transformer_impl local, not {other}",
            "use --fp8_recipe blockwise, or --transformer_impl local",
        )
    if is_float32:
        yield f"{low.option} does not support --torch_dtype float32", "use --torch_dtype bfloat16"


def takes_low_precision(name: str) -> bool:
    """Return whether the matrix with this Megatron name supports low precision.

    Matrices of experts support it if grouped.
    """
    # The outputs of down-projections are gathered, and gates of heads have few rows, so these stay in bfloat16.
    is_excluded = "_down_proj" in name or "linear_gate" in name
    return re.search(r"(^|\.)(linear_\w+|eh_proj)\.weight$", name) is not None and not is_excluded


def low_precision_misfit(row: Row, ranks: int, multiple: int) -> int:
    """Return a rank's number of rows or columns of a low-precision matrix if it is not divisible by `multiple`;
    otherwise 0.
    """
    if not takes_low_precision(row.mcore):
        return 0
    shapes = list(row.hf.values())
    sizes = list(shapes[0])
    sizes[row.join.axis] = sum(shape[row.join.axis] for shape in shapes)
    if re.search(r"linear_(proj|fc2)\.weight$", row.mcore):  # row parallel
        sizes[1] //= ranks
    else:
        sizes[0] //= ranks
    return next((size for size in sizes if size % multiple), 0)


def model_problems(low: LowPrecision, layout: ParallelLayout, architecture: Architecture) -> Iterator[Problem]:
    """Yield reasons why a model cannot be trained with low precision and this layout."""
    num_layers = most = len(architecture.layers)
    if not low.is_local:
        most = num_layers // layout.pipeline_model_parallel_size  # megatron-core's transformer_config.py:996
    for end, number in (("start", low.bf16_at_start), ("end", low.bf16_at_end)):
        if number > most:
            yield (
                f"--num_layers_at_{end}_in_bf16 {number} exceeds the {most} decoder layers of a pipeline stage",
                f"use --num_layers_at_{end}_in_bf16 {most} or less",
            )
    if low.bf16_at_start + low.bf16_at_end >= num_layers:
        yield (
            f"{low.flag} has no effect: the first {low.bf16_at_start} and last {low.bf16_at_end} of {num_layers} "
            "decoder layers stay in bfloat16",
            "use --num_layers_at_start_in_bf16 0 --num_layers_at_end_in_bf16 0",
        )
    yield from _misfits(low, layout, architecture)


def _misfits(low: LowPrecision, layout: ParallelLayout, architecture: Architecture) -> Iterator[Problem]:
    """Yield a problem for the first matrix whose size is not supported."""
    for part in architecture.sublayers:
        for row in part.rows():
            ranks = layout.tensor_model_parallel_size
            if ".experts." in row.mcore:
                if low.is_local:
                    continue
                ranks = layout.expert_tensor_parallel_size
            size = low_precision_misfit(row, ranks or 1, low.sizes)
            if size:
                yield (
                    f"{low.flag}: {', '.join(row.hf)} has {size} rows or columns on a rank, not a multiple of "
                    f"{low.sizes}",
                    "remove it, or use fewer tensor-parallel ranks",
                )
                return
