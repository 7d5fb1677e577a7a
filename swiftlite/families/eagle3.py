"""Define EAGLE-3, a drafter with one decoder layer of Llama, and its version 3.1.

At position s, with u_n the input of the trunk's decoder layer n, for the layers in `Heads.features`:

    g = fc [u_a; u_b; u_c]        3.1 (`fc_norm`): each u is normalized first
    x = g + attention([input_layernorm(embedding of token s + 1); hidden_norm(g)])
    x = x + mlp(post_attention_layernorm(x))
    logits = output layer of the trunk (norm(x))

Queries, keys and values are projected from both normalized inputs, 2H numbers. The next step at s + 1 reads x as g; in
3.1 (`norm_output`), it reads norm(x). Otherwise steps are those of an unrolled MTP layer (`model/mtp.py`).

Names of tensors are those of published drafters (`LlamaForCausalLMEagle3` in vLLM and SGLang).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import DRAFTER_KEY, FEATURES_KEY, Heads
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families.architecture import Architecture
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.drafter import Drafter, DrafterSizes, layer_problems
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp

if TYPE_CHECKING:
    from swiftlite.families.family import Family

KIND = "eagle3"
FLAGS = ("fc_norm", "norm_output")
"""Keys of the drafter in config.json, and of its own config.json: whether features are normalized, and whether a step
reads the previous step's state after the output norm."""
_PREFIXES = ("fc.", "fc_norm.", "midlayer.", "norm.")
_BLOCK = "transformer_layer."
_OF_TRUNK = (
    *("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings", "rope_theta"),
    *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "dtype", "torch_dtype"),
)
"""Keys of the trunk's config.json that that of the drafter has as well."""
VLLM_TRUNKS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "granite", "phi3", "seed_oss", "smollm3", "olmo2")
"""Families whose trunk returns the inputs of its decoder layers in vLLM (its `SupportsEagle3`)."""
SGLANG_TRUNKS = ("llama", "qwen2", "qwen3")
"""Families whose trunk returns the outputs of its decoder layers in SGLang, and that tests run there."""
LLAMACPP_TRUNKS = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
"""Families whose graph in llama.cpp keeps the inputs of decoder layers, which that of Qwen2 does not, and its name."""


def declaration(hf_config: HfConfig, *, is_normed: bool) -> dict[str, Any]:
    """Return what config.json declares for a new drafter, which has no layer yet.

    Args:
        is_normed: whether it is version 3.1.
    """
    num_layers = hf_config["num_hidden_layers"]
    features = range(max(num_layers - 3, 0), num_layers)
    if num_layers >= 7:  # as in published drafters, and vLLM's default
        features = (2, num_layers // 2, num_layers - 3)
    return {"kind": KIND, "layers": 0, FEATURES_KEY: [*features], **dict.fromkeys(FLAGS, is_normed)}


def is_set(hf_config: HfConfig, flag: str) -> bool:
    """Return the value of one of FLAGS."""
    return bool(hf_config[DRAFTER_KEY].get(flag))


def layer_of(architecture: Architecture, hf_config: HfConfig) -> Layer:
    """Return the decoder layer, with the sizes of the trunk. Queries, keys and values have twice its inputs."""
    of_trunk = next(filter(_is_rotary, architecture.attentions))
    hidden, size = of_trunk.hidden, of_trunk.head_dim
    attention = GroupedQueryAttention(hidden, of_trunk.heads, of_trunk.groups, size, rotary=size)
    return Layer(attention, Mlp(hidden, hf_config["intermediate_size"]))


def why_not(family: "Family", hf_config: HfConfig) -> str:
    """Return why a model cannot have this drafter; empty if it can."""
    outside, attentions = family.outside(hf_config), family.architecture(hf_config).attentions
    if family.vision is not None or family.language_model:
        return "it is a vision-language model"
    if outside.mcore_config.get("activation_func") != "silu" or family.norm_start != 1:
        return "its activation or its norms are not those of Llama"
    if not isinstance(hf_config.get("intermediate_size"), int):
        return "config.json has no intermediate_size"
    if outside.ropes or not any(map(_is_rotary, attentions)):
        return "its rotary embeddings are not those of Llama"
    return ""


def own_config(family: "Family", hf_config: HfConfig) -> dict[str, Any]:
    """Return the config.json of the drafter in a directory of its own, as vLLM and SGLang read it.

    For vLLM, the numbers of layers have the same meaning as `Heads.features`: u[n] is the input of layer n. SGLang
    reads only those in `eagle_config`, which vLLM does not read next to the others, and takes the output of layer n.
    """
    heads, architecture = Heads.from_config(hf_config), family.architecture(hf_config)
    scale: dict[str, float] = {}
    if architecture.outside.logits_divisor != 1:  # vLLM's class does not read the trunk's key for it
        scale["logit_scale"] = 1 / architecture.outside.logits_divisor
    # Drafters are trained with the trunk's factor of embeddings, but vLLM shares the embedding without it. After
    # `input_layernorm`, the factor has no effect, except for rms_norm_eps in this norm.
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **sizes_of(architecture, hf_config),
        "num_hidden_layers": 1,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": [*heads.features],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in heads.features]},
        "num_aux_hidden_states": len(heads.features),
        **{flag: is_set(hf_config, flag) for flag in FLAGS},
        **scale,
    }


