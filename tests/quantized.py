"""Quantize tiny Hugging Face models, as an independent reference for readers, exports and engines.

compressed_tensors, the library that defines the format with this name, computes scales, rounds and packs the weights of
all formats. `quantize_hf` writes a quantized checkpoint, and `dequantize_hf` the checkpoint with the numbers that its
codes and scales stand for.

    source = make_tiny_hf(tmp_path / "bf16", "qwen3", depth=1, dtype=torch.bfloat16)
    quantized = quantize_hf(source, tmp_path / "int8", "int8", block=True)
    reference = dequantize_hf(source, tmp_path / "reference", "int8", block=True)
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="compressed_tensors is part of vLLM")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

GROUP = 32
"""Input columns per scale of the 4-bit formats."""
BLOCK = (32, 32)
"""Rows and columns per scale of DeepSeek's format in most tests. Published checkpoints have 128 x 128, and vLLM's
kernel for CPUs supports only multiples of 128 columns.
"""

Parts = dict[str, torch.Tensor]
"""The stored tensors of a weight, by the last component of their names."""


@dataclass(frozen=True)
class Format:
    """A format of quantized checkpoints.

    Attributes:
        config: quantization_config without a list of modules.
        list_key: key of quantization_config that lists modules which are not quantized.
        compress: returns the stored tensors of a weight [out, in].
        decompress: inverts `compress` up to rounding, in the dtype of the scales.
    """

    config: dict[str, Any]
    list_key: str
    compress: Callable[[torch.Tensor], Parts]
    decompress: Callable[[Parts], torch.Tensor]


def _args(**settings: Any) -> QuantizationArgs:
    return QuantizationArgs(**settings)


def _group_of(args: QuantizationArgs, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [out, in] as [rows of scales, columns of scales, elements per scale]."""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size or columns),
        "tensor_group": (1, args.group_size or columns),
        "block": tuple(args.block_structure or (rows, columns)),
    }[str(args.strategy)]
    if args.strategy == "block":
        weight = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    elif columns % width:
        raise ValueError(f"{list(weight.shape)} does not consist of groups of {width} columns")
    return weight.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)


def _qparams(args: QuantizationArgs, weight: torch.Tensor) -> Parts:
    """Return scale and zero point of a weight, from the extreme values of each group."""
    groups = _group_of(args, weight)
    scale, zero_point = calculate_qparams(groups.amin(2), groups.amax(2), args)
    if args.strategy == "tensor":
        scale, zero_point = scale.view(1), zero_point.view(1)
    return {"weight_scale": scale, "weight_zero_point": zero_point}


def _scheme(weights: QuantizationArgs, activations: QuantizationArgs | None = None) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


def _compressed_tensors(scheme: QuantizationScheme, name: str) -> Format:
    """Return a format of compressed_tensors; `name` is its registered compressor."""
    args: Any = scheme.weights
    compressor: Any = BaseCompressor.get_value_from_registry(name)

    def compress(weight: torch.Tensor) -> Parts:
        return compressor.compress({"weight": weight} | _qparams(args, weight), scheme)

    def decompress(parts: Parts) -> torch.Tensor:
        return compressor.decompress(parts, scheme)["weight"]

    settings: dict[str, Any] = {"format": name, "quantization_status": "compressed"}
    config = QuantizationConfig(config_groups={"group_0": scheme}, **settings).model_dump(mode="json")
    del config["ignore"]
    return Format(config | {"quant_method": "compressed-tensors"}, "ignore", compress, decompress)


NVFP4 = _args(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
    zp_dtype=torch.float8_e4m3fn,
)


def nvfp4_parts(weight: torch.Tensor, largest: torch.Tensor) -> Parts:
    """Return the stored tensors of a weight in NVFP4.

    Args:
        largest: largest absolute value of the weights with a common global scale.
    """
    compressor: Any = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    groups = _group_of(NVFP4, weight)
    global_scale = generate_gparam(-largest.float(), largest.float())
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), NVFP4, global_scale)
    parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    with torch.compiler.set_stance("force_eager"):  # compiling its rounding takes half a minute
        return compressor.compress(parts, _scheme(NVFP4))


def _nvfp4() -> Format:
    """Return NVFP4 with weights alone in four bits, with a global scale per matrix."""
    own = _compressed_tensors(_scheme(NVFP4), "nvfp4-pack-quantized")
    return replace(own, compress=lambda weight: nvfp4_parts(weight, weight.abs().max()))


def _fp8_blocks(scale_dtype: torch.dtype, block: tuple[int, int] = BLOCK) -> Format:
    """Return the format of DeepSeek-V3 with scales in `scale_dtype`."""
    args = _args(num_bits=8, type="float", strategy="block", block_structure=list(block))
    compressor: Any = BaseCompressor.get_value_from_registry("float-quantized")

    def compress(weight: torch.Tensor) -> Parts:
        scale = _qparams(args, weight.float())["weight_scale"].to(scale_dtype)
        parts = compressor.compress({"weight": weight.float(), "weight_scale": scale.float()}, _scheme(args))
        return {"weight": parts["weight"], "weight_scale_inv": scale}

    def decompress(parts: Parts) -> torch.Tensor:
        scale = parts["weight_scale_inv"].float()
        scale = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        rows, columns = parts["weight"].shape
        return parts["weight"].float() * scale[:rows, :columns]

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    return Format(config, "modules_to_not_convert", compress, decompress)


