"""Test families against transformers: the same tensors and shapes, and all keys of config.json are known."""

import subprocess
import sys
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import pytest
from transformers import PreTrainedConfig

from swiftlite import families
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import digest_of_trunk, patch
from swiftlite.bridge.join import SwapHalves
from swiftlite.families import dense, index
from swiftlite.families.architecture import has_indexer
from swiftlite.families.windows import KINDS
from tests.messages import mentions, naming
from tests.tiny import (
    CLASSES,
    DSA,
    GEMMA4,
    HYBRID,
    LATENT,
    OWN_SIZES,
    STEP,
    WINDOWED,
    alternating,
    gemma4_as_published,
    hub_name,
    lists_of_step,
    make_tiny_model,
    mimo_v2_flash,
    mtp_names,
    per_expert,
    random_mtp_tensors,
    step_as_published,
)


def words(text: str) -> set[str]:
    return set(text.split())


# What does not change what a model computes from tokens to logits: training, generation, bookkeeping.
# chunk_size_feed_forward changes memory, not numbers; others are read by the rotary embedding (rope_parameters,
# max_position_embeddings), only with use_sliding_window (max_window_layers, sliding_window), or are a loss of training
# with an option of its own (router_aux_loss_coef).
HARMLESS = words("""
    _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label is_encoder_decoder
    label2id max_position_embeddings max_window_layers model_type output_attentions output_hidden_states
    output_router_logits pad_token_id problem_type return_dict router_aux_loss_coef rope_parameters sliding_window
    transformers_version use_cache
""")
READ = words("""
    head_dim hidden_size initializer_range intermediate_size layer_types num_attention_heads num_hidden_layers
    num_key_value_heads num_nextn_predict_layers quantization_config rms_norm_eps tie_word_embeddings vocab_size
""")
# transformers' Qwen2 has no field of biases, which it always has.
OF_DEEPSEEK = {"attention_bias", "moe_layer_freq", "scoring_func", "topk_method"}
OF_GEMMA4_MIXTURE = {"enable_moe_block", "moe_intermediate_size", "num_experts", "top_k_experts"}
OWN_NEUTRAL = {
    "llama": {"attention_bias", "mlp_bias"},
    "qwen2_moe": {"qkv_bias"},
    "qwen3": {"attention_bias"},
    "qwen3_moe": {"attention_bias"},
    "ernie4_5_moe": {"moe_layer_interval", "moe_norm_min", "use_bias"},
    "exaone4": {"attention_bias", "bias", "logit_scale", "mlp_bias"},
    # _sliding_window_pattern: of layer_types, which files of transformers 5 have too
    "gemma3_text": words("""
        attention_bias attn_logit_softcapping final_logit_softcapping _sliding_window_pattern hidden_activation
        use_bidirectional_attention
    """),
    "gemma4_text": {
        *OF_GEMMA4_MIXTURE,
        "attention_bias",
        "hidden_activation",
        "use_bidirectional_attention",
    },
    "deepseek_v3": OF_DEEPSEEK,
    "kimi_k2": OF_DEEPSEEK,
    "kimi_k25": OF_DEEPSEEK,
    "deepseek_v32": {"attention_bias", "mlp_bias", "moe_layer_freq", "scoring_func", "topk_method"},
    "glm4_moe_lite": {"attention_bias", "topk_method"},
    "glm_moe_dsa": {"attention_bias", "mlp_bias", "moe_layer_freq", "scoring_func", "topk_method"},
    # In float32 or not, the sum of routed and shared experts is rounded once.
    "hy_v3": {"attention_bias", "enable_moe_fp32_combine", "mlp_bias", "qk_norm", "route_norm"},
    "mimo_v2_flash": words("""
        add_swa_attention_sink_bias attention_bias n_shared_experts scoring_func sliding_window_size topk_method
        swa_head_dim swa_num_attention_heads swa_v_head_dim
    """),
    # The MTP modules were not published.
    "minimax_m2": words("num_mtp_modules router_jitter_noise scoring_func use_qk_norm use_routing_bias"),
    "mixtral": {"router_jitter_noise"},
    # chunk_size: speed and rounding
    # expand: the width is mamba_num_heads * mamba_head_dim
    # mamba_ssm_cache_dtype: the state is float32
    # rescale_prenorm_residual: initialization, like the time_step_* that are not limits
    # time_step_min: see `model/attention/mamba2.py`
    "nemotron_h": words("""
        attention_bias chunk_size expand hidden_dropout mamba_hidden_act mamba_proj_bias mamba_ssm_cache_dtype mlp_bias
        mlp_hidden_act moe_shared_expert_overlap n_shared_experts num_logits_to_keep rescale_prenorm_residual
        residual_in_fp32 time_step_floor time_step_max time_step_min use_bias use_conv_bias use_mamba_kernels
    """),
    "seed_oss": {"attention_out_bias", "mlp_bias", "residual_dropout"},
    "smollm3": {"attention_bias", "mlp_bias"},
    "step3p5": words("""
        attention_bias mlp_bias moe_router_activation need_fp32_gate norm_expert_weight query_pre_attn_scalar
        use_head_wise_attn_gate use_moe_router_bias yarn_only_types zero_centered
    """),
    "olmo2": {"attention_bias"},
    "olmo3": {"attention_bias"},
    "phi3": {"embd_pdrop", "resid_pdrop"},
    "gpt_oss": {"attention_bias", "rms_norm_eps", "swiglu_alpha", "swiglu_limit"},
    "granite": {"attention_bias", "mlp_bias"},
    "qwen3_next": {"attention_bias"},
    "qwen3_vl": {"attention_bias"},
    "qwen3_vl_moe": {"attention_bias", "norm_topk_prob"},
    "qwen3_5": {"attention_bias"},
    "qwen3_5_text": {"attention_bias"},
    "qwen3_5_moe": {"attention_bias"},
    "qwen3_5_moe_text": {"attention_bias"},
}
OF_MIXTURE = words("""
    first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
    num_experts_per_tok routed_scaling_factor topk_group
""")
# qk_head_dim is the sum of the next two.
OF_LATENT = OF_MIXTURE | words(
    "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave v_head_dim"
)
OF_INDEXER = {"index_head_dim", "index_n_heads", "index_topk"}
OF_DSA = OF_LATENT - {"rope_interleave"} | OF_INDEXER | {"mlp_layer_types"}
OF_QWEN_MIXTURE = words("decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts_per_tok")
OF_LINEAR = words(
    "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim"
)
OF_MAMBA = {"conv_kernel", "mamba_head_dim", "mamba_num_heads", "n_groups", "ssm_state_size"}
OWN_READ = {
    "ernie4_5_moe": words(
        "moe_intermediate_size moe_k moe_layer_end_index moe_layer_start_index moe_num_experts moe_num_shared_experts"
    ),
    "exaone4": {"sliding_window", "sliding_window_pattern"},
    "gemma3_text": {"query_pre_attn_scalar", "sliding_window", "sliding_window_pattern"},
    "gemma4_text": words("""
        attention_k_eq_v final_logit_softcapping global_head_dim hidden_size_per_layer_input num_global_key_value_heads
        num_kv_shared_layers sliding_window use_double_wide_mlp vocab_size_per_layer_input
    """),
    "qwen2_moe": OF_QWEN_MIXTURE | {"num_experts", "shared_expert_intermediate_size"},
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), OF_QWEN_MIXTURE | {"num_local_experts"}),
    "qwen3_next": OF_QWEN_MIXTURE | OF_LINEAR | {"num_experts", "shared_expert_intermediate_size"},
    "qwen3_5": OF_LINEAR | {"mtp_num_hidden_layers"},
    "qwen3_5_moe": OF_QWEN_MIXTURE
    | OF_LINEAR
    | {"mtp_num_hidden_layers", "num_experts", "shared_expert_intermediate_size"},
    "glm4_moe": OF_MIXTURE | {"attention_bias", "use_qk_norm"},
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25"), OF_LATENT),
    "deepseek_v32": OF_DSA,
    "glm4_moe_lite": OF_LATENT | {"mlp_layer_types"},
    "glm_moe_dsa": OF_DSA | {"indexer_types"},
    "hy_v3": words("""
        first_k_dense_replace expert_hidden_dim mlp_layer_types moe_intermediate_size num_experts num_experts_per_tok
        num_shared_experts router_scaling_factor
    """),
    "mimo_v2_flash": words("""
        attention_value_scale hybrid_layer_pattern layernorm_epsilon mlp_layer_types moe_intermediate_size
        moe_layer_freq n_group n_routed_experts norm_topk_prob num_experts_per_tok rope_theta routed_scaling_factor
        sliding_window swa_num_key_value_heads swa_rope_theta topk_group v_head_dim
    """),
    "minimax_m2": {"num_experts_per_tok", "num_local_experts", "rotary_dim"},
    "mistral": {"sliding_window"},
    "mixtral": {"num_experts_per_tok", "num_local_experts"},
    "nemotron_h": OF_MAMBA
    | OF_MIXTURE - {"first_k_dense_replace", "n_shared_experts"}
    | words("""
        layer_norm_epsilon layers_block_type moe_latent_size moe_shared_expert_intermediate_size mtp_layers_block_type
        time_step_limit
    """),
    "olmo3": {"sliding_window"},
    "seed_oss": {"attention_bias"},
    "gpt_oss": {"num_experts_per_tok", "num_local_experts", "sliding_window"},
    "granite": {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"},
    "phi3": {"original_max_position_embeddings", "sliding_window"},  # the first by the rotary embedding
    "smollm3": {"no_rope_layer_interval", "no_rope_layers"},
    "step3p5": words("""
        attention_other_setting moe_intermediate_size moe_layers_enum moe_num_experts moe_router_scaling_factor
        moe_top_k num_attention_groups partial_rotary_factors rope_scaling rope_theta share_expert_dim swiglu_limits
        swiglu_limits_shared
    """),
}
OF_WRAPPERS = {"exaone4_5": "exaone4", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "step3p7": "step3p5"}
OF_WRAPPERS |= {"gemma4_unified": "gemma4_text"}
for _wrapper, _text in OF_WRAPPERS.items():
    OWN_NEUTRAL[_wrapper], OWN_READ[_wrapper] = OWN_NEUTRAL[_text], OWN_READ[_text]
