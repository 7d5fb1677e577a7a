"""Describe the quantization of a model, for doctor, evaluation.json, acceptance.json and model cards."""

from collections.abc import Mapping
from typing import Any

from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.quantized_heads import quantized_modules
from swiftlite.families.resolved import HfModel


def quantization_of(model: HfModel) -> dict[str, Any]:
    """Return the quantization of a model; empty for a plain model.

    Returns:
        `format` is the method in config.json, with the format of compressed-tensors in parentheses. `weights`
            has one entry for each kind of quantized weights, with `bits` and, if they exist, `group_size` or `block`
            (rows and columns). `activation_bits` is present if engines also round activations. `heads`, which is
            present if the model has MTP heads, is "keep" or "block", as for `export --quant_heads`.
    """
    quantization = model.quantization
    if quantization is None:
        return {}
    found: dict[str, Any] = {"format": quantization.words, "weights": quantization.weights}
    if bits := quantization.activation_bits:
        found["activation_bits"] = bits
    if model.heads.layers:
        modules = quantized_modules(Checkpoint(model.directory).stored)
        in_heads = [name for name in modules if model.family.is_mtp(model.config, f"{name}.weight")]
        found["heads"] = "block" if any(modules[name] for name in in_heads) else "keep"
    return found


def quantization_words(described: Mapping[str, Any]) -> str:
    """Return the result of `quantization_of` as one line; empty for a plain model.

    Args:
        described: may have the `--quant_method` of an export as `method`, which is then the first part of the line.
    """
    if not described:
        return ""
    parts = [str(described["format"]), " and ".join(map(_weights_words, described["weights"]))]
    if "method" in described:
        parts.insert(0, str(described["method"]))
    if "activation_bits" in described:
        parts.append(f"activations {described['activation_bits']} bits")
    if "heads" in described:
        parts.append({"keep": "MTP layers are not quantized", "block": "trunk and MTP layers"}[described["heads"]])
    return ", ".join(part for part in parts if part)


def _weights_words(kind: Mapping[str, Any]) -> str:
    words = f"{kind['bits']} bits"
    if "group_size" in kind:
        words += f", groups of {kind['group_size']}"
    if "block" in kind:
        rows, columns = kind["block"]
        words += f", blocks of {rows} x {columns}"
    return words
