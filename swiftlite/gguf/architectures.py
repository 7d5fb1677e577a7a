"""Describe the architectures of llama.cpp that run the families' trunks and heads.

A GGUF file names an architecture, which is a computation with some options. llama.cpp drafts with MTP heads in a few
architectures only. Dense families other than Qwen3.5 use one of these whose options include their computation: a
`glm4moe` whose trunk has only dense layers. In its head, the MLP is stored as shared experts, next to a routed expert
of zeros that every token selects.

The trunk of another kind of drafter, which is a file of its own (`drafters.py`), has the architecture of published
files (`TRUNKS`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftlite.base.errors import UserError, clip
from swiftlite.base.heads import MTP
from swiftlite.families import dense
from swiftlite.families.attention import GroupedQueryAttention, LatentAttention
from swiftlite.families.family import Family
from swiftlite.families.linear_attention import GatedDeltaNet
from swiftlite.families.mlp import MixtureOfExperts, Mlp
from swiftlite.families.serving.llamacpp import ARCHITECTURES, FAMILIES_RUN, TRUNKS
from swiftlite.gguf import gemma4, nemotron_h
from swiftlite.gguf.tensors import IDLE_EXPERT, Conversion, Naming, conversions

HfConfig = Mapping[str, Any]
Metadata = dict[str, Any]
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of gating functions
_POST_NORM = {"pre_mlp_layernorm.weight": ("post_attention_norm.weight",)}
_LATENT_NORMS = {"self_attention.q_layernorm.weight": ("attn_q_a_norm.weight",)}
_BIAS = {"mlp.router.expert_bias": ("exp_probs_b",)}
_ROPE_TYPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp.

    Attributes:
        name: value of general.architecture.
        naming: names of its tensors.
        metadata: returns the keys of this architecture, without its name, in addition to those of all architectures,
            for a number of MTP heads.
        problems: yields a line for each setting that it does not support, for a number of MTP heads.
        constants: returns tensors of which no Hugging Face tensor is the source.
        has_heads: whether its graph drafts with MTP heads.
        has_windows: whether its layers can have sliding windows.
    """

    name: str
    naming: Naming
    metadata: Callable[[Family, HfConfig, int], Metadata] = lambda family, hf_config, heads: {}
    problems: Callable[[Family, HfConfig, int], Iterable[str]] = lambda family, hf_config, heads: ()
    constants: Callable[[Family, HfConfig], list[Conversion]] = lambda family, hf_config: []
    has_heads: bool = True
    has_windows: bool = False


def _experts(kind: MixtureOfExperts) -> Metadata:
    """Return the keys of a mixture of experts."""
    router = kind.router
    is_sigmoid = router.get("moe_router_score_function") == "sigmoid"
    metadata = {
        "expert_count": kind.experts,
        "expert_used_count": kind.topk,
        "expert_feed_forward_length": kind.ffn,
        # Written always: if it is missing, llama.cpp guesses it from the sizes of the model.
        "expert_gating_func": _SIGMOID if is_sigmoid else _SOFTMAX,
        "expert_weights_norm": not router.get("moe_router_pre_softmax", False),
        "expert_weights_scale": float(router.get("moe_router_topk_scaling_factor") or 1.0),
    }
    if groups := router.get("moe_router_num_groups"):
        metadata |= {"expert_group_count": groups, "expert_group_used_count": router["moe_router_group_topk"]}
    return metadata


def _mixture(family: Family, hf_config: HfConfig) -> tuple[MixtureOfExperts | None, int]:
    """Return the mixture of experts of a model and the number of dense layers before the first one."""
    kinds = [layer.mlp for layer in family.architecture(hf_config).layers]
    leading = 0
    while leading < len(kinds) and isinstance(kinds[leading], Mlp):
        leading += 1
    if leading == len(kinds):
        return None, leading
    mixture = kinds[leading]
    assert isinstance(mixture, MixtureOfExperts)
    if any(kind != mixture for kind in kinds[leading:]):
        raise UserError(
            "llama.cpp does not support dense layers after the first mixture of experts", "use another --infer_backend"
        )
    return mixture, leading


