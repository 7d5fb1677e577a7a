"""Read the quantization_config of a config.json, and check whether it is supported. This module does not import torch.

Other modules read the content of quantization_config only through `Quantization`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftlite.base.errors import clip
from swiftlite.bridge.rows import HfConfig

# Keys of FP8 that do not affect reading weights: the treatment of activations while serving, and modules that are not
# quantized, which are recognized by their tensors.
_NOT_OF_WEIGHTS = {"activation_scheme", "scale_fmt", "packed_modules_mapping"}
_NOT_OF_WEIGHTS |= {"modules_to_not_convert", "ignored_layers", "ignore"}
_COMPRESSED = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"}
_ONLY_OF = {"mxfp4": "gpt_oss"}  # whose files have stacks of experts in this format
_E4M3 = ("e4m3", "float8_e4m3fn")
_OF_ALGORITHMS: dict[str, dict[str, Any]] = {
    "FP8": {"bits": 8, "activations": 8},
    "FP8_PER_CHANNEL_PER_TOKEN": {"bits": 8, "activations": 8},
    "FP8_PB_WO": {"bits": 8, "block_structure": [128, 128], "activations": 8},
    "MXFP8": {"bits": 8, "group_size": 32, "activations": 8},
    "NVFP4": {"bits": 4, "group_size": 16, "activations": 4},
    "W4A16_NVFP4": {"bits": 4, "group_size": 16},
}
"""Algorithms of ModelOpt: bits of weights and activations, and the numbers with a common scale."""
_MIXED = "MIXED_PRECISION"
_STRATEGIES = {"tensor", "channel", "group", "tensor_group", "block"}


@dataclass(frozen=True)
class Quantization:
    """The quantization_config of a config.json.

    Except for `method`, the properties require a content that `quantization_problem` accepts.

    Attributes:
        content: the quantization_config as it is in the file.
    """

    content: Mapping[str, Any]

    @classmethod
    def of(cls, hf_config: HfConfig) -> "Quantization | None":
        """Return the quantization that a config.json declares; None if the model is not quantized."""
        content = hf_config.get("quantization_config")
        if not content or not isinstance(content, dict):  # `quantization_problem` refuses other types
            return None
        return cls(content)

    @property
    def method(self) -> str:
        """The format, such as "fp8" or "compressed-tensors"; empty if it is not declared."""
        return str(self.content.get("quant_method") or "")

    @property
    def format(self) -> str:
        """The format inside compressed-tensors, such as "pack-quantized", or ModelOpt's algorithm; empty for other
        methods."""
        if self.method == "modelopt":
            return algorithm_of(self.content)
        if self.method != "compressed-tensors":
            return ""
        return str(self.content.get("format") or "")

    @property
    def words(self) -> str:
        """The method, with the format of compressed-tensors or ModelOpt in parentheses."""
        if self.format:
            return f"{self.method} ({self.format})"
        return self.method

    @property
    def packs_integers(self) -> bool:
        """Whether several integers are stored in one word."""
        return self.format == "pack-quantized" or self.method in ("gptq", "awq")

    @property
    def weights(self) -> list[dict[str, Any]]:
        """The distinct kinds of quantized weights: `bits` and, if they exist, `group_size` or `block` (rows and
        columns).
        """
        kinds = []
        for weights in self._declared_weights():
            kind = {"bits": weights.get("num_bits", weights.get("bits", 8))}
            size = weights.get("group_size")
            if size is not None and size > 0:
                kind["group_size"] = size
            if block := weights.get("block_structure"):
                kind["block"] = [int(length) for length in block.split("x")] if isinstance(block, str) else block
            if kind not in kinds:
                kinds.append(kind)
        return kinds

    @property
    def activation_bits(self) -> int | None:
        """Number of bits to which engines round activations; None if they do not round them."""
        if self.method == "fp8":
            return 8
        if self.method == "modelopt":
            return min((kind["activations"] for kind in self._algorithms() if "activations" in kind), default=None)
        groups = self.content.get("config_groups", {}).values()
        bits = [group["input_activations"].get("num_bits", 8) for group in groups if group.get("input_activations")]
        return min(bits, default=None)

    def _declared_weights(self) -> list[Mapping[str, Any]]:
        """Return the description of each kind of weights in compressed-tensors' words; GPTQ and AWQ say `bits`."""
        if self.method == "modelopt":
            return self._algorithms()
        if "config_groups" in self.content:
            return [group["weights"] for group in self.content["config_groups"].values()]
        if self.method == "fp8":
            return [{"bits": 8, "block_structure": self.content.get("weight_block_size")}]
        if self.method == "mxfp4":
            return [{"bits": 4, "group_size": 32}]
        return [self.content]

    def _algorithms(self) -> list[Mapping[str, Any]]:
        """Return the entry in `_OF_ALGORITHMS` of each of ModelOpt's algorithms in the checkpoint."""
        return [_OF_ALGORITHMS[name] for name in _algorithms_of(self.content)]


