"""Test that an architecture is the sum of its layers. tests/growth and tests/plan compare it with the built model."""

from dataclasses import replace

import pytest

from swiftlite.families.architecture import Architecture, Outside
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import MixtureOfExperts, Mlp
from tests.messages import naming

ATTENTION = GroupedQueryAttention(hidden=64, heads=4, groups=2, head_dim=16, rotary=16)
WIDE, NARROW, EXPERTS = Mlp(64, 96), Mlp(64, 48), MixtureOfExperts(64, experts=4, topk=2, ffn=32)


def architecture(*layers: Layer) -> Architecture:
    return Architecture(Outside(num_layers=len(layers), hidden=64, vocab=128, is_tied=True), layers)


def test_each_kind_is_named_once():
    found = architecture(Layer(ATTENTION, WIDE), Layer(ATTENTION, EXPERTS), Layer(ATTENTION, WIDE)).sublayers
    assert found == [ATTENTION, WIDE, EXPERTS]


def test_layers_may_differ_in_kind_but_not_in_what_megatron_core_has_once():
    config = architecture(Layer(ATTENTION, WIDE), Layer(ATTENTION, EXPERTS)).mcore_config()
    assert (config["ffn_hidden_size"], config["num_moe_experts"], config["moe_layer_freq"]) == (96, 4, [0, 1])
    with pytest.raises(ValueError, match=naming("moe_router_topk 2 1")):
        architecture(Layer(ATTENTION, EXPERTS), Layer(ATTENTION, replace(EXPERTS, topk=1))).mcore_config()


def test_names_that_differ_stand_for_the_same_parameters():
    layer = Layer(ATTENTION, WIDE)
    renamed = Layer(ATTENTION, WIDE, hf_names={"mlp.gate_proj.": "mlp.w1.", "self_attn.": "attention."})
    assert [row.mcore for row in renamed.rows()] == [row.mcore for row in layer.rows()]
    names = [name for row in renamed.rows() for name in row.hf]
    assert names[:3] == ["attention.q_proj.weight", "attention.k_proj.weight", "attention.v_proj.weight"]
    assert names[-3:] == ["mlp.w1.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]


def test_layers_may_differ_in_their_heads_and_widths():
    assert architecture(Layer(ATTENTION, WIDE), Layer(ATTENTION, NARROW)).mcore_config()["ffn_hidden_size"] == 96
    more = GroupedQueryAttention(hidden=64, heads=8, groups=4, head_dim=8, rotary=8)
    config = architecture(Layer(ATTENTION, WIDE), Layer(more, WIDE)).mcore_config()
    assert (config["num_attention_heads"], config["num_query_groups"], config["kv_channels"]) == (4, 2, 16)


def test_the_layer_of_heads_can_combine_two_trunk_layers():
    windowed = replace(ATTENTION, window=8)
    layers = Layer(ATTENTION, WIDE), Layer(windowed, WIDE), Layer(windowed, EXPERTS), Layer(ATTENTION, EXPERTS)
    combined = Layer(windowed, WIDE, has_output_norms=True)
    whole = architecture(*layers)
    for head_layer, block, sources in [
        (None, layers[3], (3, 3)),
        (layers[1], layers[1], (1, 1)),
        (combined, combined, (2, 1)),
    ]:
        found = replace(whole, outside=replace(whole.outside, head_layer=head_layer))
        assert (found.mtp_block, found.mtp_sources) == (block, sources)