def _glm4moe(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    mixture, leading = _mixture(family, hf_config)
    if mixture is None:
        ffn = hf_config["intermediate_size"]
        if ffn % IDLE_EXPERT:
            raise UserError(
                f"llama.cpp requires intermediate_size {ffn} to be a multiple of {IDLE_EXPERT} for {family.name}",
                "use another --infer_backend",
            )
        return {
            "leading_dense_block_count": leading,
            "expert_count": 1,
            "expert_used_count": 1,
            "expert_feed_forward_length": IDLE_EXPERT,
            "expert_shared_count": ffn // IDLE_EXPERT,
            "expert_gating_func": _SIGMOID,
            "expert_weights_norm": True,
        }
    shared = {"expert_shared_count": mixture.shared_ffn // mixture.ffn}
    return _experts(mixture) | shared | {"leading_dense_block_count": leading}


def _deepseek2(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    mixture, leading = _mixture(family, hf_config)
    attention = family.architecture(hf_config).layers[0].attention
    assert mixture is not None
    assert isinstance(attention, LatentAttention)
    if not attention.rope_interleave:
        raise UserError("llama.cpp requires rope_interleave true for latent attention", "use another --infer_backend")
    latent, rotary = attention.kv_lora_rank, attention.qk_rope_head_dim
    metadata = _experts(mixture) | {
        "expert_shared_count": mixture.shared_ffn // mixture.ffn,
        "leading_dense_block_count": leading,
        # llama.cpp computes latent attention as attention with one key-value head of latents.
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotary,
        "attention.value_length": latent,
        "attention.key_length_mla": attention.qk_nope_head_dim + rotary,
        "attention.value_length_mla": attention.v_head_dim,
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rotary,
    }
    if attention.q_lora_rank is None:
        raise UserError(
            "llama.cpp requires q_lora_rank for MTP heads with latent attention", "use another --infer_backend"
        )
    metadata["attention.q_lora_rank"] = attention.q_lora_rank
    if all_dim := dense.rope_parameters(hf_config).get("mscale_all_dim"):
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * all_dim  # llama.cpp divides it by 0.1
    return metadata


def _hy_v3(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    kinds = [layer.mlp for layer in family.architecture(hf_config).layers]
    mixture = next(kind for kind in kinds if isinstance(kind, MixtureOfExperts))  # layers without a router are dense
    return _experts(mixture) | {"expert_shared_feed_forward_length": mixture.shared_ffn or IDLE_EXPERT}


def _hybrid(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    layers = family.architecture(hf_config).layers
    recurrent = [layer.attention for layer in layers if isinstance(layer.attention, GatedDeltaNet)]
    if not recurrent:
        raise UserError(
            f"llama.cpp requires layers of linear attention for {family.name}", "use another --infer_backend"
        )
    kind = recurrent[0]
    if kind.key_head_dim != kind.value_head_dim:
        raise UserError(
            f"llama.cpp requires linear_key_head_dim {kind.key_head_dim} and linear_value_head_dim "
            f"{kind.value_head_dim} to be equal",
            "use another --infer_backend",
        )
    metadata: Metadata = {
        "ssm.conv_kernel": kind.kernel,
        "ssm.state_size": kind.key_head_dim,
        "ssm.group_count": kind.key_heads,
        "ssm.time_step_rank": kind.value_heads,
        "ssm.inner_size": kind.value_heads * kind.value_head_dim,
        # Heads follow the trunk's layers, and are not recurrent.
        "attention.recurrent_layers": [layer.attention.is_recurrent for layer in layers] + [False] * heads,
    }
    mlp = layers[-1].mlp
    if isinstance(mlp, MixtureOfExperts):
        metadata |= _experts(mlp) | {"expert_shared_feed_forward_length": mlp.shared_ffn}
    return metadata


def _qwen35(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    sections = dense.rope_parameters(hf_config).get("mrope_section") or [11, 11, 10]
    return _hybrid(family, hf_config, heads) | {"rope.dimension_sections": [*sections, 0]}


def _nemotron_h(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    metadata = nemotron_h.metadata(family, hf_config, heads)
    kinds = [layer.mlp for layer in family.architecture(hf_config).layers]
    for mixture in kinds:
        if isinstance(mixture, MixtureOfExperts):
            own = {"expert_shared_count": 1, "expert_shared_feed_forward_length": mixture.shared_ffn}
            latent = {"moe_latent_size": mixture.latent} if mixture.latent else {}
            return metadata | _experts(mixture) | own | latent
    return metadata


RECORDS = (
    GgufArchitecture("glm4moe", Naming(_POST_NORM, idle_expert=True), _glm4moe),
    GgufArchitecture("hy_v3", Naming(_BIAS, idle_shared=True), _hy_v3),
    GgufArchitecture("deepseek2", Naming(_LATENT_NORMS), _deepseek2),
    GgufArchitecture("qwen3next", Naming(_POST_NORM, joins_decays=True), _hybrid),
    GgufArchitecture("qwen35", Naming(_POST_NORM, tiles_values=True), _qwen35),
    GgufArchitecture("qwen35moe", Naming(_POST_NORM, tiles_values=True), _qwen35),
    GgufArchitecture("llama", Naming(pairs_channels=True), has_heads=False),
    GgufArchitecture("qwen3", Naming(), has_heads=False),
    GgufArchitecture(
        "gemma4",
        Naming(),
        gemma4.trunk_metadata,
        gemma4.problems,
        gemma4.constants,
        has_heads=False,
        has_windows=True,
    ),
    GgufArchitecture("nemotron_h_moe", Naming(_POST_NORM), _nemotron_h, nemotron_h.problems),
)


def architecture_of(family: Family, kind: str = MTP) -> GgufArchitecture:
    """Return the architecture of llama.cpp that runs a family.

    Args:
        kind: kind of the drafter.

    Raises:
        UserError: llama.cpp does not run the family.
    """
    name = (FAMILIES_RUN if kind == MTP else ARCHITECTURES | TRUNKS).get(family.name)
    if name is None:
        supported = ", ".join(sorted(FAMILIES_RUN))
        raise UserError(f"GGUF files are not supported for {family.name}", f"supported families: {supported}")
    return architecture_named(name)


def architecture_named(name: str) -> GgufArchitecture:
    """Return the architecture with a name.

    Raises:
        UserError: it is unknown.
    """
    for record in RECORDS:
        if record.name == name:
            return record
    raise UserError(f"general.architecture {clip(repr(name), 80)} is unknown", "write the file again")


def metadata_of(family: Family, hf_config: HfConfig, heads: int, kind: str = MTP) -> Metadata:
    """Return the metadata of a model, without those of the tokenizer.

    Args:
        heads: number of MTP heads.
        kind: kind of the drafter.

    Raises:
        UserError: llama.cpp does not support a setting of config.json.
    """
    architecture = architecture_of(family, kind)
    if problems := list(_problems(family, hf_config, heads, architecture)):
        raise UserError(f"llama.cpp does not support this {family.name} model:\n  " + "\n  ".join(problems))
    described = family.architecture(hf_config)
    metadata: Metadata = {
        "block_count": described.outside.num_layers + heads,
        "context_length": hf_config["max_position_embeddings"],
        "embedding_length": hf_config["hidden_size"],
        "feed_forward_length": hf_config.get("intermediate_size", 0),
        "attention.head_count": hf_config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(described.outside.mcore_config["layernorm_epsilon"]),
        "rope.freq_base": float(dense.rope_theta(hf_config) or 10000.0),
        "vocab_size": hf_config["vocab_size"],
    }
    grouped = [attention for attention in described.attentions if isinstance(attention, GroupedQueryAttention)]
    if grouped:
        metadata |= {
            "attention.head_count_kv": grouped[0].groups,
            "attention.key_length": grouped[0].head_dim,
            "attention.value_length": grouped[0].head_dim,
            "rope.dimension_count": grouped[0].rotary,
        }
    if heads:
        metadata["nextn_predict_layers"] = heads
    metadata |= rope_scaling(hf_config) | architecture.metadata(family, hf_config, heads)
    named = {f"{architecture.name}.{key}": value for key, value in metadata.items()}
    return {"general.architecture": architecture.name, **named}


def why_no_heads(family: Family, hf_config: HfConfig) -> str:
    """Return why llama.cpp does not run a model with an MTP head; empty if it does, or does not run the family."""
    if family.name not in FAMILIES_RUN:  # which another rule reports
        return ""
    return next(iter(_problems(family, hf_config, 1, architecture_of(family))), "")


def conversions_of(family: Family, hf_config: HfConfig, heads: int, architecture: GgufArchitecture) -> list[Conversion]:
    """Return all tensors of a model as Hugging Face and as GGUF tensors.

    Args:
        heads: number of MTP heads.
    """
    return [*conversions(family, hf_config, heads, architecture.naming), *architecture.constants(family, hf_config)]


def _problems(family: Family, hf_config: HfConfig, heads: int, architecture: GgufArchitecture) -> Iterator[str]:
    """Yield a line for each setting that llama.cpp does not support."""
    if heads and not architecture.has_heads:
        yield (
            f"MTP heads, which its architecture {architecture.name} does not have; export the run with --mtp strip, or "
            "use --infer_backend vllm or transformers"
        )
    elif heads > 1:
        yield f"{heads} MTP heads; only one is supported. With --mtp_unroll, one head drafts several tokens"
    has_windows = any(attention.window is not None for attention in family.architecture(hf_config).attentions)
    if has_windows and not architecture.has_windows:
        yield f"sliding_window {hf_config['sliding_window']}"
    if (kind := dense.rope_parameters(hf_config).get("rope_type", "default")) not in _ROPE_TYPES:
        yield f"rope_type {kind!r}; supported: {', '.join(_ROPE_TYPES)}"
    rope = dense.rope_parameters(hf_config)
    if rope.get("mscale") != rope.get("mscale_all_dim"):
        yield f"mscale {rope.get('mscale')} and mscale_all_dim {rope.get('mscale_all_dim')}; they must be equal"
    if rope.get("attention_factor") is not None:
        yield f"attention_factor {rope['attention_factor']} of rotary embeddings"
    if rope.get("truncate") is False:
        yield "truncate false of rotary embeddings"
    yield from architecture.problems(family, hf_config, heads)


def rope_scaling(hf_config: HfConfig) -> Metadata:
    """Return the keys, without the name of the architecture, of scaled rotary embeddings."""
    rope = dense.rope_parameters(hf_config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    metadata: Metadata = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or hf_config["max_position_embeddings"]
        metadata["rope.scaling.original_context_length"] = original
        for hf, gguf in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if hf in rope:
                metadata[f"rope.scaling.{gguf}"] = float(rope[hf])
    return metadata
