"""Test layers whose attention has different numbers and sizes of heads.

The model is SmolLM3 without rotary embeddings, with more, smaller heads in its second layer, which transformers' layers
also compute.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

from swiftlite.args.fields import ParallelLayout
from swiftlite.bridge.transfer import load_hf
from swiftlite.families import dense
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models.smollm3 import SMOLLM3
from swiftlite.families.rank import Rank
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.runtime.distributed import session
from tests.growth.unheard import TOKENS, hf_config, make_model
from tests.parallel.launch import launch

SECOND = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def layer(hf_config: HfConfig, number: int) -> Layer:
    own = {**hf_config, **SECOND} if number == 1 else hf_config
    return Layer(replace(dense.attention(own), rotary=0), dense.mlp(own))


MIXED = replace(SMOLLM3, layer=layer, check=lambda hf_config: None)


class MixedForCausalLM(SmolLM3ForCausalLM):
    """SmolLM3 with other heads in its second layer."""

    def __init__(self, config: SmolLM3Config):
        super().__init__(config)
        own = SmolLM3Config(**{**config.to_dict(), **SECOND})
        own._attn_implementation = config._attn_implementation
        self.model.layers[1].self_attn = SmolLM3Attention(own, 1)
        self.post_init()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("mixed")
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2, "no_rope_layers": [0, 0]}
    return make_model(directory, SmolLM3Config, MixedForCausalLM, **sizes)


def load(directory: Path, mesh: Any) -> GPTModel:
    config = hf_config(directory)
    (model,) = build_model(MIXED.architecture(config), config, mesh=mesh, dtype=torch.float32)
    load_hf([model], directory, MIXED, config)
    return model.eval()


def test_logits_are_those_of_transformers(mixed, mesh):
    model = load(mixed, mesh)
    with torch.no_grad():
        theirs = MixedForCausalLM.from_pretrained(mixed)(TOKENS, use_cache=False).logits
        assert torch.equal(model(ModelInputs(TOKENS, torch.arange(TOKENS.size(1))[None])).main, theirs)
    trunk = sum(parameter.numel() for parameter in model.decoder.layers.parameters())
    assert trunk == sum(layer.parameters(Rank()).total for layer in MIXED.architecture(hf_config(mixed)).layers)


def logits(directory: Path, tensor_model_parallel_size: int) -> list:
    layout = ParallelLayout(tensor_model_parallel_size=tensor_model_parallel_size)
    with session(layout) as mesh, torch.no_grad():
        return load(directory, mesh)(ModelInputs(TOKENS, torch.arange(TOKENS.size(1))[None])).main.tolist()


def test_tensor_parallel_ranks_split_the_heads_of_each_layer(mixed, mesh):
    with torch.no_grad():
        whole = load(mixed, mesh)(ModelInputs(TOKENS, torch.arange(TOKENS.size(1))[None])).main
    found = torch.cat([torch.tensor(part) for part in launch(2, logits, mixed, 2)], dim=-1)
    # Sums over two ranks instead of one: roundings of logits.
    torch.testing.assert_close(found[..., : whole.size(-1)], whole, rtol=0, atol=1e-4)
