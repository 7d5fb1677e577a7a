"""Which module stands at which place of the model: megatron-core's local ones, with our attention and norm.

A family names the kinds of its layers (`families/layer.py`); here every kind has the modules that compute it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as McoreColumnParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from swiftlite.drafting import Drafting
from swiftlite.families.attention import GroupedQueryAttention, LatentAttention
from swiftlite.families.layer import Attention, Layer
from swiftlite.families.linear_attention import GatedDeltaNet as GatedDeltaNetSizes
from swiftlite.families.mlp import Mixture, Mlp
from swiftlite.model.attention import CoreAttention
from swiftlite.model.draft_attention import DraftAttention
from swiftlite.model.experts import SequentialMLP
from swiftlite.model.gated_delta_net import GatedDeltaNet
from swiftlite.model.mla import LatentRMSNorm, MLASelfAttention
from swiftlite.model.mtp import MultiTokenPredictionLayer, UnrolledLayer
from swiftlite.model.norm import KeepingRMSNorm, RMSNorm
from swiftlite.model.router import MoELayer, TopKRouter
from swiftlite.model.self_attention import SelfAttention
from swiftlite.model.swiglu import SwiGLU
from swiftlite.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from swiftlite.runtime.compat import MTP_INNER_LAYER


def _grouped_query(attention: GroupedQueryAttention, core_attention: type[CoreAttention]) -> ModuleSpec:
    qk_norm = RMSNorm if attention.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent(attention: LatentAttention, core_attention: type[CoreAttention]) -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            # megatron-core's own: it accepts no subclass here. There is no bias; these gradients go through autograd.
            linear_q_down_proj=McoreColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=McoreColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=LatentRMSNorm,
            kv_layernorm=LatentRMSNorm,
        ),
    )


def _gated_delta_net(sizes: GatedDeltaNetSizes, core_attention: type[CoreAttention]) -> ModuleSpec:
    return ModuleSpec(module=GatedDeltaNet, params={"sizes": sizes})


_GATED = MLPSubmodules(
    linear_fc1=ColumnParallelLinear,
    activation_func=SwiGLU,  # pyright: ignore[reportArgumentType]  # a class whose objects are called, as all it asks for
    linear_fc2=RowParallelLinear,
)


def _mlp(mlp: Mlp) -> ModuleSpec:
    return ModuleSpec(module=MLP, submodules=_GATED)


def _mixture(mixture: Mixture) -> ModuleSpec:
    """A router, one MLP per expert, and one for all shared experts."""
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=TopKRouter,
            experts=ModuleSpec(module=SequentialMLP, submodules=_GATED),
            # Built only where the config gives shared experts a width.
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_GATED),
        ),
    )


# The module of every kind that a family may name (`families/attention.py`, `families/mlp.py`).
ATTENTION_SPECS: dict[type, Callable[[Any, type[CoreAttention]], ModuleSpec]] = {
    GroupedQueryAttention: _grouped_query,
    LatentAttention: _latent,
    GatedDeltaNetSizes: _gated_delta_net,
}
MLP_SPECS: dict[type, Callable[[Any], ModuleSpec]] = {Mlp: _mlp, Mixture: _mixture}


def attention_spec(attention: Attention, core_attention: type[CoreAttention] = CoreAttention) -> ModuleSpec:
    """The module that computes a kind of attention."""
    return ATTENTION_SPECS[type(attention)](attention, core_attention)


def decoder_layer_spec(layer: Layer, core_attention: type[CoreAttention] = CoreAttention) -> ModuleSpec:
    """One decoder layer, of the kinds of attention and MLP that it names."""
    # Checkpoint names that megatron-core's other specs write too, so checkpoints can be exchanged; with other kinds of
    # attention those are the modules' own.
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention_spec(layer.attention, core_attention),
            # Functions here, as in megatron-core's own specs, though its annotation says class.
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=RMSNorm,
            mlp=MLP_SPECS[type(layer.mlp)](layer.mlp),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            sharded_state_dict_keys_map=names if isinstance(layer.attention, GroupedQueryAttention) else {},
        ),
    )


def decoder_spec(config: TransformerConfig, layers: Sequence[Layer], drafting: Drafting) -> TransformerBlockSubmodules:
    """The trunk, or the pipeline stage of it that holds these decoder layers."""
    norm = KeepingRMSNorm if config.mtp_num_layers and drafting.takes_before_norm else RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[decoder_layer_spec(layer) for layer in layers], layer_norm=ModuleSpec(module=norm)
    )


def mtp_spec(
    config: TransformerConfig, block: Layer, is_unrolled: bool = False
) -> MultiTokenPredictionBlockSubmodules | None:
    """`mtp_num_layers` heads; None at depth 0.

    Args:
        block: the decoder layer inside each head, `Architecture.mtp_block`.
    """
    if not config.mtp_num_layers:
        return None
    core_attention = DraftAttention if is_unrolled else CoreAttention
    layer = ModuleSpec(
        module=UnrolledLayer if is_unrolled else MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            layer_norm=RMSNorm,
            **{MTP_INNER_LAYER: decoder_layer_spec(block, core_attention)},
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)
