"""Functions that `call_all` calls in a process with SGLang."""

from types import SimpleNamespace
from typing import Any

import torch


def matches(cases: list[tuple[dict[str, Any], str]], fused: dict[str, list[str]]) -> list[bool]:
    """Return for each quantization_config and module whether SGLang's own functions find the module in its list."""
    from sglang.srt.layers.quantization.awq.awq import is_layer_skipped_awq
    from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from sglang.srt.layers.quantization.utils import get_dynamic_override

    config: Any = SimpleNamespace
    match: dict[str, Any] = {
        "compressed-tensors": lambda listed, name: should_ignore_layer(name, listed["ignore"], fused),
        "gptq": lambda listed, name: get_dynamic_override(config(**listed), name) is False,
        "awq": lambda listed, name: is_layer_skipped_awq(name, listed["modules_to_not_convert"]),
    }
    return [match[listed["quant_method"]](listed, name) for listed, name in cases]


def claim_a_gpu() -> None:
    """Let SGLang build modules in NVFP4, which it computes on GPUs only; a dry load runs no kernel."""
    torch.cuda.get_device_capability = lambda *arguments: (9, 0)
