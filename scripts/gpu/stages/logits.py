"""Compare logits of tiny models with transformers in float32, on the same weights and device.

In bfloat16, fused kernels round at different points than transformers, and a token with similar scores for two experts
can be routed differently. No bound on the largest difference therefore fits both dense and mixture-of-experts models.
Instead, the bfloat16 errors of swiftlite and transformers relative to float32 logits are compared: swiftlite's median
error must be at most 1.1 times the median error of transformers.
"""

import inspect
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from result import Results, Settings

from swiftlite.model.inputs import ModelInputs
from swiftlite.plan.kernels import automatic
from swiftlite.runtime.distributed import session
from tests.model.logits import ids_and_positions, load_megatron, load_transformers
from tests.tiny import CLASSES, make_tiny_hf

FAMILIES = ("llama", "qwen3", "mimo", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
LARGEST_DIFFERENCE = 1e-4
"""Maximum difference in float32, relative to the largest logit. Results differ because the order of additions
differs."""
ERROR_RATIO = 1.1
"""Maximum of swiftlite's median error in bfloat16, divided by the median error of transformers. On a CPU, 0.85 to 0.99
was measured."""


def run(settings: Settings, results: Results) -> None:
    families = settings.selected(FAMILIES)
    if settings.tiny:
        families = families[:2]
    with session() as mesh, tempfile.TemporaryDirectory() as root, torch.no_grad():
        device = mesh.device.torch_device
        kernels = automatic(mesh.device.is_cuda, is_float32=False)
        input_ids, position_ids = (tensor.to(device) for tensor in ids_and_positions(48, rows=8))
        for family in families:
            directory = make_tiny_hf(Path(root) / family, family, dtype=torch.float32)
            exact = exact_logits(directory, family, input_ids)
            ours = load_megatron(directory, mesh, torch.float32)(ModelInputs(input_ids, position_ids)).main
            worst = (ours.double() - exact).abs().max() / exact.abs().max()
            results.at_most(f"{family}, float32", float(worst), LARGEST_DIFFERENCE)

            # The reference uses the rounded weights as well.
            directory = make_tiny_hf(Path(root) / f"{family} bfloat16", family, dtype=torch.bfloat16)
            exact = exact_logits(directory, family, input_ids)
            theirs = load_transformers(directory, family, torch.bfloat16).to(device)(input_ids).logits
            ours = load_megatron(directory, mesh, torch.bfloat16, kernels=kernels)(
                ModelInputs(input_ids, position_ids)
            ).main
            ratio = median_error(ours, exact) / median_error(theirs, exact)
            results.at_most(f"{family}, bfloat16: median error / that of transformers", ratio, ERROR_RATIO)


def exact_logits(directory: Path, family: str, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of transformers in float32."""
    with without_fla(family):
        model = load_transformers(directory, family, torch.float32).to(input_ids.device)
        return model(input_ids).logits.double()


@contextmanager
def without_fla(family: str) -> Iterator[None]:
    """Let transformers compute gated delta nets in torch. In float32, flash-linear-attention rounds to tf32."""
    _, model_class = CLASSES[family]
    module, name = sys.modules[model_class.__module__], "torch_chunk_gated_delta_rule"
    if not hasattr(module, name):
        yield
        return
    with mock.patch.object(module, name, inspect.unwrap(getattr(module, name))):
        yield


def median_error(logits_BSV: torch.Tensor, exact_BSV: torch.Tensor) -> float:
    """Return the median over positions of the norm of the error, relative to the norm of the exact logits."""
    error_BS = (logits_BSV.double() - exact_BSV).norm(dim=-1) / exact_BSV.norm(dim=-1)
    return float(error_BS.median())
