"""Values of config.json that no model has, against those of every family's own class in transformers."""

import pytest

from swiftlite.families.values import value_problems
from tests.tiny import CLASSES, OWN_SIZES


@pytest.mark.parametrize("family", CLASSES)
def test_what_transformers_writes_can_be(family):
    config_class, _ = CLASSES[family]
    assert value_problems(config_class().to_dict()) == []
    assert value_problems(config_class(**OWN_SIZES.get(family, {})).to_dict()) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers 1000000000 is not a whole number from 1 to 1000"),
        ("num_hidden_layers", 2.0, "num_hidden_layers 2.0 is not a whole number from 1 to 1000"),
        ("num_hidden_layers", True, "num_hidden_layers True is not a whole number from 1 to 1000"),
        ("num_hidden_layers", "2", "num_hidden_layers '2' is not a whole number from 1 to 1000"),
        ("num_attention_heads", 0, "num_attention_heads 0 is not a whole number from 1 to 2000"),
        ("head_dim", 0, "head_dim 0 is not a whole number from 1 to 10000"),
        ("vocab_size", 10**9, "vocab_size 1000000000 is not a whole number from 1 to 10000000"),
        ("num_nextn_predict_layers", 10**9, "num_nextn_predict_layers 1000000000 is not a whole number from 0 to 100"),
        ("max_position_embeddings", 0, "max_position_embeddings 0 is not a whole number from 1 to 1000000000"),
        ("max_position_embeddings", -1, "max_position_embeddings -1 is not a whole number from 1 to 1000000000"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps inf is not a number from 0 to 1"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps nan is not a number from 0 to 1"),
        ("rope_theta", 10**400, "rope_theta 1"),
        ("rope_parameters", "a", "rope_parameters 'a' is not an object"),
        ("rope_parameters", {"factor": "a"}, "rope_parameters: factor 'a' is not a number from 1e-06 to 1e+06"),
        ("tie_word_embeddings", "no", "tie_word_embeddings 'no' is not true or false"),
        ("layer_types", [[]], "layer_types [[]] is not a list of names"),
        ("mlp_only_layers", 3, "mlp_only_layers 3 is not a list of whole numbers"),
        ("vocab_size", "9" * 10**6, "vocab_size '999"),
    ],
)
def test_what_no_model_has_is_one_line(key, value, problem):
    (found,) = value_problems({"model_type": "qwen3", key: value})
    assert found.startswith(problem)
    assert len(found) < 200