def _four_bits(weight: torch.Tensor, symmetric: bool) -> Parts:
    """Return 4-bit codes [out, in] of a weight and their zero points, both from -8 to 7, and scales."""
    args = _args(num_bits=4, strategy="group", group_size=GROUP, symmetric=symmetric)
    qparams = _qparams(args, weight.float())
    scale = qparams["weight_scale"].half().float()  # both formats store scales in float16
    zero_point = qparams["weight_zero_point"]
    codes = quantize(weight.float(), scale, zero_point, args, dtype=torch.int8)
    return {"codes": codes, "scale": scale, "zero_point": zero_point}


def _gptq(symmetric: bool) -> Format:
    """Return GPTQ's own format in 4 bits, its first version, which stores zero points minus 1."""

    def compress(weight: torch.Tensor) -> Parts:
        parts = _four_bits(weight, symmetric)
        return {
            "qweight": pack_to_int32(parts["codes"].T.contiguous(), 4, packed_dim=0).contiguous(),
            "qzeros": pack_to_int32((parts["zero_point"].T - 1).contiguous().to(torch.int8), 4).contiguous(),
            "scales": parts["scale"].T.half().contiguous(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
        }

    def decompress(parts: Parts) -> torch.Tensor:
        scale = parts["scales"].float().T
        shape = torch.Size((scale.shape[1] * GROUP, scale.shape[0]))
        codes = unpack_from_int32(parts["qweight"], 4, shape, packed_dim=0).T
        zero_point = unpack_from_int32(parts["qzeros"], 4, torch.Size(scale.T.shape)).T + 1
        return dequantize(codes.contiguous(), scale.contiguous(), zero_point.contiguous())

    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    return Format(config, "", compress, decompress)


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output column of each 4-bit number in an int32 of AWQ's format."""


def _awq() -> Format:
    """Return AWQ's own format (its "gemm" version), which packs 8 output columns into an int32 in `_AWQ_ORDER`."""

    def pack(codes: torch.Tensor) -> torch.Tensor:
        ordered = codes.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)
        return pack_to_int32(ordered.contiguous().to(torch.int8), 4).contiguous()

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        rows, columns = packed.shape
        ordered = unpack_from_int32(packed, 4, torch.Size((rows, columns * 8))).unflatten(1, (-1, 8))
        return ordered[..., list(torch.tensor(_AWQ_ORDER).argsort())].flatten(1)

    def compress(weight: torch.Tensor) -> Parts:
        parts = _four_bits(weight, symmetric=False)
        return {
            "qweight": pack(parts["codes"].T),
            "qzeros": pack(parts["zero_point"].T),
            "scales": parts["scale"].T.half().contiguous(),
        }

    def decompress(parts: Parts) -> torch.Tensor:
        codes, zero_point = unpack(parts["qweight"]).T, unpack(parts["qzeros"]).T
        return dequantize(codes.contiguous(), parts["scales"].float().T.contiguous(), zero_point.contiguous())

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Format(config, "modules_to_not_convert", compress, decompress)


def _modelopt_nvfp4() -> Format:
    """Return ModelOpt's NVFP4: the codes of `_nvfp4` under other names, and the reciprocal of its global scale."""
    own = _nvfp4()

    def compress(weight: torch.Tensor) -> Parts:
        parts = own.compress(weight)
        factor = 1 / parts["weight_global_scale"].reshape(())
        codes, scale = parts["weight_packed"], parts["weight_scale"]
        return {"weight": codes, "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}

    def decompress(parts: Parts) -> torch.Tensor:
        codes = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], dim=2).flatten(1).long()
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        scale = parts["weight_scale"].float() * parts["weight_scale_2"]
        return torch.cat([sizes, -sizes])[codes] * scale.repeat_interleave(16, dim=1)

    return Format({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "ignore", compress, decompress)


def _modelopt_fp8() -> Format:
    """Return ModelOpt's FP8 with one scale per matrix."""

    def compress(weight: torch.Tensor) -> Parts:
        scale = weight.float().abs().max() / 448
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}

    def decompress(parts: Parts) -> torch.Tensor:
        return parts["weight"].float() * parts["weight_scale"]

    return Format({"quant_method": "modelopt", "quant_algo": "FP8"}, "ignore", compress, decompress)


