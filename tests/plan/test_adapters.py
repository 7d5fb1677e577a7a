"""Test the counts for adapters against PEFT and against examples."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.families.index import architecture_of
from swiftlite.families.rank import ParameterCount, Rank
from swiftlite.plan.cost.adapters import adapter_parameters
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from tests.plan.test_memory import CONFIGS

LORA = Lora(4, 8.0, heads="lora")


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_as_many_as_pefts(use_dora):
    peft = pytest.importorskip("peft")
    own = {key: value for key, value in CONFIGS["qwen3"].items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **own))
        saved = ["lm_head", "model.norm"]
        config = peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=saved, use_dora=use_dora)
        model = peft.get_peft_model(model, config)
    expected = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lora = Lora(4, 8.0, has_magnitudes=use_dora, saved=("lm_head", "model.norm"))
    (stage,) = estimate(CONFIGS["qwen3"], Setup(lora=lora, parameter_bytes=4))
    assert stage.gradients == 4 * expected
    assert stage.optimizer == 8 * expected
    (plain,) = estimate(CONFIGS["qwen3"], Setup())
    of_adapters = expected - 1000 * 128 - 128
    assert stage.parameters == plain.parameters + of_adapters


def test_ranks_share_one_of_the_two():
    """The layers are q [256, 128] and o [128, 256] with rank 4, and down [128, 96] of two of eight
    experts with rank 4.
    """
    architecture = architecture_of(CONFIGS["qwen3_moe"])
    rows = architecture.layer_rows(0)
    rank = Rank(tp=2, ep=4, etp=2)
    assert adapter_parameters(rows, Lora(4, 8.0, targets=("q_proj",)), rank) == ParameterCount(4 * (128 + 128))
    assert adapter_parameters(rows, Lora(4, 8.0, targets=("o_proj",)), rank) == ParameterCount(4 * (128 + 128))
    wide, tall = (Lora(4, 8.0, has_magnitudes=True, targets=(name,)) for name in ("q_proj", "o_proj"))
    assert adapter_parameters(rows, wide, rank) == ParameterCount(4 * (128 + 128) + 128)  # its rows are shared
    assert adapter_parameters(rows, tall, rank) == ParameterCount(4 * (128 + 128) + 128)  # 128 rows, on each rank
    down = adapter_parameters(rows, Lora(4, 8.0, targets=("down_proj",)), rank)
    assert down == ParameterCount(0, 2 * 4 * (128 + 48))


def test_weights_that_stay_cost_a_third_less():
    full = training_flops(CONFIGS["qwen3"], Heads(1))
    lora = training_flops(CONFIGS["qwen3"], Heads(1), lora=LORA)
    matrices = 6 * (sum(layer.macs_per_token() for layer in architecture_of(CONFIGS["qwen3"]).layers))
    assert lora.targets == tuple(each * 2 / 3 for each in full.targets)
    # Adapters of rank 4 beside matrices of 128 and more rows and columns: 3 to 7 % of them.
    assert 2 / 3 < (lora.linear - lora.square) / (full.linear - full.square) < 0.74
    assert matrices > 0
    assert lora.square == full.square