def algorithm_of(content: Mapping[str, Any]) -> str:
    """Return the name of ModelOpt's algorithm, which some releases write in small letters; empty if it is missing."""
    return str(content.get("quant_algo") or "").upper()


def _algorithms_of(content: Mapping[str, Any]) -> list[str]:
    """Return the names of all algorithms that ModelOpt used for a checkpoint, each once."""
    if algorithm_of(content) != _MIXED:
        return [algorithm_of(content)]
    return list(dict.fromkeys(algorithm_of(layer) for layer in content["quantized_layers"].values()))


def quantization_problem(hf_config: HfConfig) -> str:
    """Return why the quantization_config of a config.json is not supported; empty if it is supported or missing."""
    content = hf_config.get("quantization_config")
    if content is None:
        return ""
    if content == {}:
        return "quantization_config is empty; remove it if the model is not quantized"
    quantization = Quantization.of(hf_config)
    if quantization is None or quantization.method not in CHECKS:
        *others, last = sorted(CHECKS)
        shown = clip(repr(content), 80)
        if quantization is not None and quantization.method:
            shown = f"of {quantization.method}"
        return f"quantization_config {shown} is not supported; only {', '.join(others)} and {last} are"
    method = quantization.method
    # The encoding finds its tensors by the names of this model's experts.
    if method in _ONLY_OF and hf_config.get("model_type") != _ONLY_OF[method]:
        return f"quantization_config of {method}: only supported for model_type {_ONLY_OF[method]!r}"
    if problem := CHECKS[method](content):
        return f"quantization_config of {method}: {problem}"
    return ""


def describe_quantization(hf_config: HfConfig) -> str:
    """Return the format of a quantized model, such as "compressed-tensors (pack-quantized)"; empty without one."""
    quantization = Quantization.of(hf_config)
    return "" if quantization is None else quantization.words


def _fp8_problem(quantization: Mapping[str, Any]) -> str:
    known = _NOT_OF_WEIGHTS | {"quant_method", "fmt", "weight_block_size"}
    if quantization.get("fmt", "e4m3") not in _E4M3:
        return f"fmt {quantization['fmt']!r} is not supported; it can only be {' or '.join(map(repr, _E4M3))}"
    if unknown := sorted(quantization.keys() - known):
        return f"{', '.join(f'{key} {quantization[key]!r}' for key in unknown)} is not supported"
    block = quantization.get("weight_block_size")
    if block is not None and not _is_block(block):
        return f"weight_block_size {block!r} is not supported; it can only be two numbers, or missing"
    return ""


def _compressed_problem(quantization: Mapping[str, Any]) -> str:
    format = quantization.get("format")
    # Sparse tensors have another layout, and transforms (rotations) also change the inputs of layers.
    for key in ("sparsity_config", "transform_config"):
        if quantization.get(key):
            return f"{key} is not supported"
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return "config_groups is missing"
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            return f"config_groups: {name} has no weights"
        own_format = group.get("format") or format
        if own_format not in _COMPRESSED:
            return f"format {own_format!r} is not supported; only {', '.join(sorted(_COMPRESSED))} are"
        if problem := _weights_problem(group["weights"]):
            return f"config_groups: {name}: {problem}"
    return ""


