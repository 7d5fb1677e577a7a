"""Derive settings of `export --quant_method` from its options."""

from swiftlite.args.commands import ExportArgs

CALIBRATED_METHODS = ("gptq", "awq")
"""Values of --quant_method that require --dataset, and that llm-compressor computes."""


def quant_bits_of(args: ExportArgs) -> int:
    """Return --quant_bits or its default."""
    if args.quant_bits is None:
        return 8 if args.quant_method in ("rtn", "fp8") else 4
    return args.quant_bits
