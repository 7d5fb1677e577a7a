"""Test invalid values of config.json against transformers' class of every family."""

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swiftlite.families.index import FAMILIES, impossible_values
from swiftlite.families.values import ROPE_TYPES, value_problems
from tests.messages import mentions
from tests.tiny import CLASSES, OWN_SIZES


@pytest.mark.parametrize("family", CLASSES)
def test_what_transformers_writes_can_be(family):
    (config_class, _), by_layer = CLASSES[family], FAMILIES[family].numbers_by_layer
    assert value_problems(config_class().to_dict(), by_layer) == []
    assert value_problems(config_class(**OWN_SIZES.get(family, {})).to_dict(), by_layer) == []


def test_types_of_rotary_embeddings_are_those_of_transformers():
    assert ROPE_TYPES.keys() == ROPE_INIT_FUNCTIONS.keys() | {"default", "mrope"}


FEATURES = {"kind": "mtp_features", "layers": 1, "feature_layers": [1]}
BLOCK = {"kind": "dflash", "layers": 1, "feature_layers": [1], "decoder_layers": 1, "mask_token_id": 127}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers 1000000000 1 1000"),
        ("num_hidden_layers", 2.0, "num_hidden_layers 2.0 1 1000"),
        ("num_hidden_layers", True, "num_hidden_layers True 1 1000"),
        ("num_hidden_layers", "2", "num_hidden_layers '2' 1 1000"),
        ("num_attention_heads", 0, "num_attention_heads 0 1 2000"),
        ("head_dim", 0, "head_dim 0 1 10000"),
        ("vocab_size", 10**9, "vocab_size 1000000000 1 10000000"),
        ("num_nextn_predict_layers", 10**9, "num_nextn_predict_layers 1000000000 0 100"),
        ("max_position_embeddings", 0, "max_position_embeddings 0 1 1000000000"),
        ("max_position_embeddings", -1, "max_position_embeddings -1 1 1000000000"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps inf 0 1"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps nan 0 1"),
        ("rope_theta", 10**400, "rope_theta 1e-06"),
        ("rope_theta", [1e4], "rope_theta [10000.0]"),
        ("rope_parameters", "a", "rope_parameters 'a'"),
        ("rope_parameters", {"factor": "a"}, "rope_parameters: factor 'a' 1e-06 1e+06"),
        ("tie_word_embeddings", "no", "tie_word_embeddings 'no' true false"),
        ("layer_types", [[]], "layer_types [[]]"),
        ("mlp_only_layers", 3, "mlp_only_layers 3"),
        ("vocab_size", "9" * 10**6, "vocab_size 1 10000000"),
        ("drafter", 3, "drafter 3"),
        ("drafter", {"kind": "a", "layers": 1}, "drafter 'a' mtp"),
        ("drafter", {"kind": "mtp", "layers": 3}, "drafter 'mtp'"),
        ("drafter", {"kind": "eagle3", "layers": 2, "feature_layers": [1]}, "drafter layers 0 1"),
        ("drafter", {"kind": "eagle3", "layers": 1}, "drafter feature_layers"),
        ("drafter", {"kind": "eagle3", "layers": 1, "feature_layers": [1, 1]}, "drafter feature_layers [1, 1]"),
        ("drafter", {"kind": "eagle3", "layers": 1, "feature_layers": [-1]}, "drafter feature_layers [-1]"),
        ("drafter", {"kind": "eagle3", "layers": 1, "feature_layers": 3}, "drafter feature_layers 3"),
        ("drafter", {"kind": "eagle3", "layers": 1, "feature_layers": [1], "fc_norm": 1}, "drafter fc_norm true false"),
        ("drafter", {**FEATURES, "feature_layers": []}, "drafter feature_layers"),
        ("drafter", {**FEATURES, "feature_layers": [0, 1]}, "drafter feature_layers 0"),
        ("drafter", {**FEATURES, "layers": 2}, "drafter layers 0 1"),
        ("drafter", {**BLOCK, "feature_layers": []}, "drafter feature_layers"),
        ("drafter", {**BLOCK, "feature_layers": [0, 1]}, "drafter feature_layers 0"),
        ("drafter", {**BLOCK, "decoder_layers": 0}, "drafter decoder_layers 1 16"),
        ("drafter", {**BLOCK, "mask_token_id": -1}, "drafter mask_token_id"),
        ("drafter", {**BLOCK, "layers": 2}, "drafter layers 0 1"),
        ("drafter", {**BLOCK, "markov_rank": 8}, "drafter markov_rank dspark"),
        ("drafter", {**BLOCK, "kind": "dspark", "markov_rank": 0}, "drafter markov_rank 1 1024"),
    ],
)
def test_what_no_model_has_is_one_line(key, value, problem):
    (found,) = impossible_values({"model_type": "qwen3", key: value})
    assert mentions(found, problem)
    assert len(found) < 200


def test_features_are_numbers_of_layers():
    drafter = {"kind": "eagle3", "layers": 1, "feature_layers": [1, 4]}
    config = {"model_type": "qwen3", "num_hidden_layers": 4, "drafter": drafter}
    (problem,) = impossible_values(config)
    assert mentions(problem, "drafter feature_layers [1, 4]")
    assert impossible_values(config | {"num_hidden_layers": 5}) == []


def test_lists_with_a_number_for_each_layer():
    config = {"model_type": "step3p5", "rope_theta": [1e4, 1e6], "partial_rotary_factors": [1.0, 0.5]}
    assert impossible_values(config) == []
    (problem,) = impossible_values(config | {"partial_rotary_factors": [1.0, 1.5]})
    assert mentions(problem, "partial_rotary_factors 1.5 1e-06 1")
    (problem,) = impossible_values(config | {"rope_theta": [1e4, "1e6"]})
    assert mentions(problem, "rope_theta '1e6' 1e-06")
