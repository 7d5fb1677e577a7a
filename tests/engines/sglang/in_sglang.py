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


def filtered(requests: list[dict[str, Any]], p: list[float]) -> list[list[float]]:
    """Return the distribution from which SGLang's own function samples for each request's sampling parameters.

    Args:
        p: probabilities of tokens at temperature 1.
    """
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
    from sglang.srt.sampling.sampling_params import SamplingParams

    found = []
    for request in requests:
        params = SamplingParams(**request)
        params.normalize(None)
        params.verify(len(p))
        top_k, top_p, min_p = (torch.tensor([value]) for value in (params.top_k, params.top_p, params.min_p))
        _, weights_1V, tokens_1V, _ = top_k_top_p_min_p_sampling_from_probs_torch(
            torch.tensor([p]), top_k, top_p, min_p, params.min_p > 0, None, torch.zeros(1), return_filtered_probs=True
        )
        by_token_1V = torch.zeros_like(weights_1V).scatter_(1, tokens_1V.long(), weights_1V)
        found.append((by_token_1V / by_token_1V.sum())[0].tolist())
    return found


def claim_a_gpu() -> None:
    """Let SGLang build modules in NVFP4, which it computes on GPUs only; a dry load runs no kernel."""
    torch.cuda.get_device_capability = lambda *arguments: (9, 0)
