"""Test what is derived and rejected before vLLM starts. tests/e2e/test_engines.py starts vLLM."""

import importlib.util
from dataclasses import replace

import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import EngineConfig, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.engine import engine_options
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.options import schedule_options, speculative_config
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

# Importing vLLM takes seconds, and not everyone has it.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def derive(tmp_path, family, depth, num_tokens, given=None, runs_all_heads=False, monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runs_all_heads)))
    model = resolve_served(make_tiny_hf(tmp_path, family, depth))
    config = EngineConfig(model, num_speculative_tokens=num_tokens, speculative_config=given)
    return speculative_config(config)


@pytest.mark.parametrize(
    ("kinds", "hint"),
    [
        (["linear_attention", "full_attention", "moe"], "--infer_backend transformers"),
        (["linear_attention", "full_attention", "mlp"], "--speculative none --infer_backend transformers"),
    ],
)
def test_what_vllm_on_a_cpu_does_not_compute_of_nemotron_h(tmp_path, kinds, hint):
    """Experts without gates, and drafts for Mamba-2. Without drafts, Mamba-2 is computed."""
    model = resolve_served(make_tiny_hf(tmp_path, "nemotron_h", 1, layers_block_type=kinds))
    with pytest.raises(UserError, match=naming(hint)):
        engine_options(EngineConfig(model, num_speculative_tokens=1))
    if "moe" not in kinds:
        assert "speculative_config" not in engine_options(EngineConfig(model, num_speculative_tokens=0))


@pytest.mark.parametrize(
    ("family", "depth", "num_tokens", "runs_all_heads", "drafted"),
    [
        ("qwen3", 1, None, False, 1),
        ("qwen3", 1, 3, False, 3),  # one head, applied to its own state
        ("mimo", 1, 3, True, 3),
        ("qwen3", 2, None, False, 1),
        ("qwen3", 2, 1, False, 1),
        ("mimo", 2, None, True, 1),
        ("llama", 2, None, True, 2),
        ("qwen2", 2, 2, True, 2),
        ("qwen2", 2, 1, True, 1),
    ],
)
def test_as_many_tokens_as_vllm_has_heads_for(
    tmp_path, monkeypatch, family, depth, num_tokens, runs_all_heads, drafted
):
    derived = derive(tmp_path, family, depth, num_tokens, None, runs_all_heads, monkeypatch)
    assert derived == {"method": "mtp", "num_speculative_tokens": drafted}


@pytest.mark.parametrize(
    ("family", "num_tokens", "runs_all_heads", "advice"),
    [
        ("qwen3", 2, False, "num_speculative_tokens 2 1"),
        ("mimo", 2, True, "num_speculative_tokens 2 1"),
        ("qwen3", 3, True, "num_speculative_tokens 3 2"),
        ("qwen3", 4, True, "num_speculative_tokens 4 2"),
    ],
)
def test_a_step_that_another_head_was_trained_for_is_refused(
    tmp_path, monkeypatch, family, num_tokens, runs_all_heads, advice
):
    with pytest.raises(UserError) as error:
        derive(tmp_path, family, 2, num_tokens, None, runs_all_heads, monkeypatch)
    assert mentions(str(error.value), advice)
    assert "--infer_backend transformers" in error.value.hint


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
@pytest.mark.parametrize("torch_dtype", ["float32", "bfloat16"])
def test_latent_attention_in_float32_is_kept_from_amx(tmp_path, family, torch_dtype):
    """If the CPU has AMX, vLLM selects AMX kernels separately for trunk and draft; they raise an error in float32."""
    model = resolve_served(make_tiny_hf(tmp_path, family, 1))
    options = engine_options(EngineConfig(model, torch_dtype=torch_dtype, num_speculative_tokens=1))
    expected = "CPU_MLA" if (family, torch_dtype) == ("deepseek_v3", "float32") else None
    assert (options.get("attention_backend"), options["speculative_config"].get("attention_backend")) == (expected,) * 2


