"""Test real vLLM with quantized trunks, and with plain and quantized heads.

vLLM computes these formats in bfloat16, so its logits are those of an independent reference up to rounding. The
reference is a model in float32 with the dequantized weights, and with the rounding of activations that the format
requires. It is given the text that vLLM generated. The size of rounding errors is measured in the same test: the
reference is also computed in bfloat16.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.e2e import vllm_here
from tests.e2e.vllm_here import Replay
from tests.engines.quantized_lists import list_plain
from tests.engines.reference import Reference, convention, follow
from tests.quantized import dequantize_hf, quantize_hf
from tests.tiers import some_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NEW_TOKENS = 12
NOISE = 1.3
"""Largest error of vLLM, relative to the error of the reference in bfloat16 (`size`). Both round the result of each
operation to bfloat16, so their errors have about the same size: the ratio was 0.82 to 1.12 in 106 measured cases. If
the reference did not round activations, the ratio would be 1.9 to 7 for formats that round them.
"""
NOISE_OF_FOUR_BITS = NOISE * 2**0.5
"""The same for formats with 4 bits. On a processor without instructions for bfloat16, vLLM's kernel for them has 1.27
to 1.54 times the error of the reference (12 numbers in 6 cases; 1.0 for 8 bits), as if it rounded each result twice.
Two independent roundings are 2**0.5 times as large as one.
"""
SHORTEST = 4
"""Shortest prompt. vLLM 0.32 can crash in its attention on a CPU (bfloat16) if a shorter prompt is served alone."""


def rounded(hidden: torch.Tensor, largest: float, to_code: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return activations after quantization with one scale per token."""
    numbers = hidden.float()
    scale = numbers.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest
    return (to_code(numbers / scale) * scale).to(hidden.dtype)


_TO_INT8 = partial(rounded, largest=127, to_code=torch.round)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": _TO_INT8,
    "fp8": partial(rounded, largest=448, to_code=lambda codes: codes.to(torch.float8_e4m3fn).float()),
}
"""Rounding of a quantized module's inputs, by format. Other formats do not round them."""
HAS_AMX = torch.cpu._is_amx_tile_supported()
HAS_VNNI = torch.cpu._is_vnni_supported() and "ONEDNN_MAX_CPU_ISA" not in os.environ
if HAS_AMX:  # VLLM_CPU_INT4_W4A8 of vLLM 0.32, on by default
    ACTIVATIONS |= dict.fromkeys(("int4", "int4_asym", "gptq", "awq"), _TO_INT8)


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
    for name, parameter in head["block"].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            nn.init.zeros_(parameter)
    return reference


@dataclass(frozen=True)
class Logits:
    """Logits of the target [positions, vocabulary] and of the draft [steps, vocabulary]."""

    target: torch.Tensor
    draft: torch.Tensor


@dataclass(frozen=True)
class Followed:
    """What vLLM's logits for one prompt mean.

    Args:
        row: the prompt and the tokens after it.
        begins: length of the row at the beginning of each step.
        num_accepted: number of accepted drafts.
        logits: the logits that decided.
    """

    row: list[int]
    begins: list[int]
    num_accepted: int
    logits: Logits


def follow_engine(prompt: Sequence[int], replay: Replay) -> Followed:
    """Derive tokens and accepted drafts from vLLM's logits, for one draft per step."""
    first, *steps = replay.target_logits
    target = [first[0]]
    row = [*prompt, int(first[0].argmax())]
    begins, drafts, num_accepted = [], [], 0
    for (verified, following), (draft,) in zip(steps, replay.draft_logits, strict=False):
        begins.append(len(row))
        drafts.append(draft)
        target.append(verified)
        row.append(int(verified.argmax()))
        if int(draft.argmax()) == row[-1]:
            num_accepted += 1
            target.append(following)
            row.append(int(following.argmax()))
    return Followed(row, begins, num_accepted, Logits(torch.stack(target), torch.stack(drafts)))


@torch.no_grad()
def logits_of(reference: Reference, prompts: Sequence[Sequence[int]], followed: Sequence[Followed]) -> Logits:
    """Return the reference's logits for the same positions and steps."""
    target, draft = [], []
    for prompt, one in zip(prompts, followed, strict=True):
        fed, states = reference.trunk_states(torch.tensor([one.row]))
        target.append(reference.trunk.lm_head(states[0, len(prompt) - 1 : -1]).float())
        draft += [reference.draft_logits(one.row[:begin], 1, fed).float() for begin in one.begins]
    return Logits(torch.cat(target), torch.cat(draft))


