"""Let SGLang fork the processes of an engine. A start then takes 2.5 s of CPU time; three imports would take 17 s."""

import multiprocessing
import os
from typing import Any

import torch
import torch.nn.functional as F

from swiftlite.engines.sglang.options import cpu_variables


def install() -> None:
    """Import what an engine's processes need, and let SGLang fork them from this process."""
    os.environ.update(cpu_variables())  # read when SGLang is imported
    # Not the registry of models: it is for the plugin to say what is in it.
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models import minimax_m2, qwen2_moe

    norms: Any = minimax_m2.MiniMaxM2QKRMSNorm
    norms.forward = norm_queries_and_keys
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated_expert
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's choice is "spawn"


def add_gated_expert(
    states_TH: torch.Tensor, gate_H: torch.Tensor, expert_TH: torch.Tensor, output_TH: torch.Tensor
) -> None:
    """Add the output of a shared expert, multiplied by its gate. SGLang's kernel for this requires a GPU."""
    output_TH += F.sigmoid(states_TH @ gate_H)[:, None] * expert_TH


def norm_queries_and_keys(
    norms: Any, queries_TC: torch.Tensor, keys_TC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize the channels of all heads together. SGLang's kernel for this requires a GPU."""

    def norm(weight_C: torch.Tensor, channels_TC: torch.Tensor) -> torch.Tensor:
        normed_TC = F.rms_norm(channels_TC.float(), weight_C.shape, eps=norms._eps)
        return (normed_TC * weight_C).to(channels_TC.dtype)

    return norm(norms._q_norm.weight, queries_TC), norm(norms._k_norm.weight, keys_TC)


def sample_verified_tokens() -> None:
    """Let SGLang verify drafts by sampling, as on a GPU, where a kernel accepts and draws tokens. On a CPU SGLang is
    greedy, and swiftlite rejects temperatures above 0.
    """
    import sgl_kernel  # pyright: ignore[reportMissingImports]  # the stand-ins
    from sglang.srt.speculative import eagle_utils

    from swiftlite.engines.sglang import options

    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.sampling_softmax = lambda logits, temperatures: (logits / temperatures).softmax(dim=-1)
    eagle_utils.tree_speculative_sampling_target_only = sgl_kernel.tree_speculative_sampling_target_only
    options.drawing_problem = lambda: None
