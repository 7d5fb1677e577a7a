"""Test the states that are sent between pipeline stages, as named tensors and as the tensor that is sent."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.args.fields import ParallelLayout
from swiftlite.model.features import Features
from swiftlite.model.layers.norm import RMSNorm, returning_input
from swiftlite.model.stage_states import StageStates
from swiftlite.plan.layout import states_sent

S, B, H = 5, 2, 3
CROSSINGS = [(False, 0), (True, 0), (False, 2)]
"""Places where states are sent: without the state before the norm, with this state, and after the heads."""


def make(has_prenorm: bool, num_heads: int) -> StageStates:
    trunk_SBH, prenorm_SBH, *heads_SBH = torch.randn(2 + num_heads, S, B, H)
    return StageStates(trunk_SBH, prenorm_SBH if has_prenorm else None, heads_SBH)


@pytest.mark.parametrize(("has_prenorm", "num_heads"), CROSSINGS)
def test_the_receiver_has_what_the_sender_had(has_prenorm, num_heads):
    sent = make(has_prenorm, num_heads)
    received = StageStates.from_wire(sent.to_wire(), has_prenorm=has_prenorm, num_heads=num_heads)
    assert torch.equal(received.trunk_SBH, sent.trunk_SBH)
    assert torch.equal(received.head_input(), sent.head_input())
    assert (received.prenorm_SBH is None) is (not has_prenorm)
    assert len(received.heads_SBH) == num_heads
    assert all(map(torch.equal, received.heads_SBH, sent.heads_SBH))


def test_the_worked_example_is_what_the_plan_counts():
    layout = ParallelLayout(pipeline_model_parallel_size=4, pipeline_model_parallel_layout="Et*2|t*2|m|L")
    counted = states_sent(layout, num_layers=4, num_drafts=2, heads_take_before_norm=True)
    lengths = [len(make(*crossing).to_wire()) for crossing in CROSSINGS]
    assert lengths == [count * S for count in counted]


@pytest.mark.parametrize(("has_prenorm", "num_heads"), CROSSINGS)
def test_what_is_sent_shares_no_memory(has_prenorm, num_heads):
    """megatron-core frees a tensor after sending it, and rejects a view."""
    states = make(has_prenorm, num_heads)
    wire = states.to_wire()
    before = states.trunk_SBH.clone()
    assert wire._base is None
    wire.zero_()
    assert torch.equal(states.trunk_SBH, before)


def test_features_are_before_all_other_states():
    first_SBH, second_SBH, trunk_SBH = torch.randn(3, S, B, H)
    sent = StageStates(trunk_SBH, features_SBH=[first_SBH, second_SBH])
    received = StageStates.from_wire(sent.to_wire(), num_features=2)
    assert torch.equal(received.trunk_SBH, trunk_SBH)
    assert torch.equal(received.head_input(reads_state=False), torch.cat([first_SBH, second_SBH], dim=-1))
    assert torch.equal(received.head_input(), torch.cat([trunk_SBH, first_SBH, second_SBH], dim=-1))


@pytest.mark.parametrize("layouts", ["E|tttt|mL", "Ett|tt|mL", "Et|ttt|m|L", "Ettt|tmL"])
def test_each_stage_adds_the_features_of_its_layers(layouts):
    """What the stages receive and collect is what the plan counts."""
    stages = layouts.split("|")
    layout = ParallelLayout(pipeline_model_parallel_size=len(stages), pipeline_model_parallel_layout=layouts)
    features, first, sent = (0, 1, 3), 0, []
    for stage in stages:
        own = Features.of_stage(features, first, stage.count("t"))
        assert {first + layer for layer in own.layers} == {*features} & {*range(first, first + stage.count("t"))}
        first += stage.count("t")
        sent.append(own.num_received + len(own.layers) + 1)
    counted = states_sent(layout, num_layers=4, num_drafts=2, features=features)
    heads = next(number for number, stage in enumerate(stages) if "m" in stage)
    assert counted[:heads] == sent[:heads]
    assert counted[heads:] == [3] * (len(stages) - 1 - heads)


def test_a_final_norm_before_heads_that_read_its_input_gives_both():
    norm = returning_input(RMSNorm)(TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=1), H)
    hidden_SBH = torch.randn(S, B, H)
    states = StageStates.from_wire(norm(hidden_SBH), has_prenorm=True)
    assert torch.equal(states.head_input(), hidden_SBH)
    assert torch.equal(states.trunk_SBH, RMSNorm.forward(norm, hidden_SBH))
