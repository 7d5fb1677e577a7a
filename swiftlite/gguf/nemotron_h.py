"""Describe a Nemotron-H for llama.cpp, whose graph is `nemotron_h_moe`, also for a model without experts.

Each layer has one norm and one of Mamba-2, attention, an MLP or experts. llama.cpp finds out which from two lists:
layers with attention have heads of keys, those with an MLP or experts a width. All layers with a width are of the same
kind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import Family
from swiftlite.families.layer import Layer
from swiftlite.families.mamba import Mamba2
from swiftlite.families.mlp import MixtureOfExperts, Mlp

HfConfig = Mapping[str, Any]


def metadata(family: Family, hf_config: HfConfig, heads: int) -> dict[str, Any]:
    """Return the keys that other architectures do not have, or have with other values, without those of experts."""
    architecture = family.architecture(hf_config)
    layers = [*architecture.layers, *[architecture.mtp_block] * heads]
    found: dict[str, Any] = {
        "attention.head_count_kv": [_groups(layer) for layer in layers],
        "feed_forward_length": [_width(layer) for layer in layers],
        "attention.layer_norm_epsilon": float(architecture.outside.mcore_config["layernorm_epsilon"]),
    }
    mamba = next((layer.attention for layer in layers if isinstance(layer.attention, Mamba2)), None)
    if mamba is not None:
        found |= {
            "ssm.conv_kernel": mamba.kernel,
            "ssm.inner_size": mamba.heads * mamba.head_dim,
            "ssm.state_size": mamba.state,
            "ssm.time_step_rank": mamba.heads,
            "ssm.group_count": mamba.groups,
        }
    return found


def problems(family: Family, hf_config: HfConfig, heads: int) -> Iterator[str]:
    """Yield a line for each setting that llama.cpp does not support."""
    layers = family.architecture(hf_config).layers
    kinds = {type(layer.mlp) for layer in layers if _width(layer)}
    if len(kinds) > 1:
        yield "layers with an MLP next to layers with experts"
    if not any(isinstance(layer.attention, Mamba2) for layer in layers):
        yield "no layer with Mamba-2"
    if heads and MixtureOfExperts not in kinds:
        yield "an MTP head of a model without experts; export the run with --mtp strip"


def _groups(layer: Layer) -> int:
    return layer.attention.groups if isinstance(layer.attention, GroupedQueryAttention) else 0


def _width(layer: Layer) -> int:
    return layer.mlp.ffn if isinstance(layer.mlp, Mlp | MixtureOfExperts) else 0
