"""Test multi-latent attention against transformers' DeepseekV3Attention, bitwise."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import build_module
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from swiftlite.families import dense
from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.families.models import deepseek_v3
from swiftlite.model.attention.mla import MLASelfAttention
from swiftlite.model.attention.rope import RotaryEmbedding
from swiftlite.model.build import build_config
from swiftlite.model.specs import attention_spec
from swiftlite.runtime import megatron_fixes

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
ROPES = {
    "none": None,
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-two-mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {**YARN, "mscale": 0.7},
    "yarn-all-dim-alone": {**YARN, "mscale_all_dim": 1.3},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
}


def hf_attention(seed: int = 0, **config: Any) -> DeepseekV3Attention:
    """Return a random tiny attention layer of transformers.

    Norms have random weights too, so that swapped norms are detected.
    """
    torch.manual_seed(seed)
    values = {
        "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "attn_implementation": "sdpa",
    }  # fmt: skip
    attention = DeepseekV3Attention(DeepseekV3Config(**(values | config)), 0).eval()
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + torch.randn(parameter.shape) * 0.2)
    return attention


def run_hf(attention: DeepseekV3Attention, hidden_SBH: torch.Tensor) -> torch.Tensor:
    hidden_BSH = hidden_SBH.transpose(0, 1)
    position_ids = torch.arange(hidden_BSH.size(1))[None]
    rotary = DeepseekV3RotaryEmbedding(attention.config)(hidden_BSH, position_ids)
    return attention(hidden_BSH, position_embeddings=rotary, attention_mask=None)[0].transpose(0, 1)


def mcore_attention(theirs: DeepseekV3Attention, mesh) -> tuple[MLASelfAttention, RotaryEmbedding]:
    """Return swiftlite's layer with the same weights, and its rotary embedding."""
    hf_config = theirs.config.to_dict()
    kind = deepseek_v3.attention(hf_config)
    architecture = Architecture(dense.outside(hf_config), (Layer(kind, dense.mlp(hf_config)),))
    mcore_config = architecture.mcore_config()
    rotary = RotaryEmbedding(mcore_config["hf_rope"], mesh.device.torch_device, torch.float32)
    config = build_config(mcore_config, device=mesh.device, dtype=torch.float32, mtp_num_layers=0)
    attention = build_module(attention_spec(kind), config=config, layer_number=1)
    weights = theirs.state_dict(prefix="self_attn.")
    renamed = {row.mcore: weights.pop(name) for row in kind.rows() for name in row.hf}
    assert not weights
    attention.load_state_dict({name.removeprefix("self_attention."): weight for name, weight in renamed.items()})
    return attention.eval(), rotary


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("interleave", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("q_lora_rank", [24, None], ids=["q_latent", "q_direct"])
def test_output_equals_transformers_bit_for_bit(mesh, q_lora_rank, interleave, rope):
    theirs = hf_attention(q_lora_rank=q_lora_rank, rope_interleave=interleave, rope_parameters=ROPES[rope])
    hidden_SBH = torch.randn(48, 2, 64)  # beyond the original 32 positions
    with torch.no_grad():
        attention, rotary = mcore_attention(theirs, mesh)
        ours, _ = attention(hidden_SBH, None, rotary_pos_emb=rotary([len(hidden_SBH)]))
        assert torch.equal(ours, run_hf(theirs, hidden_SBH)), (ours - run_hf(theirs, hidden_SBH)).abs().max()


def test_softmax_scale_is_exactly_that_of_transformers(mesh):
    theirs = hf_attention(rope_parameters=ROPES["yarn-two-mscales"])
    ours, _ = mcore_attention(theirs, mesh)
    assert ours.core_attention.softmax_scale == pytest.approx(theirs.scaling, rel=1e-15)  # product in another order
    assert theirs.scaling / theirs.qk_head_dim**-0.5 > 1.3  # so a forgotten scale would show


def test_packed_rows_get_the_queries_keys_and_values_they_get_alone(mesh):
    """Positions start from 0 in each sequence of a packed row. Core attention is not tested here."""
    theirs = hf_attention(rope_interleave=False, rope_parameters=ROPES["yarn-mscale"])
    ours, rotary = mcore_attention(theirs, mesh)
    rows = [torch.randn(length, 1, 64) for length in (5, 9, 2)]
    cu_seqlens = torch.tensor([0, 5, 14, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=9, max_seqlen_kv=9)
    with torch.no_grad():
        together = ours.get_query_key_value_tensors(torch.cat(rows), None, rotary([5, 9, 2]), packed)[:3]
        alone = [ours.get_query_key_value_tensors(row, None, rotary([len(row)]))[:3] for row in rows]
    for part, parts in zip(together, zip(*alone, strict=True), strict=True):
        # Matrix products of other sizes may round otherwise.
        torch.testing.assert_close(part, torch.cat(parts)[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_megatron_core_must_be_told_that_transformer_engine_is_absent(mesh, monkeypatch):
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)  # what it finds by itself, without the package too
    with pytest.raises(TypeError, match="isinstance"):
        mcore_attention(hf_attention(), mesh)
    megatron_fixes.ignore_mocked_te()
    mcore_attention(hf_attention(), mesh)