def sizes_of(architecture: Architecture, hf_config: HfConfig) -> dict[str, Any]:
    """Return what the config.json of a drafter with the sizes of the trunk and layers without biases declares."""
    attention: Any = layer_of(architecture, hf_config).attention
    return {
        **{key: hf_config[key] for key in _OF_TRUNK if key in hf_config},
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        # None: the output layer of the trunk. With a number, SGLang would expect an output layer in the files.
        "draft_vocab_size": len(Heads.from_config(hf_config).draft_vocab) or None,
    }


def _is_rotary(attention: Any) -> TypeGuard[GroupedQueryAttention]:
    """Return whether attention rotates whole heads as in Llama."""
    is_grouped = isinstance(attention, GroupedQueryAttention)
    return is_grouped and attention.rotary == attention.head_dim and not attention.rope_interleave


def _rows(family: "Family", hf_config: HfConfig, layer: int) -> list[Row]:
    hidden, num_features = hf_config["hidden_size"], len(hf_config[DRAFTER_KEY][FEATURES_KEY])
    norms = {
        "final_layernorm": "norm",
        f"{_BLOCK}input_layernorm.embedding_norm": "midlayer.input_layernorm",
        f"{_BLOCK}input_layernorm.state_norm": "midlayer.hidden_norm",
    }
    if is_set(hf_config, "fc_norm"):
        norms |= {f"fc_norm.{number}": f"fc_norm.{number}" for number in range(num_features)}
    rows = [Row("fc.weight", {"fc.weight": (hidden, num_features * hidden)})]
    rows += [Row(f"{mcore}.weight", {f"{hf}.weight": (hidden,)}) for mcore, hf in norms.items()]
    for row in lift(layer_of(family.architecture(hf_config), hf_config).rows(), _BLOCK, "midlayer."):
        if row.mcore == f"{_BLOCK}self_attention.linear_qkv.weight":
            row = replace(row, hf={key: (size, 2 * hidden) for key, (size, _) in row.hf.items()})
        if row.mcore != f"{_BLOCK}input_layernorm.weight":
            rows.append(row)
    return lift(rows, f"mtp.layers.{layer}.", "")


def _sizes(family: "Family", hf_config: HfConfig, drafts: int) -> DrafterSizes:
    hidden, num_features = hf_config["hidden_size"], len(hf_config[DRAFTER_KEY][FEATURES_KEY])
    return DrafterSizes(
        rows=_rows(family, hf_config, 0),
        layers=[layer_of(family.architecture(hf_config), hf_config)],
        passes=drafts,
        queries=1,
        exceptions={"fc.weight": 1},
        # The features, before their norms too; of each draft: the two normalized inputs, one more than in the layer,
        # and the input of the output norm.
        stored=num_features * hidden * (1 + is_set(hf_config, "fc_norm")) + drafts * 4 * hidden,
        output=hidden,
    )


def _problems(hf_config: HfConfig) -> list[str]:
    declared = hf_config[DRAFTER_KEY]
    problems = [f"{flag} is not true or false" for flag in FLAGS if not isinstance(declared.get(flag, False), bool)]
    if not declared.get(FEATURES_KEY):
        problems.append(f"{FEATURES_KEY} is missing")
    return problems + layer_problems(hf_config)


EAGLE3 = Drafter(
    rows=_rows,
    layer_of=lambda family, hf_config, hf_key: 0 if hf_key.startswith(_PREFIXES) else None,
    drafting=lambda family, hf_config: Drafting(recycles_before_norm=not is_set(hf_config, "norm_output")),
    problems=_problems,
    why_not=why_not,
    own_config=own_config,
    sizes=_sizes,
    vllm_trunks=VLLM_TRUNKS,
    sglang_trunks=SGLANG_TRUNKS,
    llamacpp_trunks=LLAMACPP_TRUNKS,
)
