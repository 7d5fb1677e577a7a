"""Test which parameters are trained, as the options specify, and the effect on a model."""

import pytest
import torch

from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.plan.run import make_plan
from swiftlite.plan.text import render
from swiftlite.plan.trainable import HEADS_ONLY, JOINT, WHOLE_MODEL, Trainable, trainable_of
from swiftlite.train.run import trainable_in
from tests.messages import mentions
from tests.tiny import make_tiny_vision_hf


@pytest.mark.parametrize(
    ("mode", "heads", "expected"),
    [
        ("joint", Heads(2), JOINT),
        ("joint", Heads(), WHOLE_MODEL),
        ("heads_only", Heads(1), HEADS_ONLY),
    ],
)
def test_what_the_options_say(mode, heads, expected):
    assert trainable_of(SftArgs(mtp_mode=mode), heads) is expected


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (WHOLE_MODEL, {"decoder.weight", "mtp.weight", "mtp.bias"}),
        (JOINT, {"decoder.weight", "mtp.weight", "mtp.bias"}),
        (HEADS_ONLY, {"mtp.weight", "mtp.bias"}),
        (Trainable(lambda name: name.endswith("bias"), "biases"), {"mtp.bias"}),
    ],
)
def test_all_others_get_no_gradient(trainable, expected):
    chunk = torch.nn.ModuleDict({"decoder": torch.nn.Linear(2, 2, bias=False), "mtp": torch.nn.Linear(2, 2)})
    trainable.apply([chunk])
    chunk["mtp"](chunk["decoder"](torch.ones(1, 2))).sum().backward()
    assert {name for name, parameter in chunk.named_parameters() if parameter.grad is not None} == expected


PARTS = {
    "tower.visual.blocks.0.attn.qkv.weight": "vit",
    "tower.visual.merger.norm.weight": "aligner",
    "tower.visual.deepstack_merger_list.0.norm.weight": "aligner",
    "embedding.word_embeddings.weight": "llm",
    "decoder.layers.0.mlp.linear_fc1.weight": "llm",
    "mtp.layers.0.eh_proj.weight": "heads",
}


@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({}, {"llm", "heads"}),
        ({"freeze_vit": False}, {"vit", "llm", "heads"}),
        ({"freeze_aligner": False, "freeze_llm": True}, {"aligner", "heads"}),
        ({"freeze_vit": False, "freeze_aligner": False}, {"vit", "aligner", "llm", "heads"}),
        ({"mtp_mode": "heads_only"}, {"heads"}),
    ],
)
def test_parts_of_a_vision_language_model(options, learned):
    trainable = trainable_of(SftArgs(**options), Heads(1), has_tower=True)
    assert {part for name, part in PARTS.items() if trainable.learns(name)} == learned
    assert {part for name, part in PARTS.items() if not trainable.learns(name)}.isdisjoint(learned)
    assert trainable.freezes_trunk == (learned == {"heads"})


def test_options_of_the_tower_require_images(tmp_path):
    """Otherwise a run without images would silently train something else."""
    hf_model = resolve(make_tiny_vision_hf(tmp_path, "qwen3_5", depth=1))
    args = SftArgs(freeze_llm=True, freeze_aligner=False)
    plan = make_plan(args, 1, Heads(1))
    with pytest.raises(UserError) as raised:
        trainable_in(args, plan, hf_model)
    assert mentions(raised.value.problem, "--freeze_llm images")
    with pytest.raises(UserError) as raised:
        trainable_in(SftArgs(freeze_vit=False, freeze_aligner=False), plan, hf_model)
    assert mentions(raised.value.problem, "--freeze_vit --freeze_aligner images")
    assert not trainable_in(args, plan, hf_model.with_images()).learns("decoder.final_layernorm.weight")


def test_the_plan_names_the_trained_parts():
    args = SftArgs(freeze_vit=False)
    text = render(args, make_plan(args, 1, Heads(1)), Heads(1), None)
    assert mentions(text, "vision tower trunk heads aligner")