def test_drafts_are_drawn_where_answers_are(tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path, "qwen3", 1))
    config = EngineConfig(model, num_speculative_tokens=1, draws_drafts=True)
    derived = {"method": "mtp", "num_speculative_tokens": 1}
    assert speculative_config(config) == {**derived, "draft_sample_method": "probabilistic"}
    assert speculative_config(replace(config, draws_drafts=False)) == derived
    assert speculative_config(replace(config, speculative_config=derived)) == derived
    VLLM.check_temperature(0.5)


def test_a_schedule_is_one_that_vllm_takes():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    assert schedule_options(DraftSchedule({1: 2})) == {}
    ranges = schedule_options(DraftSchedule({1: 3, 4: 1, 8: 0}))["num_speculative_tokens_per_batch_size"]
    assert ranges == [[1, 3, 3], [4, 7, 1], [8, 8, 0]]
    assert build_dynamic_sd_schedule_lookup(ranges, 10, 3)[1:] == [3, 3, 3, 1, 1, 1, 1, 0, 0, 0]


def test_no_speculation(tmp_path):
    assert derive(tmp_path, "qwen3", 1, 0) is None


def test_a_given_config_is_taken_whole_but_checked(tmp_path, monkeypatch):
    given = {"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    assert derive(tmp_path / "1", "qwen3", 1, None, given) == given
    with pytest.raises(UserError, match=naming("num_speculative_tokens 2 1")):
        derive(tmp_path / "2", "qwen3", 2, None, given, False, monkeypatch)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    assert derive(tmp_path / "3", "qwen3", 0, None, ngram) == ngram


def test_the_target_as_its_own_draft_is_refused(tmp_path):
    with pytest.raises(UserError, match=naming("--vllm_speculative_config")) as error:
        derive(tmp_path, "qwen3", 0, None, {"model": str(tmp_path), "num_speculative_tokens": 1})
    assert '{"method": "mtp"' in error.value.hint


def test_heads_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match=naming("config.json --mtp_num_layers")):
        derive(tmp_path, "qwen3", 0, None)


def test_an_option_that_vllm_does_not_know(tmp_path):
    config = EngineConfig(resolve_served(make_tiny_hf(tmp_path, "qwen3")), engine_kwargs={"max_modle_len": 3})
    with pytest.raises(UserError) as error:
        start_engine("vllm", config)
    assert "max_modle_len" in str(error.value)
    assert "--vllm_engine_kwargs" in error.value.hint


def test_a_plugin_that_vllm_may_not_load(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(UserError) as error:
        start_engine("vllm", EngineConfig(resolve_served(make_tiny_hf(tmp_path, "qwen3"))))
    assert "VLLM_PLUGINS=another" in str(error.value)
    assert mentions(error.value.hint, "swiftlite")


def test_the_plugin_leaves_models_without_heads_alone(tmp_path):
    from transformers import Qwen3Config

    from swiftlite.engines.vllm import plugin as vllm_plugin

    vllm_plugin.register()
    vllm_plugin.register()
    config = Qwen3Config(architectures=["Qwen3ForCausalLM"])
    assert vllm_plugin.hf_config_override(config).to_dict() == config.to_dict()
    assert vllm_plugin.hf_config_override(config).architectures == ["Qwen3ForCausalLM"]
    config.num_nextn_predict_layers = 2
    assert vllm_plugin.hf_config_override(config).architectures == ["Qwen3MTPModel"]


@pytest.mark.parametrize(
    ("layers", "has_experts"),
    [
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, True),  # of layers 0 to 3, 1 and 3 have experts
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0]}, True),
        ({"decoder_sparse_step": 3, "mlp_only_layers": []}, False),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [3]}, False),
    ],
)
def test_heads_of_a_qwen3_moe_are_like_its_last_layer(layers, has_experts):
    from transformers import Qwen3MoeConfig

    from swiftlite.engines.vllm import plugin as vllm_plugin

    config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4, **layers)
    config.num_nextn_predict_layers = 2
    draft = vllm_plugin.hf_config_override(config)
    assert draft.architectures == ["Qwen3MoeMTPModel"]
    for head in range(2):  # as Qwen3MoeDecoderLayer of vLLM decides by its number
        assert (head not in draft.mlp_only_layers and (head + 1) % draft.decoder_sparse_step == 0) is has_experts
