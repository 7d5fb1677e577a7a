"""Test FLOPs from config.json against the operations that torch counts for transformers' models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from swiftlite.base.errors import UserError
from swiftlite.plan.cost.flops import Flops, training_flops
from tests.plan.test_memory import CONFIGS, DENSE
from tests.tiny import KIND_OF_HEADS, alternating, mimo_v2_flash, step3p5

CASES = {
    # Indexers are not computed here, but in transformers.
    **{name: config | {"num_hidden_layers": 3} for name, config in CONFIGS.items() if name != "deepseek_v32"},
    "mimo_v2_flash": CONFIGS["mimo_v2_flash"]
    | {"num_hidden_layers": 3}
    | mimo_v2_flash(CONFIGS["mimo_v2_flash"] | {"num_hidden_layers": 3}),
    "step3p5": step3p5(DENSE | {"num_hidden_layers": 3}) | {"model_type": "step3p5"},
    "gemma4_text": CONFIGS["gemma4_text"]
    | {"num_hidden_layers": 3, "layer_types": ["full_attention", *alternating(2)]},
    "olmo3": CONFIGS["olmo3"] | {"num_hidden_layers": 3, "layer_types": alternating(3)},
    # In transformers, Mamba-2 computes chunks of other sizes.
    "nemotron_h": CONFIGS["nemotron_h"] | {"layers_block_type": ["full_attention", "moe", "mlp", "full_attention"]},
    "deepseek_v3, whole queries": CONFIGS["deepseek_v3"] | {"num_hidden_layers": 3, "q_lora_rank": None},
}


def counted(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of operations of a call, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_that_torch_counts(name):
    config = CASES[name]
    rotary = config.get("qk_rope_head_dim", config["head_dim"])  # what transformers calls head_dim here
    hf_type = {"mimo": "qwen2"}.get(config["model_type"], config["model_type"])
    hf_config = AutoConfig.for_model(**config | {"model_type": hf_type, "head_dim": rotary})
    model = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    flops = training_flops(config)
    for length in (1, 33):
        # Eager attention multiplies all length ** 2 pairs, the causal ones are length * (length + 1) / 2.
        causal = flops.square * (length**2 + length)
        expected = flops.step(length, length**2, [length]) - causal + 2 * flops.square * length**2
        tokens = torch.arange(length)[None]
        forward, result = counted(partial(model, tokens, use_cache=False))
        # Some releases of transformers (5.17) make rotary angles by a matrix product.
        kinds, angles = [KIND_OF_HEADS[name]] if name in KIND_OF_HEADS else [], 0
        if hasattr(model.model, "rotary_emb"):
            angles, _ = counted(partial(model.model.rotary_emb, torch.zeros(1), tokens, *kinds))
        backward, _ = counted(result.logits.sum().backward)
        assert (forward - angles, backward) == (expected / 3, 2 * expected / 3)


def test_a_step_by_hand():
    flops = Flops(linear=10, square=2, targets=(100, 1000))
    assert flops.step(3 + 4, 3**2 + 4**2, [5, 3]) == 70 + 50 + 500 + 3000
    # Sequences side by side see nothing of each other.
    assert flops.step(3, 9, [2, 1]) + flops.step(4, 16, [3, 2]) == flops.step(7, 25, [5, 3]) < flops.step(7, 49, [5, 3])
    assert flops.per_token == 1110


def test_a_model_that_is_not_known():
    with pytest.raises(UserError, match="model_type 'bert'"):
        training_flops({"model_type": "bert"})