def size(difference: torch.Tensor) -> float:
    """Return the root mean square of errors [positions, vocabulary] at the median position.

    In models with experts, the errors of a few positions are far larger, because rounding selects other experts there.
    The mean over positions depends on these: it varied between 0.5 and 3.1 times its size among references in bfloat16
    whose embeddings were rounded differently, and the median between 0.8 and 1.4 times.
    """
    return float(difference.square().mean(-1).sqrt().median())


def lead(logits: torch.Tensor) -> torch.Tensor:
    first, second = logits.topk(2).values.unbind(-1)
    return first - second


DENSE = ("qwen3", "mimo", "llama")
LIKE_OTHERS = ("qwen2", "mistral", "seed_oss")
"""Families whose layers are those of others."""
WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "hy_v3")
"""Families with experts, which stay plain: vLLM has no kernel for quantized experts on every CPU."""
LATENT = ("deepseek_v3", "glm4_moe_lite")
FOUR_BITS = ("int4", "int4_asym", "gptq", "awq")
"""Formats with 4 bits. vLLM does not support gptq with zero points."""


def is_served(family: str, name: str, block: bool) -> bool:
    """Return whether vLLM supports the model on this machine."""
    if (family, name, block) == ("mimo", "gptq", True):
        return False  # vLLM takes the quantized modules from the files, which have other names than its draft
    return (family, name) != ("seed_oss", "int8") or not HAS_AMX


@pytest.mark.parametrize(
    ("family", "name", "block"),
    some_of(
        [
            case
            for case in (
                *product(DENSE, ("int8", "fp8", *FOUR_BITS), (False, True)),
                *product((*LIKE_OTHERS, *WITH_EXPERTS), ("int8", "int4"), (False, True)),
                *product(LATENT, ("int8",), (False, True)),
            )
            if is_served(*case)
        ],
        ("qwen3", "int8", True),
        ("mimo", "int4", False),
    ),
)
def test_logits_and_counts_are_those_of_the_dequantized_weights(family, name, block, vllm_host, trained, tmp_path):
    if name == "int8" and not HAS_VNNI:  # the error is 6.7 times that of bfloat16
        pytest.skip("oneDNN's kernels for 8-bit activations saturate without VNNI instructions")
    if name in FOUR_BITS and not torch.cpu._is_avx512_supported():  # test_silent_quantization.py tests the refusal
        pytest.skip("vLLM has no kernel for packed integers on processors without AVX-512")
    trained_dir, prompts = trained(family, 1, "vllm")
    learned = reference_of(trained_dir, family, "plain", block=False)
    prompts = [prompt if len(prompt) >= SHORTEST else prompt + learned.greedy(prompt, SHORTEST) for prompt in prompts]
    source = in_bfloat16(trained_dir, tmp_path / "source")
    quantized = quantize_hf(source, tmp_path / "quantized", name, block=block, experts=False, ignore=[])
    list_plain(quantized, keeps_block=not block)
    dequantized = dequantize_hf(source, tmp_path / "dequantized", name, block=block, experts=False)
    replays = vllm_host.call(partial(vllm_here.replay, quantized, prompts, NEW_TOKENS, 1))

    assert {replay.draft for replay in replays} == {convention("vllm", family).draft}
    followed = [follow_engine(prompt, replay) for prompt, replay in zip(prompts, replays, strict=True)]
    for prompt, replay, one in zip(prompts, replays, followed, strict=True):
        assert one.row[len(prompt) :][:NEW_TOKENS] == replay.token_ids
        assert (replay.counts.drafts, replay.counts.drafted) == (len(one.begins), len(one.begins))
        assert replay.counts.accepted_per_position == (one.num_accepted,)

    served = Logits(*(torch.cat([getattr(one.logits, part) for one in followed]) for part in ("target", "draft")))
    references = {
        "exact": reference_of(dequantized, family, name, block),
        "bfloat16": reference_of(dequantized, family, name, block).bfloat16(),
        "without block": without_block(reference_of(dequantized, family, name, block)),
    }
    found = {role: logits_of(reference, prompts, followed) for role, reference in references.items()}
    exact, in_16_bits, without = found["exact"], found["bfloat16"], found["without block"]
    bound = NOISE_OF_FOUR_BITS if name in FOUR_BITS else NOISE
    assert size(served.target - exact.target) <= bound * size(in_16_bits.target - exact.target)
    noise = bound * size(in_16_bits.draft - exact.draft)
    assert size(served.draft - exact.draft) <= noise
    assert size(without.draft - exact.draft) > 2 * noise  # a wrong decoder layer would exceed the bound

    # Drafts differ from the reference's only where rounding can change the choice.
    largest = bound * float((in_16_bits.draft - exact.draft).abs().max())
    differs = served.draft.argmax(-1) != exact.draft.argmax(-1)
    assert lead(exact.draft)[differs].le(2 * largest).all()
    accepted = sum(one.num_accepted for one in followed)
    assert 0.1 < accepted / len(differs) < 1
