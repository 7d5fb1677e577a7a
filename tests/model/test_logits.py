"""Logits against transformers, bit for bit; MTP logits against a reference of a few lines."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from swiftlite.bridge.transfer import load_hf
from swiftlite.families import index
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from tests.tiny import CLASSES, make_tiny_hf, mtp_names

ROPES = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(16)],
        "long_factor": [1.0 + 0.1 * i for i in range(16)],
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}


def load_megatron(directory: Path, device, dtype: torch.dtype, **options) -> GPTModel:
    hf_config = json.loads((directory / "config.json").read_text())
    family = index.get(hf_config)
    depth = family.mtp_depth(hf_config)
    (model,) = build_model(
        family.transformer_config(hf_config), hf_config, device=device, dtype=dtype, mtp_num_layers=depth, **options
    )
    load_hf([model], directory, family, hf_config)
    return model.eval()


def load_transformers(directory: Path, family: str, dtype: torch.dtype):
    config_class, model_class = CLASSES[family]
    values = json.loads((directory / "config.json").read_text())
    # from_pretrained and not model.to(dtype), which would round the rotary frequencies too.
    return model_class.from_pretrained(
        directory, config=config_class.from_dict(values | {"model_type": config_class.model_type}), dtype=dtype
    ).eval()


def ids_and_positions(length: int, rows: int = 2, vocab_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, vocab_size, (rows, length)), torch.arange(length).expand(rows, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", CLASSES)
def test_trunk_logits_equal_transformers_bit_for_bit(tmp_path, device, family, tied, rope, dtype):
    directory = make_tiny_hf(
        tmp_path,
        family,
        tied=tied,
        dtype=dtype,
        rope_parameters=ROPES[rope],
        max_position_embeddings=32 if rope == "dynamic" else 128,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    # 48 is beyond the original 32 positions, where dynamic and longrope change their frequencies.
    input_ids, position_ids = ids_and_positions(48)
    with torch.no_grad():
        ours = load_megatron(directory, device, dtype)(input_ids, position_ids).main
        theirs = load_transformers(directory, family, dtype)(input_ids).logits
    assert torch.equal(ours, theirs), (ours - theirs).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", CLASSES)
def test_mtp_logits_equal_a_short_reference(tmp_path, device, family, depth, dtype):
    directory = make_tiny_hf(tmp_path, family, depth=depth, dtype=dtype)
    hf, tensors = load_transformers(directory, family, dtype), load_file(directory / "model.safetensors")
    input_ids, position_ids = ids_and_positions(20)
    with torch.no_grad():
        ours = load_megatron(directory, device, dtype)(input_ids, position_ids).mtp
        hidden = hf.model(input_ids).last_hidden_state
        for k in range(depth):
            hidden = reference_mtp(hf, tensors, family, k, hidden, input_ids, position_ids)
            theirs = hf.lm_head(hidden)
            # What a depth has no input token for (the end of the row) is never a target.
            ends = 20 - k - 1
            if family == "mimo":
                # Its projection takes [hidden, embedding]; megatron-core sums the other way round, so the last bits of
                # 128 products differ: 1e-5 in float32; in bfloat16 a flipped rounding is 0.03 for logits of 4 to 8.
                tolerance = {"rtol": 0, "atol": 1e-4 if dtype is torch.float32 else 0.0625}
                torch.testing.assert_close(ours[k][:, :ends], theirs[:, :ends], **tolerance)
            else:
                assert torch.equal(ours[k][:, :ends], theirs[:, :ends]), (ours[k] - theirs)[:, :ends].abs().max()


def reference_mtp(hf, tensors, family, k, hidden, input_ids, position_ids):
    """One MTP depth with transformers' own decoder layer: norm both inputs, project, block, norm."""
    names, block = mtp_names(family, k)

    def norm(role: str, states: torch.Tensor) -> torch.Tensor:
        module = Qwen2RMSNorm(states.size(-1), hf.config.rms_norm_eps)
        module.weight.data = tensors[names[role]]
        return module(states)

    layer = type(hf.model.layers[0])(hf.config, layer_idx=0).to(hf.dtype)
    layer.load_state_dict({suffix: tensors[block + suffix] for suffix in layer.state_dict()})
    token = hf.model.embed_tokens(torch.roll(input_ids, -(k + 1), dims=1))
    halves = [norm("embedding_norm", token), norm("hidden_norm", hidden)]
    if family == "mimo":
        halves.reverse()
    projected = torch.cat(halves, dim=-1) @ tensors[names["projection"]].T
    rotary = hf.model.rotary_emb(projected, position_ids)
    return norm("output_norm", layer(projected, position_embeddings=rotary, position_ids=position_ids))
