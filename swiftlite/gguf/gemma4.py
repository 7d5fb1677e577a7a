"""Describe a Gemma 4 and its assistant for llama.cpp, whose graphs `gemma4` and `gemma4-assistant` have no options for
other models.

Layers with sliding windows have keys of their own in the metadata (`_swa`). A file has one tensor of rotary divisors,
which only full attention uses: channels that it does not rotate have a divisor so large that their angle is 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from swiftlite.families.architecture import Architecture
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.experts_and_mlp import ExpertsAndMlp
from swiftlite.families.family import Family
from swiftlite.families.gemma4_assistant import layers_of, reads_last_layers, text_config
from swiftlite.families.layer import Layer
from swiftlite.families.layer_types import KINDS
from swiftlite.families.mlp import Mlp
from swiftlite.gguf.tensors import Conversion
from swiftlite.gguf.transforms import Constant

HfConfig = Mapping[str, Any]
Metadata = dict[str, Any]
_NO_ROTATION = 1e30
_ROPE_TYPES = (("default",), ("default", "proportional"))
"""The supported types of rotary embeddings, in the order of `KINDS`."""


def trunk_metadata(family: Family, hf_config: HfConfig, heads: int) -> Metadata:
    """Return the keys of a trunk that other architectures do not have, or have with other values."""
    architecture = family.architecture(hf_config)
    mlps = [_dense(layer) for layer in architecture.layers]
    metadata: Metadata = {
        **_attention_metadata(architecture, architecture.layers),
        "feed_forward_length": [mlp.ffn for mlp in mlps],
        "embedding_length_per_layer_input": architecture.outside.own_inputs,
        # Without the key, llama.cpp takes a cap of its own; 0 stands for none.
        "final_logit_softcapping": float(architecture.outside.logits_cap or 0.0),
    }
    mlp = architecture.layers[0].mlp
    if isinstance(mlp, ExpertsAndMlp):
        metadata |= {
            "expert_count": mlp.experts,
            "expert_used_count": mlp.topk,
            "expert_feed_forward_length": mlp.mixture.ffn,
        }
    return metadata


def assistant_metadata(family: Family, hf_config: HfConfig) -> Metadata:
    """Return the keys of an assistant."""
    architecture, text = family.architecture(hf_config), text_config(hf_config)
    layers = layers_of(architecture, hf_config)
    return {
        "block_count": len(layers),
        "context_length": hf_config["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "embedding_length_out": hf_config["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(text.get("rms_norm_eps", hf_config["rms_norm_eps"])),
        "vocab_size": hf_config["vocab_size"],
        "nextn_predict_layers": len(layers),
        **_attention_metadata(architecture, layers),
    }


def constants(family: Family, hf_config: HfConfig) -> list[Conversion]:
    """Return the rotary divisors of full attention, which the files of trunk and assistant contain."""
    sizes = [kind.head_dim for kind in _attentions(family.architecture(hf_config).layers) if kind.window is None]
    rope = _ropes(family.architecture(hf_config))[1]
    share = rope.get("partial_rotary_factor", 1.0) if rope["rope_type"] == "proportional" else 1.0
    rotated = int(share * sizes[0] // 2)  # as transformers rounds it
    divisors = [float(rope.get("factor") or 1.0)] * rotated + [_NO_ROTATION] * (sizes[0] // 2 - rotated)
    return [Conversion((), ("rope_freqs.weight",), Constant(lambda: [torch.tensor(divisors)]))]


def why_no_assistant(family: Family, hf_config: HfConfig) -> str:
    """Return why llama.cpp does not draft with the assistant of a model; empty if it does."""
    if text_config(hf_config)["hidden_size"] == hf_config["hidden_size"]:
        return f"llama.cpp requires an assistant whose hidden_size is not that of its trunk, {hf_config['hidden_size']}"
    if not reads_last_layers(hf_config):
        return f"llama.cpp drafts with an assistant only if the last two of layer_types are {' and '.join(KINDS)}"
    if all(layer.attention.window is None for layer in layers_of(family.architecture(hf_config), hf_config)):
        return f"llama.cpp requires a layer with {KINDS[0]} in layer_types of the assistant"
    return ""


def _attention_metadata(architecture: Architecture, layers: Sequence[Layer]) -> Metadata:
    kinds = _attentions(layers)
    sliding = next(kind for kind in kinds if kind.window is not None)
    full = next((kind for kind in kinds if kind.window is None), sliding)
    of_sliding, of_full = _ropes(architecture)
    return {
        "attention.head_count_kv": [kind.groups for kind in kinds],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.sliding_window": sliding.window,
        "attention.sliding_window_pattern": [kind.window is not None for kind in kinds],
        "attention.shared_kv_layers": sum(kind.key_layer is not None for kind in kinds),
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "rope.freq_base": float(of_full["rope_theta"]),
        "rope.freq_base_swa": float(of_sliding["rope_theta"]),
    }


def problems(family: Family, hf_config: HfConfig, heads: int) -> Iterator[str]:
    """Yield a line for each setting that llama.cpp does not support."""
    architecture = family.architecture(hf_config)
    kinds = _attentions(architecture.layers)
    if all(kind.window is None for kind in kinds):
        yield f"layer_types has no {KINDS[0]!r}"
    own = [kind.window is None for kind in kinds if kind.key_layer is None]
    if len(own) < len(kinds) and own[-2:] != [False, True]:
        # Other layers read the cache of these two.
        last = " and ".join(KINDS)
        yield f"the last two layers with keys and values of their own (num_kv_shared_layers) are not {last}"
    for name, rope, known in zip(KINDS, _ropes(architecture), _ROPE_TYPES, strict=True):
        if rope["rope_type"] not in known:
            yield f"rope_type {rope['rope_type']!r} of {name}; supported: {', '.join(known)}"


def _ropes(architecture: Architecture) -> list[Mapping[str, Any]]:
    """Return the rotary settings of each kind of layer, in the order of `KINDS`."""
    return [rope["rope_parameters"] for rope in architecture.outside.ropes]


def _attentions(layers: Sequence[Layer]) -> list[GroupedQueryAttention]:
    return [layer.attention for layer in layers if isinstance(layer.attention, GroupedQueryAttention)]


def _dense(layer: Layer) -> Mlp:
    mlp = layer.mlp.dense if isinstance(layer.mlp, ExpertsAndMlp) else layer.mlp
    assert isinstance(mlp, Mlp)
    return mlp