OWN_READ["qwen3_5_text"], OWN_READ["qwen3_5_moe_text"] = OWN_READ["qwen3_5"], OWN_READ["qwen3_5_moe"]
OWN_READ["gemma4"] = OWN_READ["gemma4_text"] | OF_GEMMA4_MIXTURE
KEYS_OF_TOPK = {"moe_k", "moe_top_k", "num_experts_per_tok", "top_k_experts"}
MOE = sorted(family for family, keys in OWN_READ.items() if keys & KEYS_OF_TOPK)
TOPK = {"ernie4_5_moe": "moe_k", "gemma4": "top_k_experts", **dict.fromkeys(STEP, "moe_top_k")}
"""Keys for the number of experts per token, if it is not num_experts_per_tok."""
# What latent attention changes in the keyword arguments of megatron-core's config.
LATENT_ATTENTION: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "kv_channels": 12,
        "num_query_groups": 4,
        "hf_rope": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "max_position_embeddings": 4096,
            "rope_parameters": OWN_SIZES["deepseek_v3"]["rope_parameters"],
        },
        "rope_interleave": True,
    }
}
LATENT_ATTENTION["glm4_moe_lite"] = LATENT_ATTENTION["deepseek_v3"] | {
    "v_head_dim": 20,
    "kv_channels": 20,
    "hf_rope": {
        **LATENT_ATTENTION["deepseek_v3"]["hf_rope"],
        "max_position_embeddings": 202752,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
LATENT_ATTENTION["deepseek_v32"] = LATENT_ATTENTION["deepseek_v3"] | {
    "hf_rope": {**LATENT_ATTENTION["deepseek_v3"]["hf_rope"], "max_position_embeddings": 163840},
}
LATENT_ATTENTION["glm_moe_dsa"] = LATENT_ATTENTION["deepseek_v3"] | {
    "hf_rope": {
        **LATENT_ATTENTION["deepseek_v3"]["hf_rope"],
        "max_position_embeddings": 202752,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}

LATENT_ATTENTION |= dict.fromkeys(("kimi_k2", "kimi_k25"), LATENT_ATTENTION["deepseek_v3"])

OWN_CONFIG = LATENT_ATTENTION | {
    family: {"attention_output_gate": True, "layernorm_zero_centered_gamma": True} for family in HYBRID
}
OWN_CONFIG["gpt_oss"] = {"activation_func": "clamped_swiglu", "add_bias_linear": True, "add_qkv_bias": True}
OWN_CONFIG["granite"] = {"softmax_scale": 0.25}
OWN_CONFIG["exaone4"] = {"hetereogenous_dist_checkpoint": True, "qk_layernorm": True}
OWN_CONFIG["gemma3_text"] = {
    "activation_func": "gelu_pytorch_tanh",
    "hetereogenous_dist_checkpoint": True,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "softmax_scale": 48**-0.5,
}
OWN_CONFIG["gemma4_text"] = {
    "activation_func": "gelu_pytorch_tanh",
    "hetereogenous_dist_checkpoint": True,
    "qk_layernorm": True,
    "softmax_scale": 1.0,
}
OWN_CONFIG["exaone4_5"] = OWN_CONFIG["exaone4"]
OWN_CONFIG["gemma3"] = OWN_CONFIG["gemma3_text"]
OWN_CONFIG["gemma4_unified"] = OWN_CONFIG["gemma4_text"]
OWN_CONFIG["gemma4"] = {key: value for key, value in OWN_CONFIG["gemma4_text"].items() if not key.startswith("het")}
OWN_CONFIG["smollm3"] = {"hetereogenous_dist_checkpoint": True}
OWN_CONFIG["step3p5"] = {"layernorm_zero_centered_gamma": True, "num_attention_heads": 8, "qk_layernorm": True}
OWN_CONFIG["step3p7"] = OWN_CONFIG["step3p5"]
OWN_CONFIG["nemotron_h"] = {"activation_func": "relu2", "gated_linear_unit": False, "num_layers": 4}
OWN_CONFIG["olmo3"] = {"hetereogenous_dist_checkpoint": True}
OWN_CONFIG["mimo_v2_flash"] = {"kv_channels": 12, "num_query_groups": 4, "softmax_scale": 16**-0.5}
OWN_CONFIG["hy_v3"] = {"init_method_std": 0.006}
for _dense in ("qwen3_5", "qwen3_5_text"):  # the others' layers differ by name already, for their experts
    OWN_CONFIG[_dense]["hetereogenous_dist_checkpoint"] = True


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return a config.json as transformers writes it, with changes."""
    return deepcopy(written_config(family)) | changes


@cache
def written_config(family: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4 if family in LATENT else 2}
    sizes["head_dim"] = 8 if family in LATENT else 16
    own: dict[str, Any] = {"layer_types": alternating(2)} if family == "olmo3" else {}
    if family == "mimo_v2_flash":
        own = mimo_v2_flash(sizes)
    if family in STEP:
        own = lists_of_step(sizes)
    values = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, **sizes, **own}
    config: PreTrainedConfig = CLASSES[family][0](**values | OWN_SIZES.get(family, {}))
    written = config.to_dict() | {"model_type": family}
    if family in STEP:
        written = step_as_published(written, 0)
    return gemma4_as_published(written) if family in GEMMA4 else written


def mcore_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of megatron-core's config for a config.json that its family accepts."""
    return families.get(config).architecture(config).mcore_config()


def test_families_are_declarations():
    """Rules and plans use families before torch is imported."""
    script = "import sys, swiftlite.families; print({'torch', 'transformers', 'megatron'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_rows_are_exactly_the_tensors_of_transformers(family, tied):
    model = make_tiny_model(family, tied)
    state = {hub_name(family, name): tensor for name, tensor in per_expert(model.state_dict()).items()}
    config = model.config.to_dict()
    if config["tie_word_embeddings"]:
        del state[hub_name(family, "lm_head.weight")]
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if family in STEP:
        config = step_as_published(config, 2)
    if family in GEMMA4:
        config = gemma4_as_published(config)
    rows = families.FAMILIES[family].rows(config, 0)
    assert {key: shape for row in rows for key, shape in row.hf.items()} == shapes
    assert len([key for row in rows for key in row.hf]) == len(shapes)

    heads = per_expert(random_mtp_tensors(model, family, 2))
    all_rows = families.FAMILIES[family].rows(config, 2)
    copies = {
        copy: row.hf_shapes()[copy] for row in all_rows for copy in row.hf_copies if not copy.endswith("lm_head.weight")
    }
    assert copies | {key: shape for row in all_rows[len(rows) :] for key, shape in row.hf.items()} == {
        name: tuple(tensor.shape) for name, tensor in heads.items()
    }


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_field_of_the_config_is_overlooked(family):
    """A key that transformers adds must be added to one of three lists, so that it cannot change results unnoticed."""
    fields = set(hf_config(family))
    own = OWN_NEUTRAL.get(family, set()) | OWN_READ.get(family, set())
    unknown = fields - HARMLESS - READ - dense.NEUTRAL.keys() - own
    assert not unknown, f"add to OWN_READ what {family} reads, and to OWN_NEUTRAL what it refuses: {sorted(unknown)}"


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_field_left_out_has_the_default_of_transformers(family):
    """Only the default of tie_word_embeddings matters; other keys must be present."""
    config = hf_config(family)
    del config["tie_word_embeddings"]
    assert families.FAMILIES[family].outside(config).is_tied is CLASSES[family][0]().tie_word_embeddings


ONLY_EXPERTS = ("gpt", "minimax", "mixtral", "qwen")
"""Names of families all of whose layers with an MLP are mixtures start with one of these."""


@pytest.mark.parametrize("family", families.FAMILIES)
def test_mcore_config(family):
    config = families.FAMILIES[family].architecture(hf_config(family, rms_norm_eps=1e-5)).mcore_config()
    experts = {key: config.pop(key) for key in list(config) if "moe" in key}
    assert bool(experts) is (family in MOE)
    assert config == {
        "num_layers": 2,
        "hidden_size": 64,
        **(
            {}
            if family.startswith(("gpt", "minimax", "mixtral", "qwen")) and family in MOE
            else {"ffn_hidden_size": 96}
        ),  # all layers are mixtures
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "layernorm_epsilon": 1e-5,
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": family in ("qwen2", "qwen2_5_vl", "qwen2_moe", "mimo", "glm4_moe", "seed_oss"),
        "qk_layernorm": family in ("qwen3", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "glm4_moe", "hy_v3", *HYBRID),
        "init_method_std": 0.02,
    } | OWN_CONFIG.get(family, {})


def test_head_dim_and_groups_are_derived_when_not_stated():
    config = hf_config("llama", head_dim=None, num_key_value_heads=None)
    found = mcore_config(config)
    assert (found["kv_channels"], found["num_query_groups"]) == (16, 4)
    assert mcore_config(hf_config("qwen3", head_dim=128))["kv_channels"] == 128


@pytest.mark.parametrize("family", families.FAMILIES)
def test_only_heads_have_the_prefix_of_heads(family):
    known, config = families.FAMILIES[family], hf_config(family)
    assert not any(known.is_mtp(config, key) for row in known.trunk_rows(config) for key in row.hf_shapes())
    for head in (0, 1):
        keys = [key for row in known.head_rows(config, head) for key in row.hf]
        assert {known.head_of(config, key) for key in (*keys, *known.mtp.copies(config, head))} == {head}


def test_only_mimo_swaps_halves():
    for name, known in families.FAMILIES.items():
        (projection,) = [row for row in known.head_rows(hf_config(name), 0) if row.mcore.endswith("eh_proj.weight")]
        assert isinstance(projection.join, SwapHalves) is (name == "mimo")
        assert list(projection.hf) == [mtp_names(name, 0)[0]["projection"]]


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NOT_READABLE = [
    {"quant_method": "gptq", "bits": 4},
    "fp8",
    {},
    FP8 | {"fmt": "e5m2"},
    FP8 | {"weight_block_size": [128]},
    FP8 | {"weight_block_size": [128, 0]},
    FP8 | {"kv_cache_scheme": {"num_bits": 8}},
]


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("block", [[128, 128], [1, 128]])
def test_blockwise_fp8_can_be_read(family, block):
    quantization = FP8 | {"weight_block_size": block}
    assert families.get(hf_config(family, quantization_config=quantization)).name == family


# Of GLM-4.7-Flash: derived, null where there is no latent, and what transformers and engines take for granted alike.
NEED_NOT_BE = {"qk_head_dim", "q_lora_rank", "rope_interleave", "first_k_dense_replace"}
WIDE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
_BASE = {"rope_theta": 5e5, "partial_rotary_factor": 1}
UNCOMPUTABLE = (
    {"rope_type": "su"} | _BASE,
    {"rope_type": 5} | _BASE,
    {"rope_type": "yarn"} | _BASE,
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0} | _BASE,
    {"rope_type": "longrope", "short_factor": [1.0] * 8} | _BASE,
    {"rope_type": "linear", "factor": "2"} | _BASE,
)
"""Rotary settings that transformers rejects."""
YARN = OWN_SIZES["gpt_oss"]["rope_parameters"]
NOT_READ_OF_YARN = [
    ("rope_theta", None),
    ("beta_fast", None),
    ("beta_slow", None),
    ("factor", None),
    ("original_max_position_embeddings", None),
    ("attention_factor", 1.5),
    ("mscale", 1.0),
]
"""Settings of YaRN that engines do not read for gpt-oss, or without which they fail."""
PARTIAL_ROTARY = ("glm4_moe", "mimo_v2_flash", "phi3", *HYBRID)
OTHER_OF_STEP = {
    "attention_type": "sliding_attention",
    "num_attention_heads": 8,
    "num_attention_groups": 2,
    "head_dim": 16,
}
ALL = " ".join(families.FAMILIES)
HALF_TURNS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def without(known: str, others: str) -> str:
    return " ".join(family for family in known.split() if family not in others.split())


REFUSED_BY: list[tuple[Any, ...]] = [
    (ALL, "hidden_act", "gelu"),
    (ALL, "num_nextn_predict_layers", -1, "1"),
    (without(ALL, "granite seed_oss"), "attention_dropout", 0.1),
    (without(ALL, "gpt_oss"), "quantization_config", {"quant_method": "mxfp4"}),
    (without(ALL, " ".join(PARTIAL_ROTARY)), "partial_rotary_factor", 0.5),
    (without(ALL, " ".join(PARTIAL_ROTARY)), "rope_parameters", HALF_TURNS),
    ("llama granite deepseek_v3", "rope_scaling", {"type": "linear"}),
    ("qwen2 qwen2_5_vl qwen2_moe qwen3 mimo qwen3_moe", "use_sliding_window", True),
    ("qwen2 qwen3 mimo", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen3", "quantization_config", *NOT_READABLE),
    (without(" ".join(MOE), "gpt_oss minimax_m2 mixtral"), "moe_intermediate_size", None),
    ("deepseek_v32 glm_moe_dsa", "index_head_dim index_n_heads index_topk kv_lora_rank q_lora_rank", None),
    ("deepseek_v32 glm_moe_dsa", "first_k_dense_replace", None),
    ("deepseek_v32 glm_moe_dsa", "index_topk index_topk_freq", 0),
    ("deepseek_v32 glm_moe_dsa", "index_topk_pattern", "FS"),
    ("deepseek_v32 glm_moe_dsa", "indexer_types", ["full", "shared"], ["full"]),
    ("deepseek_v32 glm_moe_dsa", "layer_types", ["indexed_attention", "full_attention"]),
    ("deepseek_v32 glm_moe_dsa", "mlp_layer_types", ["sparse", "sparse"]),
    ("deepseek_v32 glm_moe_dsa", "rope_interleave", False),
    ("deepseek_v32 glm_moe_dsa", "mlp_bias", True),
    ("glm4_moe_lite", " ".join(sorted(OF_LATENT - NEED_NOT_BE)), None),
    ("granite", " ".join(sorted(OWN_READ["granite"])), None, 0),
    ("nemotron_h", " ".join(sorted(OF_MAMBA)), None),
    ("qwen3_next", " ".join(sorted(OF_LINEAR)), None),
    ("deepseek_v3 exaone4 gemma3_text gemma4_text granite hy_v3 llama mimo_v2_flash", "attention_bias", True),
    ("minimax_m2 olmo2 olmo3 phi3 qwen3 qwen3_moe qwen3_next qwen3_vl_moe smollm3 step3p5", "attention_bias", True),
    ("deepseek_v3 glm4_moe mimo_v2_flash qwen3_vl_moe", "norm_topk_prob", False),
    ("deepseek_v3 glm4_moe_lite", "topk_method", "greedy"),
    ("deepseek_v3 mimo_v2_flash", "v_head_dim", None),
    ("deepseek_v3 mimo_v2_flash minimax_m2", "scoring_func", "softmax"),
    (
        "ernie4_5_moe exaone4 gemma4_text gpt_oss mimo_v2_flash minimax_m2 qwen2_moe smollm3",
        "num_key_value_heads",
        None,
    ),
    (
        "ernie4_5_moe exaone4 hy_v3 olmo2 qwen2_5_vl qwen3_vl qwen3_vl_moe smollm3",
        "rope_parameters",
        {"rope_type": "default"},
    ),
    ("ernie4_5_moe nemotron_h", "use_bias", True),
    ("ernie4_5_moe step3p5", "use_moe", False),
    ("ernie4_5_moe step3p5", "moe_num_experts", None),
    ("exaone4 gemma3_text gemma4_text gpt_oss mimo_v2_flash olmo3 step3p5", "sliding_window", None),
    ("exaone4 gemma3_text gpt_oss mistral olmo3 step3p5", "sliding_window", 0),
    (
        "exaone4 gemma4_text gpt_oss qwen2_moe qwen3_next smollm3",
        "layer_types",
        ["full_attention", "sliding_attention"],
    ),
    ("exaone4 granite hy_v3 llama nemotron_h phi3 seed_oss smollm3 step3p5", "mlp_bias", True),
    ("gemma3_text gemma4_text", "hidden_activation", "gelu"),
    ("gemma3_text gemma4_text", "attn_logit_softcapping", 50.0),
    ("gemma3_text gemma4_text olmo3", "layer_types", ["sliding_attention", "sliding_attention"]),
    ("gemma3_text gpt_oss", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
    ("gemma3_text olmo3 qwen3_next", "layer_types", ["full_attention"]),
    ("gemma3_text qwen3_next", "layer_types", ["full_attention", "linear_attention"]),
    ("gemma4 hy_v3 qwen2_moe", "num_experts", None),
    ("gemma4_text gpt_oss mimo_v2_flash minimax_m2 qwen3_next", "head_dim", None),
    ("gemma4_text mimo_v2_flash", "rope_parameters", None),
    ("glm4_moe mimo_v2_flash", "n_routed_experts", None),
    ("glm4_moe phi3", "partial_rotary_factor", 1.5),
    ("glm4_moe_lite hy_v3", "first_k_dense_replace", 0),
    ("glm4_moe_lite hy_v3", "mlp_layer_types", ["sparse", "dense"]),
    ("gpt_oss minimax_m2 mixtral", "num_local_experts", None),
    ("gpt_oss qwen2_moe", "layer_types", ["full_attention"] * 3),
    ("granite seed_oss", "attention_dropout", 0.5),
    ("hy_v3 mimo_v2_flash minimax_m2 mixtral", "num_experts_per_tok", 1),
    ("mimo_v2_flash minimax_m2", "scoring_func", None),
    ("mimo_v2_flash mixtral nemotron_h step3p5", "tie_word_embeddings", True),
    ("mimo_v2_flash step3p5", "rope_theta layer_types", None),
    ("minimax_m2 mixtral", "router_jitter_noise", 0.1),
    ("minimax_m2 mixtral nemotron_h", "sliding_window", 16),
    ("qwen2_moe qwen3_moe qwen3_vl_moe", "mlp_only_layers", [0, 1]),
    ("qwen2_moe qwen3_next", "shared_expert_intermediate_size", None),
    (
        "deepseek_v3",
        """kv_lora_rank n_group topk_group n_shared_experts first_k_dense_replace routed_scaling_factor
        norm_topk_prob""",
        None,
    ),
    ("deepseek_v3", "num_key_value_heads moe_layer_freq", 2),
    ("deepseek_v3", "head_dim", 16),
    ("deepseek_v3", "topk_group", 3),
    ("deepseek_v32", "indexer_rope_interleave", True),
    ("ernie4_5_moe", "moe_num_shared_experts moe_layer_start_index", None),
    ("ernie4_5_moe", "moe_layer_interval moe_layer_start_index moe_layer_end_index", 2),
    ("ernie4_5_moe", "moe_layer_start_index moe_layer_end_index", 0),
    ("ernie4_5_moe", "rope_is_neox_style", True),
    ("ernie4_5_moe", "moe_norm_min", 1e-6),
    ("ernie4_5_moe", "moe_num_experts", [4, 4]),
    ("exaone4", "bias", True),
    ("exaone4", "logit_scale", 0.5),
    ("exaone4", "layer_types", ["full_attention"] * 2, ["sliding_attention"] * 2),
    ("exaone4", "sliding_window_pattern", None, 1, 3, 2.0, "", "LLG", "GL", "LG\n"),
    ("gemma3_text", "layer_types", ["unknown", "full_attention"]),
    ("gemma3_text", "rope_parameters", {"full_attention": "x", "sliding_attention": 5}),
    ("gemma3_text", "sliding_window_pattern", "LG", -1, 1.5),
    ("gemma3_text", "query_pre_attn_scalar", None),
    ("gemma3_text", "final_logit_softcapping", 30.0),
    ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma4", "enable_moe_block", False),
    ("gemma4", "top_k_experts", 1),
    ("gemma4_text", "use_double_wide_mlp num_kv_shared_layers", 1),
    (
        "gemma4_text",
        "rope_parameters",
        {"rope_type": "proportional", "rope_theta": 1e4},
        {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        {key: {"rope_type": "default", "partial_rotary_factor": 0.25} for key in KINDS},
    ),
    ("gemma4_text", "global_head_dim", None),
    ("gemma4_text", "final_logit_softcapping", 0),
    ("gemma4_text", "hidden_size_per_layer_input", -1, True, 10**30),
    ("gemma4_text", "num_kv_shared_layers", [], ""),
    ("gemma4_text", "num_global_key_value_heads", 3),
    (
        "gemma4_text",
        "per_layer_config",
        {},
        {"1": "x"},
        {"0": {"head_dim": 8}, "1": {"head_dim": 64}},
        {"1": {"head_dim": 64, "sliding_window": 4}},
    ),
    ("gemma4_text", "use_bidirectional_attention", "all"),
    ("gemma4_text", "use_double_wide_mlp", "yes"),
    ("gemma4_unified", "enable_moe_block", True),
    ("gemma4_unified", "num_experts", 4),
    ("gemma4_unified", "hidden_size_per_layer_input", 256),
    ("glm4_moe", "n_shared_experts", 0),
    ("glm4_moe", "first_k_dense_replace", 2),
    ("glm4_moe", "routed_scaling_factor", 0.0),
    ("glm4_moe", "n_group", 3, 4),
    ("glm4_moe_lite", "mlp_layer_types", ["dense"], ["dense", "dense"], 5),
    ("glm_moe_dsa", "indexer_rope_interleave", False),
    ("gpt_oss", "quantization_config", {"quant_method": "mxfp4", "bits": 8}),
    ("gpt_oss", "experts_per_token", 3),
    ("gpt_oss", "attention_bias", False),
    ("gpt_oss", "rms_norm_eps", 1e-6),
    ("gpt_oss", "swiglu_alpha", 1.0),
    ("gpt_oss", "swiglu_limit", 6.0),
    ("gpt_oss", "num_hidden_layers", 1),
    ("hy_v3", "num_shared_experts router_scaling_factor", None),
    ("hy_v3", "qk_norm route_norm", False),
    ("hy_v3", "num_shared_experts", 0),
    ("hy_v3", "expert_hidden_dim", 64),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "full_attention": {"rope_theta": 1e6}}),
    ("llama", "pretraining_tp", 2),
    ("llama", "num_key_value_heads", 3),
    ("llama", "rms_norm_eps", None),
    ("llama", "hidden_size", "64"),
    (
        "mimo_v2_flash",
        """layernorm_epsilon swa_num_attention_heads swa_num_key_value_heads swa_head_dim swa_v_head_dim
        sliding_window_size swa_rope_theta partial_rotary_factor attention_value_scale hybrid_layer_pattern
        moe_layer_freq topk_method add_swa_attention_sink_bias""",
        None,
    ),
    ("mimo_v2_flash", "swa_num_attention_heads swa_num_key_value_heads n_group", 2),
    ("mimo_v2_flash", "num_key_value_heads sliding_window_size", 4),
    ("mimo_v2_flash", "moe_layer_freq n_shared_experts", 1),
    ("mimo_v2_flash", "rope_theta swa_rope_theta", 1e6),
    ("mimo_v2_flash", "swa_head_dim", 8),
    ("mimo_v2_flash", "swa_v_head_dim", 16),
    ("mimo_v2_flash", "v_head_dim", 32),
    ("mimo_v2_flash", "layernorm_epsilon", 1e-6),
    ("mimo_v2_flash", "hybrid_layer_pattern", [0, 1], [1, 0, 1], [1, [0]]),
    ("mimo_v2_flash", "moe_layer_freq", [1, 1]),
    ("mimo_v2_flash", "mlp_layer_types", ["sparse", "sparse"]),
    ("mimo_v2_flash", "rope_parameters", {"rope_type": "default", "rope_theta": 50000.0}),
    ("mimo_v2_flash", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("mimo_v2_flash", "add_full_attention_sink_bias", True),
    ("mimo_v2_flash", "routed_scaling_factor", 2.5),
    ("minimax_m2", "rotary_dim use_qk_norm use_routing_bias", None),
    ("minimax_m2", "use_qk_norm use_routing_bias", False),
    ("minimax_m2", "rotary_dim", 8, 15, 32),
    ("minimax_m2", "qk_norm_type", "per_head"),
    ("minimax_m2", "attn_type_list", [1, 0], [1]),
    ("minimax_m2", "shared_intermediate_size", 64),
    ("minimax_m2", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 1.0}),
    ("mistral", "sliding_window", "x"),
    ("mixtral", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ("nemotron_h", "layer_norm_epsilon moe_shared_expert_intermediate_size layers_block_type", None),
    ("nemotron_h", "mamba_proj_bias residual_in_fp32", True),
    ("nemotron_h", "mamba_n_groups n_shared_experts", 2),
    ("nemotron_h", "moe_latent_size", 0),
    (
        "nemotron_h",
        "layers_block_type",
        "ME*-",
        [["mamba"], "attention", "moe"],
        ["mamba", "moe"],
        ["attention", "sliding_attention", "moe"],
    ),
    ("nemotron_h", "hybrid_override_pattern", "M*-E", ["M", "*", "E", "-"]),
    ("nemotron_h", "mtp_hybrid_override_pattern", 1),
    ("nemotron_h", "mtp_layers_block_type", "*E"),
    ("nemotron_h", "num_hidden_layers", 5),
    ("nemotron_h", "n_groups", 3),
    ("nemotron_h", "time_step_limit", [0.001, 1e308], [0.0, 0.1], 0.1),
    ("nemotron_h", "mlp_hidden_act", "silu"),
    ("nemotron_h", "mamba_hidden_act", "relu2"),
    ("nemotron_h", "use_conv_bias", False),
    (
        "olmo3",
        "rope_parameters",
        {"rope_type": "default", "rope_theta": 5e5},
        {"full_attention": {"rope_theta": 1e4}},
        {"sliding_attention": {"rope_theta": 5e5}},
        {"full_attention": WIDE, "sliding_attention": WIDE},
        {"full_attention": WIDE | {"rope_type": "yarn", "attention_factor": 1.0}},
    ),
    ("olmo3", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("phi3", "resid_pdrop embd_pdrop", 0.1),
    ("phi3", "lm_head_bias", True),
    ("phi3", "sliding_window", -1),
    ("phi3", "rope_parameters", {"rope_type": "su"}, {"rope_type": "yarn"}),
    ("qwen2_moe", "qkv_bias", None, False),
    ("qwen2_moe", "shared_expert_intermediate_size", 0),
    ("qwen2_moe", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3_moe", "num_experts", 0, "4"),
    ("qwen3_moe", "shared_expert_intermediate_size", 32),
    ("qwen3_moe", "decoder_sparse_step", 3),
    ("qwen3_next", "layer_types", ["linear_attention", "linear_attention"]),
    ("qwen3_next", "attn_output_gate", False),
    ("qwen3_next", "linear_num_value_heads", 3),
    ("seed_oss", "attention_out_bias", True),
    ("seed_oss", "residual_dropout", 0.5),
    ("smollm3", "use_sliding_window", True),
    ("smollm3", "no_rope_layers", [1], [1] * 64, "1,0"),
    ("smollm3", "no_rope_layer_interval", 0),
    (
        "step3p5",
        """attention_other_setting moe_layers_enum moe_router_scaling_factor num_attention_groups
        partial_rotary_factors share_expert_dim swiglu_limits swiglu_limits_shared yarn_only_types""",
        None,
    ),
    ("step3p5", "need_fp32_gate norm_expert_weight use_head_wise_attn_gate use_moe_router_bias zero_centered", False),
    (
        "step3p5",
        "attention_other_setting",
        OTHER_OF_STEP | {"attention_type": "full_attention"},
        OTHER_OF_STEP | {"head_dim": 8},
        OTHER_OF_STEP | {"num_attention_groups": 4},
        OTHER_OF_STEP | {"num_attention_heads": None},
        OTHER_OF_STEP | {"num_attention_heads": 7},
        OTHER_OF_STEP | {"num_attention_heads": 10**6},
    ),
    ("step3p5", "gating", "per-channel"),
    ("step3p5", "moe_layers_enum", "0,1", "1,2", [1], "one"),
    ("step3p5", "moe_router_activation", "softmax"),
    ("step3p5", "num_attention_groups", 3),
    ("step3p5", "query_pre_attn_scalar", 8),
    ("step3p5", "rope_theta", 1e4, [1e4], [1e4, "5e6"], [1e4, None]),
    ("step3p5", "partial_rotary_factors", [1.0, 0.25]),
    (
        "step3p5",
        "rope_scaling",
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        {"rope_type": "llama3", "factor": 8.0},
    ),
    ("step3p5", "sink", True),
    ("step3p5", "layer_types", ["full_attention", "full_attention"], ["sliding_attention", "linear_attention"]),
    ("step3p5", "swiglu_limits", [0.0, -1.0]),
    ("step3p5", "swiglu_limits_shared", [7.0, 0.0]),
    ("step3p5", "use_rope_layers", [True, False]),
]
"""Rows of families, keys and values: each of the families refuses each of the values of each of the keys."""
REFUSED = [
    *[
        (family, key, value)
        for names, keys, *values in REFUSED_BY
        for family, key, value in product(names.split(), keys.split(), values)
    ],
    *[("gpt_oss", "rope_parameters", YARN | {key: value}) for key, value in NOT_READ_OF_YARN],
    *[(family, TOPK.get(family, "num_experts_per_tok"), 1) for family in ("ernie4_5_moe", "gpt_oss", "step3p5")],
    *[(family, TOPK.get(family, "num_experts_per_tok"), value) for family, value in product(MOE, (5, 0, None))],
    *[
        (family, "rope_parameters", rope if family not in WINDOWED else {"full_attention": rope})
        for family, rope in product(families.FAMILIES, UNCOMPUTABLE)
    ],
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_what_would_change_the_mathematics_is_refused(family, key, value):
    families.get(hf_config(family))
    with pytest.raises(UserError) as raised:
        families.get(hf_config(family, **{key: value}))
    assert key in str(raised.value)
    index.known_architecture(hf_config(family, **{key: value}))  # no error: rules call it before the check


@pytest.mark.parametrize("family", ["qwen3", "seed_oss", "hy_v3"])
@pytest.mark.parametrize("stated", [1, None])
def test_what_stands_above_does_not_hide_the_part_of_a_head_that_turns(family, stated):
    """transformers' classes of these families ignore the key in both places."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match=naming("rope_parameters: partial_rotary_factor 0.5")):
        families.get(hf_config(family, partial_rotary_factor=stated, rope_parameters=rope))


def test_two_parts_of_a_head_that_turn():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1}
    with pytest.raises(UserError, match=naming("partial_rotary_factor 0.25 rope_parameters 1")):
        families.get(hf_config("qwen3_next", partial_rotary_factor=0.25, rope_parameters=rope))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": None}, None])
def test_a_theta_that_is_null_is_missing(rope):
    with pytest.raises(UserError, match=naming("rope_theta")):
        families.get(hf_config("hy_v3", rope_parameters=rope, rope_theta=None))


def test_the_part_of_a_head_that_turns_must_be_stated():
    """The default is 0.5 in transformers for GLM-4.5, and 1 in other programs."""
    config = hf_config("glm4_moe")
    for nested in (config, config["rope_parameters"]):
        nested.pop("partial_rotary_factor", None)
    with pytest.raises(UserError, match=naming("partial_rotary_factor")):
        families.get(config)


@pytest.mark.parametrize(
    "family",
    [
        family
        for family in MOE
        if not family.startswith(
            ("ernie", "gemma4", "gpt_oss", "hy_v3", "mimo", "minimax", "mixtral", "qwen3_5", "qwen3_vl", "step3p")
        )
    ],
)
def test_one_expert_per_token(family):
    """With one expert, its score divided by itself is 1. megatron-core's sigmoid router does not divide."""
    one = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    families.get(hf_config(family, **one, norm_topk_prob=False))
    with pytest.raises(UserError, match=naming("norm_topk_prob True num_experts_per_tok 1")):
        families.get(hf_config(family, **one, norm_topk_prob=True))


@pytest.mark.parametrize("family", DSA)
def test_both_names_of_layers_with_indexers(family):
    """transformers 5.11 wrote the second."""
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        assert families.get(hf_config(family, layer_types=[kind] * 2)).name == family


def test_layers_without_indexers():
    """They are those of transformers, and heads have an indexer even if the last layer has none."""
    for offset in (1, 2, 3):
        shared = {"num_hidden_layers": 9, "index_topk_freq": 4, "index_skip_topk_offset": offset}
        written = CLASSES["glm_moe_dsa"][0](**OWN_SIZES["glm_moe_dsa"], **shared).to_dict()
        architecture = families.get(written).architecture(written)
        kinds = ["full" if has_indexer(layer) else "shared" for layer in architecture.layers]
        assert kinds == written["indexer_types"]
        last_full = max(n for n, kind in enumerate(kinds) if kind == "full")
        assert architecture.mtp_sources == (last_full, last_full)
        assert architecture.index_topk == 2048
        with pytest.raises(UserError, match=naming("indexer_types")):
            families.get(written | {"indexer_types": [*kinds[1:], kinds[0]]})
    with pytest.raises(UserError, match=naming("index_topk_freq")):
        families.get(hf_config("deepseek_v32", index_topk_freq=2, index_skip_topk_offset=1))


def test_a_query_latent_must_be_stated_or_denied():
    """transformers' default for DeepSeek-V3 is 1536."""
    families.get(hf_config("deepseek_v3", q_lora_rank=None))
    config = hf_config("deepseek_v3")
    del config["q_lora_rank"]
    with pytest.raises(UserError, match=naming("q_lora_rank")):
        families.get(config)


@pytest.mark.parametrize("key", ["attention_bias", "head_dim", "num_key_value_heads"])
def test_what_readers_of_seed_oss_take_for_granted_must_be_stated(key):
    config = hf_config("seed_oss")
    del config[key]
    with pytest.raises(UserError, match=naming(key)):
        families.get(config)


def test_the_dropout_that_seed_oss_was_published_with_is_left_out():
    published = {"attention_dropout": 0.1, "residual_dropout": 0.1}
    assert mcore_config(hf_config("seed_oss", **published)) == mcore_config(hf_config("seed_oss"))


@pytest.mark.parametrize("has_biases", [True, False])
def test_seed_oss_says_whether_queries_have_biases(has_biases):
    assert mcore_config(hf_config("seed_oss", attention_bias=has_biases))["add_qkv_bias"] is has_biases


def test_which_layers_of_smollm3_have_rotary_embeddings():
    def numbers(**changes: Any) -> list[int]:
        config = hf_config("smollm3", num_hidden_layers=5, layer_types=None, **changes)
        layers = families.get(config).architecture(config).layers
        return [number for number, layer in enumerate(layers) if layer.attention.rotary == 16]

    assert numbers(no_rope_layers=[0, 1, 1, 0, 1]) == [1, 2, 4]
    assert numbers(no_rope_layers=None, no_rope_layer_interval=3) == [0, 1, 3, 4]


def test_which_layers_of_exaone4_have_windows_and_rotary_embeddings():
    def kinds(**changes: Any) -> list[tuple[int | None, int]]:
        config = hf_config("exaone4", num_hidden_layers=5, **changes)
        layers = families.get(config).architecture(config).layers
        return [(layer.attention.window, layer.attention.rotary) for layer in layers]

    window, full, rotary = (8, 16), (None, 0), (None, 16)
    stated = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    mixed = [window, window, full, window, window]
    assert kinds(sliding_window_pattern=3, layer_types=None) == mixed
    assert kinds(sliding_window_pattern="LLG", layer_types=stated) == mixed
    assert kinds(sliding_window=None, layer_types=["full_attention"] * 5) == [rotary] * 5
    with pytest.raises(UserError, match=naming("layer_types sliding_window_pattern LLG")):
        kinds(sliding_window_pattern="LLG", layer_types=None)  # transformers cannot read it


@pytest.mark.parametrize("kinds", [["mamba", "attention", "moe", "mlp"], ["mamba", "attention", "mlp", "mlp"]])
@pytest.mark.parametrize("pattern", [None, "*", "*E", "ME"])
@pytest.mark.parametrize("listed", [None, ["attention", "moe"], ["attention"], ["mamba"]])
def test_new_heads_of_nemotron_h_replace_the_layers_of_heads_in_config_json(kinds, pattern, listed):
    config = hf_config("nemotron_h") | {"layers_block_type": kinds}
    config |= {"mtp_hybrid_override_pattern": pattern, "mtp_layers_block_type": listed}
    change = families.get(config).config_with(config, Heads(1))
    patched, _ = patch(config, change)
    assert families.get(patched)
    assert patch(patched, families.get(patched).config_with(patched, Heads(1))) == (patched, [])
    assert digest_of_trunk(patched) == digest_of_trunk(config)


def test_sizes_of_heads_of_gemma4():
    """transformers 5.19 writes `per_layer_config` instead of the keys of published files."""

    def sizes(config: dict[str, Any]) -> list[tuple[int, int, bool]]:
        kinds: list[Any] = [layer.attention for layer in families.get(config).architecture(config).layers]
        return [(kind.head_dim, kind.groups, kind.keys_are_values) for kind in kinds]

    written = CLASSES["gemma4"][0](**OWN_SIZES["gemma4_text"], num_hidden_layers=6, num_attention_heads=8, head_dim=16)
    for config in (written.to_dict(), gemma4_as_published(written.to_dict())):
        assert sizes(config) == [(16, 4, False)] * 5 + [(64, 2, True)]
    config = gemma4_as_published(written.to_dict()) | {"attention_k_eq_v": False}
    assert sizes(config)[-1] == (64, 4, False)


def test_embeddings_of_layers_have_the_vocabulary_of_the_model():
    config = hf_config("gemma4_text") | {"hidden_size_per_layer_input": 16}
    with pytest.raises(UserError, match=naming("vocab_size_per_layer_input 100 128")):
        families.get(config | {"vocab_size_per_layer_input": 100})
    assert families.get(config | {"vocab_size_per_layer_input": 128})


def test_gemma4_states_that_it_has_no_embeddings_of_layers():
    config = hf_config("gemma4_text")
    del config["hidden_size_per_layer_input"]
    with pytest.raises(UserError, match=naming("hidden_size_per_layer_input")):
        families.get(config)


def test_exaone4_states_whether_it_has_windows():
    config = hf_config("exaone4")
    del config["sliding_window"]
    with pytest.raises(UserError, match=naming("sliding_window")):
        families.get(config)


def test_groups_of_experts():
    grouped = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4}
    config = mcore_config(hf_config("glm4_moe", **grouped, topk_group=2))
    assert (config["moe_router_num_groups"], config["moe_router_group_topk"]) == (4, 2)
    config = mcore_config(hf_config("glm4_moe", **grouped, topk_group=4))
    assert (config["moe_router_num_groups"], config["moe_router_group_topk"]) == (None, None)
    with pytest.raises(UserError, match=naming("topk_group 1 num_experts_per_tok 4 2")):
        families.get(hf_config("glm4_moe", **grouped, topk_group=1))


def test_another_familys_keys_are_not_read():
    others = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "routed_scaling_factor": 3.0}
    assert mcore_config(hf_config("hy_v3", **others)) == mcore_config(hf_config("hy_v3"))


def test_which_layers_have_experts():
    config = mcore_config(hf_config("glm4_moe", num_hidden_layers=5, first_k_dense_replace=2))
    assert config["moe_layer_freq"] == [0, 0, 1, 1, 1]
    config = mcore_config(hf_config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert config["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]


def test_which_part_of_a_head_is_rotary_in_minimax_m2():
    """Files on the hub have only `rotary_dim`, files of transformers 5 also the share of each head."""
    published = hf_config("minimax_m2", rope_parameters=None, rope_theta=5_000_000, rotary_dim=8)
    del published["partial_rotary_factor"]
    saved = hf_config("minimax_m2", rotary_dim=8, partial_rotary_factor=0.5)
    saved["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    for config in (published, saved):
        architecture = families.get(config).architecture(config)
        assert {layer.attention.rotary for layer in architecture.layers} == {8}
        (rope,) = architecture.outside.ropes
        assert rope["partial_rotary_factor"] == 0.5


def test_both_names_of_the_number_of_experts():
    config = hf_config("qwen3_moe")
    assert config["num_local_experts"] == 4  # as transformers 5 writes it
    config["num_experts"] = config.pop("num_local_experts")  # as the hub has it
    assert mcore_config(config)["num_moe_experts"] == 4


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as raised:
        families.get(hf_config("llama", mlp_bias=True, hidden_act="gelu"))
    assert mentions(str(raised.value), "mlp_bias True hidden_act 'gelu' 'silu'")


def test_hidden_size_that_is_no_multiple_of_the_heads():
    with pytest.raises(UserError, match=naming("hidden_size 66 num_attention_heads 4")):
        families.get(hf_config("llama", head_dim=None, hidden_size=66))


@pytest.mark.parametrize("model_type", ["gpt2", "glm_ocr", None, ["llama"]])
def test_unknown_family(model_type, tmp_path):
    with pytest.raises(UserError) as raised:
        families.get({"model_type": model_type}, tmp_path)
    assert mentions(str(raised.value), f"{tmp_path / 'config.json'} model_type {model_type!r}")
    assert ", ".join(sorted(families.FAMILIES)) in str(raised.value)


def test_rotary_buffers_of_old_files_are_derived():
    llama = families.FAMILIES["llama"]
    assert llama.is_derived("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not llama.is_derived("model.layers.3.self_attn.q_proj.weight")