def _weights_problem(weights: Mapping[str, Any]) -> str:
    """Return why the `weights` of a group of compressed-tensors are not supported; empty if they are."""
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
        return f"{kind} weights of {bits} bits are not supported; only int with 4 or 8, and float with 8 or 4"
    if strategy not in (*_STRATEGIES, None):
        return f"strategy {strategy!r} is not supported; only {', '.join(sorted(_STRATEGIES))} are"
    if strategy in ("group", "tensor_group") and not (isinstance(size, int) and size > 0):
        return f"group_size {size!r} is not a valid number of columns"
    if kind == "float" and bits == 4 and (strategy != "tensor_group" or size != 16):
        return f"float weights of 4 bits with groups of {size} are not supported; only nvfp4 with groups of 16"
    block = weights.get("block_structure")
    if strategy == "block" and not (_is_block(block) or isinstance(block, str)):
        return f"block_structure {block!r} is not supported; it can only be two numbers"
    return ""


def _gptq_problem(quantization: Mapping[str, Any]) -> str:
    if problem := _words_problem(quantization, (2, 4, 8)):
        return problem
    version = quantization.get("checkpoint_format")
    if version not in (None, "", "gptq", "gptq_v2"):
        return f"checkpoint_format {version!r} is not supported; it can only be 'gptq' or 'gptq_v2'"
    if quantization.get("is_marlin_format"):  # AutoGPTQ 0.7, before checkpoint_format
        return "is_marlin_format true is not supported"
    if quantization.get("pack_dtype") not in (None, "int32"):
        return f"pack_dtype {quantization['pack_dtype']!r} is not supported; it can only be 'int32'"
    # Other rules give some modules other bits, with which their codes would be decoded wrongly.
    changed = [rule for rule in quantization.get("dynamic") or {} if not rule.startswith("-")]
    if changed:
        return f"dynamic {changed[0]!r} is not supported; rules can only exclude modules, with '-:'"
    return ""


def _awq_problem(quantization: Mapping[str, Any]) -> str:
    if problem := _words_problem(quantization, (4,)):
        return problem
    version = quantization.get("version", "gemm")
    if str(version).lower() != "gemm":
        return f"version {version!r} is not supported; it can only be 'gemm'"
    if not quantization.get("zero_point", True):
        return "zero_point false is not supported"
    return ""


def _modelopt_problem(quantization: Mapping[str, Any]) -> str:
    layers = quantization.get("quantized_layers")
    if algorithm_of(quantization) == _MIXED and not (
        isinstance(layers, dict) and layers and all(isinstance(layer, dict) for layer in layers.values())
    ):
        return "quantized_layers is missing"
    for name in _algorithms_of(quantization):
        if not name:
            return "quant_algo is missing"
        if name not in _OF_ALGORITHMS:
            return f"quant_algo {name!r} is not supported; only {', '.join(_OF_ALGORITHMS)} are, or several of them"
    if quantization.get("pre_quant_scale"):
        return "pre_quant_scale true is not supported"
    ignored = quantization.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        return f"ignore {clip(repr(ignored), 80)} is not supported; it can only be a list of names"
    return ""


def _mxfp4_problem(quantization: Mapping[str, Any]) -> str:
    # Options of transformers that do not change the numbers.
    known = _NOT_OF_WEIGHTS | {"quant_method", "dequantize"}
    if unknown := sorted(quantization.keys() - known):
        return f"{', '.join(f'{key} {quantization[key]!r}' for key in unknown)} is not supported"
    return ""


def _words_problem(quantization: Mapping[str, Any], supported: tuple[int, ...]) -> str:
    bits, size = quantization.get("bits"), quantization.get("group_size")
    if bits not in supported:
        return f"bits {bits!r} is not supported; it can only be {' or '.join(map(str, supported))}"
    if not isinstance(size, int) or not (size > 0 or size == -1):
        return f"group_size {size!r} is not a valid number of columns"
    return ""


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)


CHECKS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "awq": _awq_problem,
    "compressed-tensors": _compressed_problem,
    "fp8": _fp8_problem,
    "gptq": _gptq_problem,
    "modelopt": _modelopt_problem,
    "mxfp4": _mxfp4_problem,
}
"""By `quant_method`, a function that returns why a quantization_config is not supported; empty if it is supported."""
