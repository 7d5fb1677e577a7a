"""Products of 8 and 4 bits while a model is trained: which the options ask for, what has them, what a number of them
takes. No torch. Scales, and how often each kind of tensor is kept, are Transformer Engine's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swiftlite.args.config import Problem
from swiftlite.args.fields import KernelArgs, ParallelLayout
from swiftlite.bridge.rows import Row
from swiftlite.families.architecture import Architecture
from swiftlite.families.rank import Quantised


@dataclass(frozen=True)
class LowPrecision:
    """Linear layers and experts whose products are of 8 or 4 bits while a model is trained.

    Attributes:
        format: megatron-core's `fp8` ("e4m3", "hybrid") or `fp4` ("e2m1").
        recipe: how numbers share scales, by megatron-core's names.
        bf16_at_start, bf16_at_end: decoder layers that stay in bfloat16.
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
        return f"{'FP4' if self.is_fp4 else 'FP8'} {self.format}, {self.recipe}"

    @property
    def flag(self) -> str:
        return f"--fp4_format {self.format}" if self.is_fp4 else f"--fp8_format {self.format} with {self.recipe} scales"

    @property
    def tokens(self) -> int:
        """Required multiple of a rank's number of tokens (megatron-core's fp8_utils.py:168; the first dimension of a
        scale of Transformer Engine's NVFP4Quantizer)."""
        return {"mxfp8": 32, "nvfp4": 32}.get(self.recipe, 16)

    @property
    def quantised(self) -> Quantised:
        """Bytes per element in memory, read from transformer_engine's tensor/*.py (2.20.2) and counted by
        `tests/parallel/test_low_precision.py`. A Blackwell GPU stores weights of `tensorwise` in one order, half of
        this."""
        copy, weights = {
            "tensorwise": (1, 2),
            "blockwise": (1 + 4 / 128, 2 + 2 * 4 / 128**2),
            "mxfp8": (1 + 1 / 32, 2 + 2 / 32),
            "nvfp4": (1 / 2 + 1 / 16, 1 + 2 / 16),
        }[self.recipe]
        return Quantised(copy, weights)

    @property
    def moved(self) -> float:
        """Bytes moved to quantize a 16-bit element: one read (two if the scale is that of the whole tensor), and a
        write in each of two orders. Counted."""
        reads = 2 if self.recipe in ("tensorwise", "nvfp4") else 1
        return 2 * reads + 2 * self.quantised.copy

    @property
    def speedup(self) -> int:
        """Operations in the time of one in bfloat16: so makers promise it of all tensor cores that have them."""
        return 4 if self.is_fp4 else 2

    @property
    def capability(self) -> float:
        """The compute capability from which on Transformer Engine has it (pytorch/quantization.py:149 of 2.20.2)."""
        return {"tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}[self.recipe]

    def is_in_layer(self, number: int, num_layers: int) -> bool:
        """Whether this decoder layer, from 0, computes so."""
        return self.bf16_at_start <= number < num_layers - self.bf16_at_end

    def mcore_config(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        name = "fp4" if self.is_fp4 else "fp8"
        return {
            name: self.format,
            f"{name}_recipe": self.recipe,
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
        yield f"--fp8_recipe {args.fp8_recipe} without --fp8_format", "add --fp8_format hybrid, or leave it out"
    if low is None:
        return
    flag = f"--fp4_format {low.format}" if low.is_fp4 else f"--fp8_format {low.format}"
    if low.is_fp4 and args.fp8_format != "none":
        yield f"{flag} with --fp8_format {args.fp8_format}", "leave one of the two out"
    if args.transformer_impl == "local":
        yield (
            f"{flag}: such products are Transformer Engine's, but --transformer_impl is local",
            "add --transformer_impl transformer_engine, on an NVIDIA GPU that has them",
        )
    if is_float32:
        yield f"{flag} with --torch_dtype float32", "use --torch_dtype bfloat16"


def takes_low_precision(name: str) -> bool:
    """Whether this matrix, by its Megatron name, is of a layer that computes so; experts are where they are grouped."""
    # The outputs of down-projections are gathered: those stay torch's.
    return re.search(r"(^|\.)(linear_\w+|eh_proj)\.weight$", name) is not None and "_down_proj" not in name


def low_precision_misfit(row: Row, ranks: int, multiple: int) -> int:
    """Return the number of rows or columns of a low-precision matrix on a rank if it is not a multiple; 0 otherwise."""
    if not takes_low_precision(row.mcore):
        return 0
    is_row_parallel = re.search(r"linear_(proj|fc2)\.weight$", row.mcore) is not None
    shapes = list(row.hf.values())
    sizes = list(shapes[0])
    sizes[row.join.axis] = sum(shape[row.join.axis] for shape in shapes)
    sizes[1 if is_row_parallel else 0] //= ranks
    return next((size for size in sizes if size % multiple), 0)


def model_problems(low: LowPrecision, layout: ParallelLayout, architecture: Architecture) -> Iterator[Problem]:
    """Yield why a model cannot be trained with low precision at a layout."""
    num_layers = len(architecture.layers)
    most = num_layers // layout.pipeline_model_parallel_size  # megatron-core's transformer_config.py:996
    for end, number in (("start", low.bf16_at_start), ("end", low.bf16_at_end)):
        if number > most:
            yield (
                f"--num_layers_at_{end}_in_bf16 {number}, but a pipeline stage has {most} decoder layers",
                f"use {most} at most",
            )
    if low.bf16_at_start + low.bf16_at_end >= num_layers:
        yield (
            f"{low.flag}: of {num_layers} decoder layers the first {low.bf16_at_start} and last {low.bf16_at_end} stay "
            "in bfloat16, so none is left",
            "use --num_layers_at_start_in_bf16 0 --num_layers_at_end_in_bf16 0",
        )
    yield from _misfits(low, layout, architecture)


def _misfits(low: LowPrecision, layout: ParallelLayout, architecture: Architecture) -> Iterator[Problem]:
    """The first matrix that does not fit."""
    for part in architecture.sublayers:
        for row in part.rows():
            is_expert = ".experts." in row.mcore
            ranks = layout.expert_tensor_parallel_size if is_expert else layout.tensor_model_parallel_size
            size = low_precision_misfit(row, ranks or 1, low.tokens)
            if size:
                yield (
                    f"{low.flag}: {', '.join(row.hf)} has {size} rows or columns on a rank, not a multiple of "
                    f"{low.tokens}",
                    "leave it out, or use fewer tensor-parallel ranks",
                )
                return