_INT8_PER_TOKEN = _args(num_bits=8, strategy="token", dynamic=True)
_FP8_PER_TOKEN = _args(num_bits=8, type="float", strategy="token", dynamic=True)
FORMATS: dict[str, Format] = {
    "int8": _compressed_tensors(
        _scheme(_args(num_bits=8, strategy="channel"), _INT8_PER_TOKEN),
        "int-quantized",
    ),
    "int4": _compressed_tensors(_scheme(_args(num_bits=4, strategy="group", group_size=GROUP)), "pack-quantized"),
    "int4_asym": _compressed_tensors(
        _scheme(_args(num_bits=4, strategy="group", group_size=GROUP, symmetric=False)), "pack-quantized"
    ),
    "fp8": _compressed_tensors(
        _scheme(_args(num_bits=8, type="float", strategy="channel"), _FP8_PER_TOKEN), "float-quantized"
    ),
    "fp8_tensor": _compressed_tensors(
        _scheme(_args(num_bits=8, type="float", strategy="tensor"), _FP8_PER_TOKEN), "float-quantized"
    ),
    "nvfp4": _nvfp4(),
    "fp8_blocks": _fp8_blocks(torch.float32),
    "fp8_blocks_bf16": _fp8_blocks(torch.bfloat16),
    "fp8_blocks_128": _fp8_blocks(torch.float32, (128, 128)),
    "modelopt_fp8": _modelopt_fp8(),
    "modelopt_nvfp4": _modelopt_nvfp4(),
    "gptq": _gptq(symmetric=True),
    "gptq_asym": _gptq(symmetric=False),
    "awq": _awq(),
}
"""All formats by name. 4-bit formats require input sizes that are multiples of `GROUP`, and the last three also output
sizes that are multiples of 8.
"""

_LINEAR = re.compile(
    r"((?:model|mtp|backbone)\..*\.\d+\.(?:(?:self_attn|linear_attn|mlp|mixer|experts)\.(?!indexer\.|g_proj\b).*proj\w*|"
    r"block_sparse_moe\..*w[123]))\.weight"
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_HEAD = re.compile(r"(?:^mtp\.|\.mtp\.layers\.|\.mtp_(?:layers|block)\.)")


def linear_modules(directory: Path, tensors: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the names, in files, of the linear modules in decoder layers: those of the trunk, and those of the heads.

    Routers, gates of attention heads, projections of MTP heads, embeddings and output layers are not among them.
    """
    config = json.loads((directory / "config.json").read_text())
    num_layers = config.get("text_config", config)["num_hidden_layers"]
    trunk, heads = [], []
    for match in filter(None, map(_LINEAR.fullmatch, tensors)):
        module = match.group(1)
        layer = re.search(r"\.layers\.(\d+)\.", module)
        is_head = _HEAD.search(module) or (layer and int(layer.group(1)) >= num_layers)
        (heads if is_head else trunk).append(module)
    return trunk, heads


def quantized_modules(
    directory: Path, tensors: Mapping[str, torch.Tensor], block: bool, experts: bool, but: Collection[str]
) -> list[str]:
    """Return the names of the modules that `quantize_hf` quantizes with these arguments."""
    trunk, heads = linear_modules(directory, tensors)
    modules = trunk + heads * block
    return [module for module in modules if module not in but and (experts or not _EXPERT.search(f"{module}."))]


def quantize_hf(
    source: Path,
    target: Path,
    name: str,
    *,
    block: bool,
    experts: bool = True,
    but: Collection[str] = (),
    ignore: list[str] | None = None,
) -> Path:
    """Write a quantized copy of a Hugging Face model; return its directory.

    Args:
        source: a directory that `make_tiny_hf` wrote.
        name: a key of `FORMATS`.
        block: whether the decoder blocks of the MTP heads are quantized, in addition to the trunk. The projection that
            joins embedding and hidden state never is, nor are embeddings, output layer and routers.
        experts: whether routed experts are quantized.
        but: names in files of further modules that are not quantized.
        ignore: list in config.json of modules that are not quantized; by default the linear modules that are not
            quantized, with their names in the files. GPTQ's format has no such list.
    """
    scheme = FORMATS[name]
    tensors = load_file(source / "model.safetensors")
    modules = quantized_modules(source, tensors, block, experts, but)
    for module in modules:
        parts = scheme.compress(tensors.pop(f"{module}.weight"))
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    if ignore is None:
        ignore = _plain_modules(tensors)
    quantization = dict(scheme.config)
    if scheme.list_key:
        quantization[scheme.list_key] = ignore
    return _write(source, target, tensors, {"quantization_config": quantization})


def dequantize_hf(source: Path, target: Path, name: str, *, block: bool, experts: bool = True) -> Path:
    """Write the plain copy of a Hugging Face model whose weights are those of `quantize_hf` with the same arguments.

    Weights keep their dtype in `source`, so with bfloat16 the product of code and scale is rounded to bfloat16.
    """
    scheme = FORMATS[name]
    tensors = load_file(source / "model.safetensors")
    for module in quantized_modules(source, tensors, block, experts, but=()):
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = scheme.decompress(scheme.compress(weight)).to(weight.dtype)
    return _write(source, target, tensors, {})


def _plain_modules(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the modules with a plain matrix, except embeddings and convolutions."""
    matrices = [key for key, tensor in tensors.items() if key.endswith(".weight") and tensor.dim() == 2]
    plain = [key for key in matrices if tensors[key].is_floating_point() and tensors[key].element_size() > 1]
    return [key.removesuffix(".weight") for key in plain if "embed_tokens" not in key]


def _write(source: Path, target: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any]) -> Path:
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target
