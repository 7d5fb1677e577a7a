"""Define the assistants of Gemma 4: small drafters whose attention reads keys and values of the trunk.

At position s, with h the trunk's state after its final norm, and the trunk's embedding with its factor:

    x = pre_projection [embedding of token s + 1; h]
    x = decoder layer of Gemma 4 (x), several of them, without keys and values of their own
    logits = output layer of the assistant (norm(x))

Assistants of E2B and E4B draft only tokens of the clusters that norm(x) selects (`model/loss/clusters.py`).

The query of each layer has position s. It sees the keys and values up to s of the trunk's last layer with the same kind
of attention, sliding or full. The next draft reads the embedding of token s + 2, and post_projection (norm(x)) as h;
its query and its keys are those of the first draft. So the assistant has no state of its own in an engine.

The model computes these keys and values from the inputs of the trunk's two layers (`Heads.features`) a second time.

An assistant is published in a directory of its own, whose config.json is kept under OWN_CONFIG_KEY. Its tensors have
the names of this directory, after `PREFIX`. That of the 12B is the same module with another `model_type`. In
transformers, queries have position s + 1 instead, and the window of sliding attention has one more token; here, both
are those of vLLM.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swiftlite.base.heads import DRAFTER_KEY, FEATURES_KEY, GEMMA4_ASSISTANT, OWN_CONFIG_KEY
from swiftlite.bridge.hf_config import OWN_PREFIXES
from swiftlite.bridge.join import PadEnd
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families.architecture import Architecture
from swiftlite.families.drafter import Drafter, DrafterSizes, layer_problems
from swiftlite.families.gemma4_layers import key_layers, kinds_of_layers, of_full_layers
from swiftlite.families.layer import Layer
from swiftlite.families.layer_types import FULL, WINDOW
from swiftlite.families.mlp import Mlp

if TYPE_CHECKING:
    from swiftlite.families.family import Family

KIND = GEMMA4_ASSISTANT
PREFIX = OWN_PREFIXES[KIND]
WRAPPED = ("gemma4", "gemma4_unified")
TRUNKS = ("gemma4_text", *WRAPPED)
_ACTIVATION = "gelu_pytorch_tanh"
_QKV = "linear_qkv.weight"
_NEW_LAYERS = (WINDOW, WINDOW, WINDOW, FULL)
"""Layers of a new assistant, as in published ones."""
_OF_TRUNK = (
    *("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window"),
    *("rope_parameters", "max_position_embeddings", "hidden_activation", "pad_token_id", "eos_token_id"),
    *("bos_token_id", "dtype", "torch_dtype", "initializer_range"),
)
"""Keys of the trunk's config.json that that of a new assistant has as well."""
_NEUTRAL = {
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "enable_moe_block": (False, None),
    "hidden_activation": (_ACTIVATION,),
    "hidden_size_per_layer_input": (0,),
    "use_double_wide_mlp": (False, None),
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window")


def published(own: HfConfig, hf_config: HfConfig) -> dict[str, Any]:
    """Return what the config.json of a trunk declares for an assistant in a directory of its own.

    Args:
        own: content of the files of this directory, by OWN_CONFIG_KEY and OWN_GENERATION_KEY.
        hf_config: content of the config.json of the trunk.
    """
    return {"kind": KIND, "layers": 1, FEATURES_KEY: _read_layers(hf_config), **own}


def declaration(hf_config: HfConfig) -> dict[str, Any]:
    """Return what config.json declares for a new assistant, which has no layer yet.

    It has the attention of the trunk, and a fifth of its hidden size, like published assistants.
    """
    hidden, of_12b = hf_config.get("hidden_size") or 0, hf_config.get("model_type") == "gemma4_unified"
    model_type, class_name = ("gemma4_unified", "Gemma4Unified") if of_12b else ("gemma4", "Gemma4")
    size = max(hidden // 5 // 64 * 64, 64)
    text = {key: hf_config[key] for key in _OF_TRUNK if key in hf_config}
    text |= {
        "model_type": f"{model_type}_text",
        "hidden_size": size,
        "intermediate_size": 4 * size,
        "num_hidden_layers": len(_NEW_LAYERS),
        "num_kv_shared_layers": len(_NEW_LAYERS),
        "layer_types": [*_NEW_LAYERS],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "tie_word_embeddings": True,
        **_of_full_layers(hf_config),
    }
    config = {
        "architectures": [f"{class_name}AssistantForCausalLM"],
        "model_type": f"{model_type}_assistant",
        "backbone_hidden_size": hidden,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        **{key: hf_config[key] for key in ("dtype", "torch_dtype") if key in hf_config},
        "text_config": text,
    }
    return {**published({OWN_CONFIG_KEY: config}, hf_config), "layers": 0}


def _of_full_layers(hf_config: HfConfig) -> dict[str, Any]:
    """Return the settings of full attention, with the keys of published files."""
    own = of_full_layers(hf_config)
    found = {"global_head_dim": own.get("head_dim"), "num_global_key_value_heads": own.get("num_key_value_heads")}
    found["attention_k_eq_v"] = "num_key_value_heads" in own or hf_config.get("attention_k_eq_v")
    return {key: value for key, value in found.items() if value is not None}


def _read_layers(hf_config: HfConfig) -> list[int]:
    """Return the numbers of the trunk's layers whose keys and values assistants read: those of the last one of each
    kind."""
    return sorted(dict(zip(kinds_of_layers(hf_config), key_layers(hf_config), strict=True)).values())


def reads_last_layers(hf_config: HfConfig) -> bool:
    """Return whether the last two layers of the trunk are of both kinds, as SGLang and llama.cpp require, whose
    assistants read the cache of these layers."""
    return tuple(kinds_of_layers(hf_config)[-2:]) == (WINDOW, FULL)


def text_config(hf_config: HfConfig) -> dict[str, Any]:
    """Return the settings of the assistant's layers."""
    return hf_config[DRAFTER_KEY][OWN_CONFIG_KEY]["text_config"]


def layers_of(architecture: Architecture, hf_config: HfConfig) -> list[Layer]:
    """Return the decoder layers of the assistant. Their attention is that of the layers whose keys they read, with
    other queries."""
    text, read_layers = text_config(hf_config), hf_config[DRAFTER_KEY][FEATURES_KEY]
    mlp = Mlp(text["hidden_size"], text["intermediate_size"], activation=_ACTIVATION)
    layers = []
    for index in features_read(hf_config):
        number = read_layers[index]
        read: Any = architecture.layers[number].attention
        own = replace(
            read,
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            window=None if read.window is None else text["sliding_window"],
            key_layer=number,
            keeps_keys=False,
        )
        layers.append(Layer(own, mlp, has_output_norms=True, has_scalar=True))
    return layers


def clusters_of(hf_config: HfConfig) -> dict[str, int]:
    """Return the number of tokens, of their clusters, and of clusters that are selected first; empty without clusters.

    Published assistants of E2B and E4B have clusters (`use_ordered_embeddings`).
    """
    own = hf_config[DRAFTER_KEY][OWN_CONFIG_KEY]
    if not own.get("use_ordered_embeddings"):
        return {}
    numbers = {"clusters": own.get("num_centroids", 2048), "selected": own.get("centroid_intermediate_top_k", 32)}
    return {"vocab": hf_config.get("vocab_size", 0), **numbers}


def features_read(hf_config: HfConfig) -> list[int]:
    """Return, for each layer of the assistant, the index in `Heads.features` of the layer whose keys it reads."""
    kinds = kinds_of_layers(hf_config)
    of_kind = {kinds[layer]: index for index, layer in enumerate(hf_config[DRAFTER_KEY][FEATURES_KEY])}
    return [of_kind[kind] for kind in kinds_of_layers(text_config(hf_config))]


def why_not(family: "Family", hf_config: HfConfig) -> str:
    """Return why a model cannot have this assistant; empty if it can."""
    text = text_config(hf_config)
    keys = ("head_dim", "num_key_value_heads", "rope_parameters")
    differing = [key for key in keys if text.get(key) != hf_config.get(key)]
    own, trunk = _of_full_layers(text), _of_full_layers(hf_config)
    if FULL in kinds_of_layers(text):
        differing += [
            key for key in ("global_head_dim", "num_global_key_value_heads") if own.get(key) != trunk.get(key)
        ]
    if differing:
        return f"{differing[0]} of the assistant is not that of the trunk, whose keys it reads"
    for attention in (layer.attention for layer in layers_of(family.architecture(hf_config), hf_config)):
        if text["num_attention_heads"] % getattr(attention, "groups", 1):
            return "num_attention_heads of the assistant is not a multiple of the trunk's heads of keys"
    return ""


def own_config(family: "Family", hf_config: HfConfig) -> dict[str, Any]:
    """Return the config.json of the assistant's directory, as transformers and vLLM read it."""
    return dict(hf_config[DRAFTER_KEY][OWN_CONFIG_KEY])


def _rows(family: "Family", hf_config: HfConfig, layer: int) -> list[Row]:
    hidden, text = hf_config["hidden_size"], text_config(hf_config)
    size = text["hidden_size"]
    embedding = {"model.embed_tokens.weight": (hf_config["vocab_size"], size)}
    rows = [
        Row("pre_projection.weight", {"pre_projection.weight": (size, 2 * hidden)}),
        Row("post_projection.weight", {"post_projection.weight": (hidden, size)}),
        Row("final_layernorm.weight", {"model.norm.weight": (size,)}),
        Row("output_layer.weight", embedding, PadEnd()),
    ]
    if clusters := clusters_of(hf_config):
        centroids = {"masked_embedding.centroids.weight": (clusters["clusters"], size)}
        tokens = {"masked_embedding.token_ordering": (clusters["vocab"],)}
        rows.append(Row("clusters.centroids.weight", centroids))
        rows.append(Row("clusters.token_ordering", tokens, is_frozen=True, is_integer=True))
    for number, own in enumerate(layers_of(family.architecture(hf_config), hf_config)):
        rows += lift(_trained(own.rows()), f"decoder_layer_{number}.", f"model.layers.{number}.")
    return lift(rows, f"mtp.layers.{layer}.", PREFIX)


def _trained(rows: list[Row]) -> list[Row]:
    """Return the bridge rows of a layer whose number (`Layer.has_scalar`) is not a copy: that of a new layer is 1.
    Buffers are never trained."""
    return [replace(row, is_frozen=False) for row in rows]


def _sizes(family: "Family", hf_config: HfConfig, drafts: int) -> DrafterSizes:
    hidden, size = hf_config["hidden_size"], text_config(hf_config)["hidden_size"]
    architecture = family.architecture(hf_config)
    features = hf_config[DRAFTER_KEY][FEATURES_KEY]
    read = itertools.chain.from_iterable(architecture.layers[number].matrices for number in features)
    return DrafterSizes(
        rows=_rows(family, hf_config, 0),
        layers=layers_of(architecture, hf_config),
        passes=drafts,
        queries=1,
        exceptions={"embed_tokens.": 0},
        # Inputs of both projections and of the output norm, and scores of clusters with their logarithms in float32.
        stored=drafts * (2 * hidden + 2 * size + 4 * clusters_of(hf_config).get("clusters", 0)),
        output=0,
        own_output=size,
        read_macs=sum(size_out * size_in for name, size_out, size_in in read if name.endswith(_QKV)),
    )


def _problems(hf_config: HfConfig) -> list[str]:
    if hf_config.get("model_type") not in TRUNKS:
        return ["the model is not a Gemma 4"]
    declared = hf_config[DRAFTER_KEY]
    config = declared.get(OWN_CONFIG_KEY)
    text = config.get("text_config") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(text, dict):
        return [f"{OWN_CONFIG_KEY} is not the config.json of an assistant"]
    problems = [f"{key} is missing" for key in _SIZES if not isinstance(text.get(key), int) or text[key] < 1]
    for key, values in _NEUTRAL.items():
        if text.get(key) not in values:
            problems.append(f"{key} {text.get(key)!r} is not supported; it can only be {values[0]!r}")
    problems += _cluster_problems(hf_config)
    if not config.get("tie_word_embeddings", True):
        problems.append("tie_word_embeddings is not true")
    for key, found, wanted in (
        ("backbone_hidden_size", config.get("backbone_hidden_size"), hf_config.get("hidden_size")),
        ("vocab_size", text.get("vocab_size"), hf_config.get("vocab_size")),
    ):
        if found != wanted:
            problems.append(f"{key} {found!r} is not that of the trunk, {wanted!r}")
    kinds = text.get("layer_types")  # transformers changes the kind of the last layer where it is not stated
    if not isinstance(kinds, list) or len(kinds) != text.get("num_hidden_layers"):
        problems.append("layer_types does not list the kind of each layer")
    elif not all(kind in kinds_of_layers(hf_config) for kind in kinds):
        problems.append("layer_types has a kind that the trunk does not have")
    if declared.get(FEATURES_KEY) != _read_layers(hf_config):
        problems.append(f"{FEATURES_KEY} are not the last layers of each kind, {_read_layers(hf_config)}")
    return problems + layer_problems(hf_config)


def _cluster_problems(hf_config: HfConfig) -> list[str]:
    clusters = clusters_of(hf_config)
    if not clusters:
        return []
    vocab, number, selected = clusters.values()
    if type(vocab) is not int:  # which another check reports
        return []
    if type(number) is not int or number < 1 or vocab % number:
        return [f"num_centroids {number!r} does not divide the vocabulary of {vocab} tokens"]
    if type(selected) is not int or not 1 <= selected <= number:
        return [f"centroid_intermediate_top_k {selected!r} is not between 1 and num_centroids {number}"]
    return []


ASSISTANT = Drafter(
    rows=_rows,
    layer_of=lambda family, hf_config, hf_key: 0 if hf_key.startswith(PREFIX) else None,
    problems=_problems,
    why_not=why_not,
    own_config=own_config,
    sizes=_sizes,
    own_prefix=PREFIX,
    published=published,
    vllm_trunks=TRUNKS,
    sglang_trunks=WRAPPED,  # SGLang does not read the config.json of a text model as transformers 5.19 does
    llamacpp_trunks=dict.fromkeys(TRUNKS, "gemma4"),
    vllm_method="mtp",
    sglang_method="nextn",
)
