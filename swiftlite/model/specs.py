"""Which module stands at which place of the model: megatron-core's local ones, with our attention and norm."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as McoreColumnParallelLinear
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
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

from swiftlite.families.drafting import Drafting
from swiftlite.model.attention import CoreAttention
from swiftlite.model.draft_attention import DraftAttention
from swiftlite.model.experts import SequentialMLP
from swiftlite.model.linear import ColumnParallelLinear
from swiftlite.model.mla import LatentRMSNorm, MLASelfAttention
from swiftlite.model.mtp import MultiTokenPredictionLayer, UnrolledLayer
from swiftlite.model.norm import KeepingRMSNorm, RMSNorm
from swiftlite.model.router import TopKRouter
from swiftlite.runtime.compat import MTP_INNER_LAYER


def _mlp_spec(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """A gated MLP, or a mixture of such: a router, one MLP per expert, and one for all shared experts."""
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if not is_moe:
        return ModuleSpec(module=MLP, submodules=mlp)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=TopKRouter,
            experts=ModuleSpec(module=SequentialMLP, submodules=mlp),
            # Built only where the config gives shared experts a width.
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=mlp),
        ),
    )


def is_moe_layer(config: TransformerConfig, layer: int) -> bool:
    """Whether decoder layer number `layer` (from 0) has experts."""
    if config.num_moe_experts is None:
        return False
    assert isinstance(config.moe_layer_freq, list)  # families state every layer
    return bool(config.moe_layer_freq[layer])


def decoder_layer_spec(
    config: TransformerConfig, is_moe: bool, core_attention: type[CoreAttention] = CoreAttention
) -> ModuleSpec:
    """One decoder layer: attention, and a dense gated MLP or a mixture of experts."""
    # Checkpoint names that megatron-core's other specs write too, so checkpoints can be exchanged; with latent
    # attention those are the modules' own.
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_spec(config, core_attention),
            # Functions here, as in megatron-core's own specs, though its annotation says class.
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp_spec(config, is_moe),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            sharded_state_dict_keys_map={} if config.multi_latent_attention else names,
        ),
    )


def _attention_spec(config: TransformerConfig, core_attention: type[CoreAttention]) -> ModuleSpec:
    """Grouped-query attention, or multi-latent attention if the config says so."""
    if config.multi_latent_attention:
        return ModuleSpec(
            module=MLASelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=ColumnParallelLinear,
                # megatron-core's own: it accepts no subclass here. There is no bias, so ours would do the same.
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
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
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


def decoder_spec(config: TransformerConfig, first: int, count: int, drafting: Drafting) -> TransformerBlockSubmodules:
    """The trunk, or the pipeline stage of it that holds `count` decoder layers from number `first` (from 0) on."""
    layers = [decoder_layer_spec(config, is_moe_layer(config, layer)) for layer in range(first, first + count)]
    norm = KeepingRMSNorm if config.mtp_num_layers and drafting.takes_before_norm else RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ModuleSpec(module=norm))


def mtp_spec(config: TransformerConfig, is_unrolled: bool = False) -> MultiTokenPredictionBlockSubmodules | None:
    """`mtp_num_layers` heads, each with a block like the decoder's last; None at depth 0."""
    if not config.mtp_num_layers:
        return None
    is_moe = is_moe_layer(config, config.num_layers - 1)
    layer = ModuleSpec(
        module=UnrolledLayer if is_unrolled else MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            layer_norm=RMSNorm,
            **{MTP_INNER_LAYER: decoder_layer_spec(config, is_moe, DraftAttention if is_unrolled else CoreAttention)},
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)
