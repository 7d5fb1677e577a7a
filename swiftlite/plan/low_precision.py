"""Describe training with matrix products in 8 and 4 bits: options, requirements and memory.

Transformer Engine defines the formats of the quantized copies of tensors and of their scales. This module does not
import torch.
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


@dataclass(frozen=True)
class LowPrecision:
    """Precision of 8 or 4 bits for the products of linear layers and experts in training.

    Attributes:
        format: megatron-core's `fp8` ("e4m3", "hybrid") or `fp4` ("e2m1").
        recipe: granularity of scales, by megatron-core's names.
        bf16_at_start, bf16_at_end: number of first and last decoder layers that remain in bfloat16.
    """

    format: str
    recipe: str
    bf16_at_start: int = 1
    bf16_at_end: int = 1

    @property
    def is_fp4(self) -> bool:
        return self.format == "e2m1"

    @property
    def described(self) -> str:
        """Return a description for reports."""
        return f"{self.name.upper()} {self.format}, {self.recipe}"

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
        NVFP4Quantizer.
        """
        return {"mxfp8": 32, "nvfp4": 32}.get(self.recipe, 16)

    @property
    def quantized(self) -> Quantized:
        """Bytes per element in memory, from transformer_engine's tensor/*.py (2.20.2).
        `tests/parallel/test_low_precision.py` counts these bytes. With the recipe `tensorwise`, a Blackwell GPU stores
        weights in only one memory order, which takes half of these bytes."""
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

        These are one read (two if one scale is used for the whole tensor), and one write in each of two memory orders.
        """
        reads = 1
        if self.recipe in ("tensorwise", "nvfp4"):
            reads = 2
        return 2 * reads + 2 * self.quantized.copy

    @property
    def speedup(self) -> int:
        """Speed relative to bfloat16, from the vendors' specifications of tensor cores."""
        return {"fp8": 2, "fp4": 4}[self.name]

    @property
    def capability(self) -> float:
        """Minimum compute capability that Transformer Engine requires (pytorch/quantization.py:149 of 2.20.2)."""
        return {"tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}[self.recipe]

    def is_in_layer(self, number: int, num_layers: int) -> bool:
        """Return whether decoder layer `number` (from 0) uses this precision."""
        return self.bf16_at_start <= number < num_layers - self.bf16_at_end

    def mcore_config(self) -> dict[str, Any]:
        """Return the arguments of TransformerConfig."""
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
        return LowPrecision(args.fp8_format, args.fp8_recipe or "blockwise", *layers)
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
    if args.transformer_impl == "local":
        yield (
            f"{low.option} requires --transformer_impl transformer_engine",
            "add --transformer_impl transformer_engine, on an NVIDIA GPU that supports this format",
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
    num_layers = len(architecture.layers)
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
                ranks = layout.expert_tensor_parallel_size
            size = low_precision_misfit(row, ranks or 1, low.tokens)
            if size:
                yield (
                    f"{low.flag}: {', '.join(row.hf)} has {size} rows or columns on a rank, not a multiple of "
                    f"{low.tokens}",
                    "remove it, or use fewer tensor-parallel ranks",
                )
                return
