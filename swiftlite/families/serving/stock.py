"""Draft classes of vLLM with which it runs heads of further families, without swiftlite's plugin.

vLLM has each class for one family. It reads the heads from a separate directory, whose config.json selects the class,
but all sizes from the config.json of the trunk; it shares the embedding and the output layer of the trunk. Dense heads
of other families compute the same, except for the embedding at position 0, which is zero in these classes. `sft
--draft_for vllm_stock` trains heads for this input, and the export writes the directory
(`engines/vllm/stock_draft.py`).

Counts of vLLM without plugins were compared with those of an independent reference for every supported family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from swiftlite.base.drafting import Drafting
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families import dense
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import Family
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp
from swiftlite.families.models.hy_v3 import HY_V3
from swiftlite.families.models.mimo import MIMO
from swiftlite.families.serving.convention import Convention

STOCK = "vllm_stock"
"""The name of these classes in --draft_for."""
DRAFTING = Drafting(zeroes_first_embedding=True)
_HEAD_LAYER = "mtp.layers.0.transformer_layer."


@dataclass(frozen=True)
class StockClass:
    """A draft class of vLLM.

    Attributes:
        family: the family that vLLM has the class for, which defines the names of tensors and modules.
        selected_by: keys of the heads' config.json with which vLLM selects the class.
        trunk_config: returns the keys of the trunk's config.json that the class reads in addition to those of all
            families.
    """

    family: Family
    selected_by: Mapping[str, Any]
    trunk_config: Callable[[HfConfig, GroupedQueryAttention], dict[str, Any]]

    @property
    def convention(self) -> Convention:
        """The convention with which vLLM runs the heads of other families with this class."""
        own = self.family.serving.vllm
        assert own is not None
        return replace(own, heads="one", drafting=DRAFTING)

    def rows(self, family: Family, hf_config: HfConfig) -> list[Row]:
        """Return the bridge rows of the single head of a model, with the names of this class.

        The Megatron names are those of `family.head_rows`.
        """
        layer = _head_layer(family, hf_config)
        attention = replace(_attention(layer), hf_is_fused=False)
        separate = replace(layer, attention=attention, mlp=dense.mlp(hf_config))
        block = lift(separate.rows(), _HEAD_LAYER, self.family.mtp.block(hf_config, 0))
        return self.family.mtp.frame_rows(hf_config, 0) + block


def _config_of_hy_v3(hf_config: HfConfig, attention: GroupedQueryAttention) -> dict[str, Any]:
    return {
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm,
        "first_k_dense_replace": hf_config["num_hidden_layers"] + 1,  # layers from this number on have experts
    }


HYV3_MTP = StockClass(HY_V3, {"model_type": "hy_v3", "architectures": ["HYV3ForCausalLM"]}, _config_of_hy_v3)
"""Without biases; the norms of queries and keys are optional."""
# MiMo's own model_type is in no release of transformers.
MIMO_MTP = StockClass(MIMO, {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}, lambda *_: {})
"""With biases of queries, keys and values."""


def convention(family: Family) -> Convention | None:
    """Return a convention with the inputs that these classes pass to heads; None for families whose heads vLLM runs
    without swiftlite's plugin anyway. Whether there is a class depends on config.json (`why_not`)."""
    known = family.serving.vllm
    if known is None or known.classes is None:
        return None
    return HYV3_MTP.convention


def why_not(family: Family, hf_config: HfConfig) -> str:
    """Return why no class runs the heads of a model; empty if one does."""
    if convention(family) is None:
        return "vLLM has a draft class for it, which does not need swiftlite's plugin"
    if family.vision is not None:
        return "the classes read its sizes from the top level of config.json"
    layer, layers = _head_layer(family, hf_config), family.architecture(hf_config).layers
    if layer.mlp.experts:
        return "the classes have no experts with its router"
    if layer.has_output_norms or not layer.has_input_norms:
        return "its layers normalize the outputs of attention and MLP"
    if not _is_common(layer):
        return "its attention or its MLP is of another kind"
    attention = _attention(layer)
    if not attention.rotary:
        return "its heads have no rotary embeddings"
    if any(other.attention.window != attention.window for other in layers):
        return "only some of its layers have a sliding window"
    if attention.qkv_bias and attention.heads * attention.head_dim != attention.hidden:
        return f"with biases, attention heads must have the size {attention.hidden // attention.heads}"
    return ""


def class_of(family: Family, hf_config: HfConfig) -> StockClass:
    """Return the class that runs the heads of a model, for which `why_not` is empty."""
    if _attention(_head_layer(family, hf_config)).qkv_bias:
        return MIMO_MTP
    return HYV3_MTP


def trunk_config(family: Family, hf_config: HfConfig) -> dict[str, Any]:
    """Return the keys of the trunk's config.json that its class reads, in addition to the number of heads."""
    attention = _attention(_head_layer(family, hf_config))
    return class_of(family, hf_config).trunk_config(hf_config, attention)


def with_draft(family: Family, hf_config: HfConfig) -> Family:
    """Return the family of a model whose heads are in a folder for such a class."""
    serving = replace(family.serving, vllm=class_of(family, hf_config).convention)
    return replace(family, mtp=replace(family.mtp, drafting=DRAFTING), serving=serving)


def factors(family: Family, hf_config: HfConfig) -> dict[str, float]:
    """Return the factors of the model that its class does not have, by the names of the tensors that are multiplied by
    them instead.

    The factor of embeddings is not among them, because a head normalizes its embeddings.
    """
    layer = _head_layer(family, hf_config)
    attention = _attention(layer)
    scores = 1.0 if attention.scale is None else attention.scale * sqrt(attention.head_dim)
    block = class_of(family, hf_config).family.mtp.block(hf_config, 0)
    return {
        f"{block}self_attn.q_proj.weight": scores,
        f"{block}self_attn.q_proj.bias": scores,
        f"{block}self_attn.o_proj.weight": layer.residual_multiplier,
        f"{block}mlp.down_proj.weight": layer.residual_multiplier,
    }


def _head_layer(family: Family, hf_config: HfConfig) -> Layer:
    return family.architecture(hf_config).mtp_block


def _attention(layer: Layer) -> GroupedQueryAttention:
    """Return the attention of a layer that `why_not` accepts."""
    assert isinstance(layer.attention, GroupedQueryAttention)
    return layer.attention


def _is_common(layer: Layer) -> bool:
    """Return whether a class has everything that the layer has."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, GroupedQueryAttention) or not isinstance(mlp, Mlp):
        return False
    common = GroupedQueryAttention(
        attention.hidden,
        attention.heads,
        attention.groups,
        attention.head_dim,
        attention.rotary,
        qkv_bias=attention.qkv_bias,
        qk_norm=attention.qk_norm and not attention.qkv_bias,
        window=attention.window,
        scale=attention.scale,
        hf_is_fused=attention.hf_is_fused,
    )
    return layer == Layer(
        common, Mlp(mlp.hidden, mlp.ffn, mlp.hf_is_fused), residual_multiplier=layer.residual_multiplier
    )
