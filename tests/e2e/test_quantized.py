"""Test real vLLM with quantized trunks, and with plain and quantized heads.

Its tokens and draft counts must equal those of an independent reference: a float32 model with the dequantized weights,
and with the rounding of activations that the format requires. vLLM computes in bfloat16, which changes logits, so
prompts are used for which every choice of the reference is clear.
"""

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engines.quantized_lists import list_plain
from tests.engines.reference import Reference, convention, follow
from tests.quantized import dequantize_hf, quantize_hf
from tests.tiers import some_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NEW_TOKENS = 12
CLEAR = 0.8
"""Smallest lead of a reference's choice in the prompts that are used. Because of bfloat16, and of activations that are
rounded to another code because of it, vLLM's logits differ from the reference's: by up to 0.7 in the int8 cases below.
A choice with a smaller lead can therefore differ without an error.
"""


def rounded(hidden: torch.Tensor, largest: float, to_code: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return activations after quantization with one scale per token."""
    scale = hidden.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest
    return to_code(hidden / scale) * scale


_TO_INT8 = partial(rounded, largest=127, to_code=torch.round)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": _TO_INT8,
    "fp8": partial(rounded, largest=448, to_code=lambda codes: codes.to(torch.float8_e4m3fn).float()),
}
"""Rounding of a quantized module's inputs, by format. Other formats do not round them."""
if torch.cpu._is_amx_tile_supported():  # VLLM_CPU_INT4_W4A8 of vLLM 0.32, on by default
    ACTIVATIONS |= dict.fromkeys(("int4", "int4_asym"), _TO_INT8)


def in_bfloat16(source: Path, target: Path) -> Path:
    """Write a checkpoint with its weights in bfloat16."""
    target.mkdir()
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def reference_of(directory: Path, family: str, name: str, block: bool) -> Reference:
    """Return the reference with the dequantized weights, whose quantized modules round their inputs."""
    reference: Any = follow(Reference.load(directory, family, depth=1), convention("vllm", family).drafting)
    if name in ACTIVATIONS:
        layers: list[Any] = [*reference.trunk.model.layers]
        if block:
            layers.append(reference.heads[0]["block"])
        for layer in layers:
            for module_name, module in layer.named_modules():
                if isinstance(module, nn.Linear) and "proj" in module_name:
                    module.register_forward_pre_hook(lambda _, args: (ACTIVATIONS[name](args[0]), *args[1:]))
    return reference


def without_block(reference: Reference) -> Reference:
    """Return the reference with a decoder layer in its head that passes its input on."""
    head: Any = reference.heads[0]
    block = head["block"]
    for projection in (block.self_attn.o_proj, block.mlp.down_proj):
        nn.init.zeros_(projection.weight)
    return reference


@pytest.mark.parametrize(
    ("family", "name", "block"),
    some_of(
        product(("qwen3", "mimo"), ("int8", "int4", "int4_asym", "fp8"), (False, True)),
        ("qwen3", "int8", True),
        ("mimo", "int4", False),
    ),
)
def test_counts_are_those_of_the_dequantized_weights(family, name, block, vllm, trained, tmp_path):
    trained_dir, prompts = trained(family, 1, "vllm")
    source = in_bfloat16(trained_dir, tmp_path / "source")
    quantized = quantize_hf(source, tmp_path / "quantized", name, block=block, ignore=[])
    list_plain(quantized, keeps_block=not block)
    dequantized = dequantize_hf(source, tmp_path / "dequantized", name, block=block)
    reference = reference_of(dequantized, family, name, block)
    beginnings = prompts + [row + reference.greedy(row, length) for row in prompts for length in (2, 5, 8)]
    clear = [prompt for prompt in beginnings if reference.closest_choice(prompt, NEW_TOKENS, 1) > CLEAR]
    assert len(clear) >= 5
    expected, counts = reference.simulate(clear, NEW_TOKENS, 1)
    served = vllm(quantized, clear, NEW_TOKENS, 1, dtype="bfloat16")
    assert served.draft == convention("vllm", family).draft
    assert served.token_ids == expected
    assert (served.counts.drafts, served.counts.drafted) == (counts.drafts, counts.drafted)
    assert served.counts.accepted_per_position == counts.accepted_per_position
    assert counts.acceptance_rate > 0.5
    assert without_block(reference).simulate(clear, NEW_TOKENS, 1)[1].acceptance_rate < counts.acceptance_rate
