"""Test a whole DeepSeek-V3 model against transformers: trunk, MTP heads, and experts limited to groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from transformers import DeepseekV3Config
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from swiftlite.model.inputs import ModelInputs
from tests.model.test_logits import ids_and_positions, load_megatron, load_transformers
from tests.tiny import make_tiny_hf

# megatron-core multiplies an expert's hidden layer by its score, transformers its output: 2e-6 in logits up to 7, and
# in bfloat16 one flipped rounding of a logit between 4 and 8, at most two.
TOLERANCE = {torch.float32: {"rtol": 0, "atol": 1e-5}, torch.bfloat16: {"rtol": 0, "atol": 0.0625}}
# Variants of attention are in test_mla.py, rotary embeddings in test_logits.py.
VARIANTS: dict[str, dict[str, Any]] = {
    "other-epsilon": {"rms_norm_eps": 1e-2},
    "no-groups": {"n_group": 1, "topk_group": 1},
    "two-dense-layers": {"num_hidden_layers": 3, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_trunk_logits_equal_transformers(tmp_path, mesh, variant):
    directory = make_tiny_hf(tmp_path, "deepseek_v3", num_attention_heads=4, **VARIANTS[variant])
    compare_trunk(directory, mesh, torch.float32)


def test_trunk_logits_equal_transformers_in_bfloat16(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, "deepseek_v3", num_attention_heads=4, dtype=torch.bfloat16)
    compare_trunk(directory, mesh, torch.bfloat16)


def compare_trunk(directory: Path, mesh, dtype: torch.dtype) -> None:
    input_ids, position_ids = ids_and_positions(48)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, dtype)(ModelInputs(input_ids, position_ids)).main
        theirs = load_transformers(directory, "deepseek_v3", dtype)(input_ids).logits
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


@pytest.mark.parametrize("depth", [1, 2])
def test_mtp_logits_equal_those_of_transformers_mtp_layers(tmp_path, mesh, depth):
    directory = make_tiny_hf(tmp_path, "deepseek_v3", depth=depth, num_attention_heads=4)
    length = 48
    input_ids, position_ids = ids_and_positions(length)
    hf = load_transformers(directory, "deepseek_v3", torch.float32)
    # Which keys are heads is hard-coded to the layer of the published model.
    hf._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{2 + k}\..*" for k in range(depth)]
    heads = MtpModel.from_pretrained(hf).eval()
    with torch.no_grad():
        ours = load_megatron(directory, mesh, torch.float32)(ModelInputs(input_ids, position_ids)).mtp
        hidden = hf.model(input_ids).last_hidden_state
        for k, layer in enumerate(heads.layers):
            embeddings = hf.model.embed_tokens(input_ids.roll(-(k + 1), dims=1))
            hidden = layer(
                embeddings,
                hidden,
                position_embeddings=hf.model.rotary_emb(hidden, position_ids),
                attention_mask=None,
                position_ids=position_ids,
                past_key_values=None,
            )
            # What a depth has no input token for (the end of the row) is never a target.
            ends = length - k - 1
            theirs = hf.lm_head(hidden)[:, :ends]
            torch.testing.assert_close(ours[k][:, :ends], theirs, **TOLERANCE[torch.float32])
    assert len(ours) == depth


@pytest.mark.parametrize("bias", [0.1, 10.0, -10.0], ids=["small", "large", "below-zero"])
def test_megatron_core_chooses_the_experts_that_transformers_chooses(bias):
    """A group that is not selected must not be used, even if all scores, including the bias, are negative."""
    torch.manual_seed(0)
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(hidden_size=32, n_routed_experts=64, n_group=8, topk_group=4, num_experts_per_tok=8)
    )
    router.e_score_correction_bias.copy_(bias * torch.rand(64))
    router.weight.data.normal_()
    with torch.no_grad():
        logits, weights, experts = router(torch.randn(256, 32))
        probs, chosen = topk_routing_with_score_function(
            logits,
            topk=8,
            num_groups=8,
            group_topk=4,
            scaling_factor=2.5,
            score_function="sigmoid",
            expert_bias=router.e_score_correction_bias,
        )
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, experts, True))
    # The sum of eight scores is taken in the order of the choice, which transformers leaves open (sorted=False).
    torch.testing.assert_close(probs, torch.zeros_like(probs).scatter(1, experts, weights), rtol=1e-6, atol=0)
