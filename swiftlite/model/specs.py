"""Select the modules of each part of the model.

A family (model architecture) specifies the kind of each layer (`families/layer.py`). This module maps each kind to
modules, built from the classes that `kernels.py` selects.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
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
from torch import nn

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import MTP, MTP_FEATURES
from swiftlite.families import dflash, eagle3, gemma4_assistant
from swiftlite.families.absent import NoAttention, NoMlp
from swiftlite.families.attention import GroupedQueryAttention, LatentAttention
from swiftlite.families.experts_and_mlp import ExpertsAndMlp
from swiftlite.families.layer import Attention, Layer
from swiftlite.families.linear_attention import GatedDeltaNet as GatedDeltaNetSizes
from swiftlite.families.mamba import Mamba2 as Mamba2Sizes
from swiftlite.families.mlp import CLAMPED_SWIGLU, RELU2, MixtureOfExperts, Mlp
from swiftlite.families.vision import Qwen2_5Vision, Qwen3Vision
from swiftlite.model.attention.block_attention import BlockAttention
from swiftlite.model.attention.gated_delta_net import GatedDeltaNet
from swiftlite.model.attention.mamba2 import Mamba2
from swiftlite.model.attention.mla import MLASelfAttention, latent_norm
from swiftlite.model.attention.self_attention import SelfAttention, with_channels
from swiftlite.model.attention.shared_keys import KeepingAttention, ReadingAttention
from swiftlite.model.attention.sparse import SparseAttention, sparse_core
from swiftlite.model.dflash import DFlashLayer
from swiftlite.model.drafter import DrafterParts
from swiftlite.model.eagle3 import Eagle3Layer, PairNorm, add_to_state
from swiftlite.model.gemma4_assistant import AssistantLayer
from swiftlite.model.layers.deepstack import DeepstackLayer
from swiftlite.model.layers.experts_and_mlp import ExpertsAndMLP, NormedRouter
from swiftlite.model.layers.kernels import Modules, modules_of
from swiftlite.model.layers.latent_experts import LatentMoELayer
from swiftlite.model.layers.limited_mlp import LimitedMLP, LimitedSharedExpertMLP
from swiftlite.model.layers.norm import DeferredRMSNorm, FusedRMSNorm, SharedNorm
from swiftlite.model.layers.output_norms import OutputNormsLayer
from swiftlite.model.layers.own_inputs import OwnInputLayer
from swiftlite.model.layers.residual import ResidualLayer, ResidualRMSNorm
from swiftlite.model.layers.router import BiasedSoftmaxRouter, Float32Router, MoELayer, TopKRouter
from swiftlite.model.layers.swiglu import ClampedSwiGLU, GeGLU, SquaredReLU, SwiGLU, limited_swiglu
from swiftlite.model.mtp import MultiTokenPredictionLayer, UnrolledLayer
from swiftlite.model.mtp_features import FeatureProjection, StateNorms
from swiftlite.model.vision import VisionTransformer
from swiftlite.plan.kernels import Kernels
from swiftlite.runtime.compat import MTP_INNER_LAYER

LOCAL = modules_of(Kernels())
"""The classes of layers for a CPU."""


def _grouped_query(attention: GroupedQueryAttention, modules: Modules) -> ModuleSpec:
    q_norm = k_norm = modules.norm if attention.qk_norm else IdentityOp
    if q_norm is FusedRMSNorm and attention.rotary > 0 and not attention.rope_interleave:
        # `fused_norm_and_rotate` computes the norm and the rotation of a head in one kernel.
        q_norm = k_norm = DeferredRMSNorm
    # Identities, because `SelfAttention` normalizes all heads together (`has_joint_norms`).
    if attention.qk_norm_is_joint:
        q_norm = k_norm = IdentityOp
    core_attention = modules.core_attention
    options = {"window": attention.window, "has_sinks": attention.has_sinks}
    v_head_dim = attention.v_head_dim or attention.head_dim
    if v_head_dim != attention.head_dim:
        options |= {"k_channels": attention.head_dim, "v_channels": v_head_dim}
    # A copy, because all layers share the spec in `modules`.
    core_attention = replace(core_attention, params=core_attention.params | options)
    params: dict[str, Any] = {
        "attn_mask_type": AttnMaskType.causal,
        "sizes": {name: attention.mcore_config()[name] for name in attention.layer_arguments},
        "query_size": attention.head_dim,
        "value_scale": attention.value_scale,
        "keys_are_values": attention.keys_are_values,
        "value_norm": attention.value_norm,
        "has_joint_norms": attention.qk_norm_is_joint,
        "is_rotary": attention.rotary > 0,
        "rope_interleave": attention.rope_interleave,
    }
    if attention.rope is not None:
        start = attention.rope_start
        if start is None:
            start = attention.rope * attention.rotary
        params["rope"] = slice(start, start + attention.rotary)
    if attention.head_gate:
        # Never in low precision: its kernels require sizes that are multiples of 16.
        params["head_gate"] = LOCAL.column
    module, column = SelfAttention, modules.column
    if attention.keeps_keys:
        module = KeepingAttention
    if attention.key_layer is not None:
        # A projection to queries only: keys and values are those of `key_layer`.
        module, column = ReadingAttention, with_channels(column, None, attention.heads * attention.head_dim)
        params |= {"key_layer": attention.key_layer, "keys_are_values": False, "value_norm": False}
        k_norm = IdentityOp
    return ModuleSpec(
        module=module,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=core_attention,
            linear_proj=modules.row,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def _latent(attention: LatentAttention, modules: Modules) -> ModuleSpec:
    norm = latent_norm(modules.norm)
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    module, core_attention = MLASelfAttention, modules.core_attention
    if attention.indexer is not None:
        # The same kernels, in a class that also computes calls of a `SparseAttention`.
        module, core_attention = SparseAttention, replace(core_attention, module=sparse_core(core_attention.module))
        params["sizes"] = attention.indexer
    return ModuleSpec(
        module=module,
        params=params,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=modules.column,
            linear_q_down_proj=modules.down_projection,
            linear_q_up_proj=modules.column,
            linear_kv_down_proj=modules.down_projection,
            linear_kv_up_proj=modules.column,
            core_attention=core_attention,
            linear_proj=modules.row,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _absent(half: NoAttention | NoMlp, modules: Modules) -> ModuleSpec:
    return ModuleSpec(module=IdentityOp)


# Names of transformers, except the last.
_ACTIVATIONS: dict[str, Any] = {
    "silu": SwiGLU,
    "gelu_pytorch_tanh": GeGLU,
    CLAMPED_SWIGLU: ClampedSwiGLU,
    RELU2: SquaredReLU,
}


def _matrices(modules: Modules, activation: str = "silu", limit: float | None = None) -> MLPSubmodules:
    # megatron-core builds the activation from this class and calls the object. With fused activations it is not used
    # (`build_config`).
    activation_func = _ACTIVATIONS[activation]
    if limit is not None:
        activation_func = limited_swiglu(limit)
    return MLPSubmodules(linear_fc1=modules.column, activation_func=activation_func, linear_fc2=modules.row)


def _mlp(mlp: Mlp, modules: Modules) -> ModuleSpec:
    module = MLP if mlp.limit is None else LimitedMLP
    submodules = _matrices(modules, mlp.activation, mlp.limit)
    # megatron-core's MLP builds this matrix with the width of the config, in which layers can differ.
    submodules.linear_fc2 = with_channels(modules.row, mlp.ffn)
    return ModuleSpec(module=module, params={"ffn_hidden_size": mlp.ffn}, submodules=submodules)


def _experts_and_mlp(both: ExpertsAndMlp, modules: Modules) -> ModuleSpec:
    spec: Any = _mixture(both.mixture, modules)
    spec.submodules.router = NormedRouter
    params = {"dense": _mlp(both.dense, modules), "norm": modules.norm}
    return ModuleSpec(module=ExpertsAndMLP, params=params, submodules=spec.submodules)


def _mixture(mixture: MixtureOfExperts, modules: Modules) -> ModuleSpec:
    """Return the spec of a mixture of experts: a router, one MLP per expert, and one MLP for all shared experts.

    Experts always use torch's linear layers, because calling other kernels for each expert costs more time than it
    saves.
    """
    experts = replace(modules, column=LOCAL.column, row=LOCAL.row)
    router: type[TopKRouter] = TopKRouter
    if mixture.biases_softmax:
        router = BiasedSoftmaxRouter
    elif mixture.router_is_float32:
        router = Float32Router
    shared_experts = SharedExpertMLP if mixture.shared_limit is None else LimitedSharedExpertMLP
    module, latent = (LatentMoELayer, {"latent": mixture.latent}) if mixture.latent else (MoELayer, {})
    return ModuleSpec(
        module=module,
        params=latent,
        submodules=MoESubmodules(
            router=router,
            experts=ModuleSpec(
                module=modules.experts,
                params=latent,
                submodules=_matrices(experts, mixture.activation, mixture.limit),
            ),
            # Built only if the config defines a size of shared experts.
            shared_experts=ModuleSpec(
                module=shared_experts, submodules=_matrices(modules, mixture.activation, mixture.shared_limit)
            ),
        ),
    )


# The modules of all kinds of attention (`families/attention.py`) and MLP (`families/mlp.py`).
ATTENTION_SPECS: dict[type, Callable[[Any, Modules], ModuleSpec]] = {
    GroupedQueryAttention: _grouped_query,
    LatentAttention: _latent,
    GatedDeltaNetSizes: lambda sizes, modules: ModuleSpec(module=GatedDeltaNet, params={"sizes": sizes}),
    Mamba2Sizes: lambda sizes, modules: ModuleSpec(module=Mamba2, params={"sizes": sizes}),
    NoAttention: _absent,
}
MLP_SPECS: dict[type, Callable[[Any, Modules], ModuleSpec]] = {
    Mlp: _mlp,
    MixtureOfExperts: _mixture,
    ExpertsAndMlp: _experts_and_mlp,
    NoMlp: _absent,
}


# Constructors of the modules of all kinds of towers (`families/tower.py`). A module maps the items of a micro-batch by
# name (`Batch.items`) to one output per item, [I, H].
TOWERS: dict[type, Callable[[Any, TransformerConfig], nn.Module]] = {
    Qwen3Vision: VisionTransformer,
    Qwen2_5Vision: VisionTransformer,
}


def attention_spec(attention: Attention, modules: Modules = LOCAL) -> ModuleSpec:
    """Return the module that computes a kind of attention."""
    return ATTENTION_SPECS[type(attention)](attention, modules)


def decoder_layer_spec(
    layer: Layer, modules: Modules = LOCAL, layer_class: type[TransformerLayer] = ResidualLayer
) -> ModuleSpec:
    """Return the spec of one decoder layer, with the kinds of attention and MLP that it names."""
    # Names in checkpoints as in megatron-core's specs, so that checkpoints are interchangeable. Other kinds of
    # attention use their own names.
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    if not isinstance(layer.attention, GroupedQueryAttention):
        names = {}
    add_residual = get_bias_dropout_add
    if layer.residual_multiplier != 1:
        add_residual = scaled_residual(layer.residual_multiplier)
    params: dict[str, Any] = {}
    if layer.has_output_norms:
        layer_class, params = OutputNormsLayer, {"norm": modules.norm, "has_scalar": layer.has_scalar}
    if layer.own_input:
        layer_class, params = OwnInputLayer, params | {"input_size": layer.own_input}
    norm = modules.norm if layer.has_input_norms else IdentityOp
    is_whole = layer.norms_attention_input and layer.norms_mlp_input
    # `ResidualLayer._forward_fused` adds outputs as they are, without a norm or a factor of their own.
    if norm is FusedRMSNorm and is_whole and not layer.has_output_norms and layer.residual_multiplier == 1:
        norm = ResidualRMSNorm
    return ModuleSpec(
        module=layer_class,
        params=params,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if layer.norms_attention_input else IdentityOp,
            self_attention=attention_spec(layer.attention, modules),
            # Functions as in megatron-core's specs, although the annotation requires a class.
            self_attn_bda=IdentityFuncOp if isinstance(layer.attention, NoAttention) else add_residual,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=norm if layer.norms_mlp_input else IdentityOp,
            mlp=MLP_SPECS[type(layer.mlp)](layer.mlp, modules),
            mlp_bda=IdentityFuncOp if isinstance(layer.mlp, NoMlp) else add_residual,  # pyright: ignore[reportArgumentType]
            sharded_state_dict_keys_map=names,
        ),
    )


def scaled_residual(multiplier: float) -> Callable[..., Callable[..., torch.Tensor]]:
    """Return a function like megatron-core's `get_bias_dropout_add`, without bias and dropout, that multiplies the
    output of attention or MLP before it is added to the residual.
    """

    def add(output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        return residual + output_with_bias[0] * multiplier

    def get_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return add

    return get_add


def decoder_spec(
    config: TransformerConfig,
    layers: Sequence[Layer],
    drafting: Drafting,
    modules: Modules = LOCAL,
    has_deepstack: bool = False,
    first_layer: int = 0,
) -> TransformerBlockSubmodules:
    """Return the spec of the trunk, or of a pipeline stage with these decoder layers.

    Args:
        has_deepstack: whether features of images are added to the outputs of the first layers.
        first_layer: number of decoder layers on earlier stages.
    """
    layer_class = DeepstackLayer if has_deepstack else ResidualLayer
    norm = modules.norm
    if config.mtp_num_layers and drafting.takes_before_norm:
        norm = modules.norm_returning_input
    return TransformerBlockSubmodules(
        layer_specs=[
            decoder_layer_spec(layer, modules.in_layer(number, config.num_layers), layer_class)
            for number, layer in enumerate(layers, first_layer)
        ],
        layer_norm=ModuleSpec(module=norm),
    )


def _mtp_layer(parts: DrafterParts) -> ModuleSpec:
    is_unrolled, modules, drafting = parts.heads.unroll > 1, parts.modules, parts.drafting
    layer_class = MultiTokenPredictionLayer
    if is_unrolled:
        layer_class = UnrolledLayer
        modules = replace(modules, core_attention=modules.draft_attention)
    output_norm = ModuleSpec(module=modules.norm)
    # The next depth then reads the state before this norm. An unrolled layer applies the norm itself.
    if drafting.chains_before_norm and not is_unrolled:
        output_norm = ModuleSpec(module=modules.norm_returning_input)
    if parts.architecture.outside.heads_share_final_norm:
        # `GPTModel._complete_heads` gives it the trunk's final norm.
        output_norm = ModuleSpec(module=SharedNorm, params={"norm": modules.norm})
    return ModuleSpec(
        module=layer_class,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=modules.norm,
            hnorm=modules.norm,
            eh_proj=modules.column,
            layer_norm=output_norm,
            **{MTP_INNER_LAYER: decoder_layer_spec(parts.architecture.mtp_block, modules)},
        ),
    )


# Settings that families have and Llama does not: a scale of attention scores, and gates.
_NEUTRAL = {"softmax_scale": None, "attention_output_gate": False}


def _eagle3_layer(parts: DrafterParts) -> ModuleSpec:
    layer = eagle3.layer_of(parts.architecture, parts.hf_config)
    modules = replace(parts.modules, core_attention=parts.modules.draft_attention)
    block: Any = decoder_layer_spec(layer, modules)
    block.submodules.input_layernorm = ModuleSpec(module=PairNorm, params={"norm": modules.norm})
    # Not `ResidualRMSNorm`: with a `PairNorm`, `ResidualLayer` runs megatron-core's forward, which expects a tensor.
    block.submodules.pre_mlp_layernorm = modules.norm
    block.submodules.self_attn_bda = add_to_state
    block.submodules.self_attention.params["input_size"] = 2 * layer.attention.hidden
    return ModuleSpec(
        module=Eagle3Layer,
        params={
            "settings": _NEUTRAL | layer.attention.mcore_config() | layer.mlp.mcore_config(),
            "num_features": len(parts.heads.features),
            "norm": modules.norm if eagle3.is_set(parts.hf_config, "fc_norm") else None,
        },
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=IdentityOp,
            hnorm=IdentityOp,
            eh_proj=IdentityOp,
            layer_norm=ModuleSpec(module=modules.norm),
            **{MTP_INNER_LAYER: block},
        ),
    )


def _dflash_layer(parts: DrafterParts) -> ModuleSpec:
    layer, modules = dflash.layer_of(parts.architecture, parts.hf_config), parts.modules
    core_attention = ModuleSpec(module=BlockAttention, params=modules.draft_attention.params)
    spec = decoder_layer_spec(layer, replace(modules, core_attention=core_attention))
    return ModuleSpec(
        module=DFlashLayer,
        params={
            "layers": [spec] * dflash.num_decoder_layers(parts.hf_config),
            "settings": _NEUTRAL | layer.attention.mcore_config() | layer.mlp.mcore_config(),
            "norm": modules.norm,
            "num_features": len(parts.heads.features),
            "mask_token": dflash.mask_token(parts.hf_config),
            "samples_from_anchor": dflash.samples_from_anchor(parts.hf_config),
            "vocab": parts.hf_config["vocab_size"],
            "markov_rank": dflash.markov_rank(parts.hf_config),
        },
    )


def _mtp_features_layer(parts: DrafterParts) -> ModuleSpec:
    modules = replace(parts.modules, core_attention=parts.modules.draft_attention)
    num_features = len(parts.heads.features)
    projection = {"linear": modules.column, "num_features": num_features, "trains_later": parts.heads.unroll > 1}
    return ModuleSpec(
        module=UnrolledLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=modules.norm,
            hnorm=ModuleSpec(module=StateNorms, params={"norm": modules.norm, "num_features": num_features}),
            eh_proj=ModuleSpec(module=FeatureProjection, params=projection),
            layer_norm=ModuleSpec(module=modules.norm),
            **{MTP_INNER_LAYER: decoder_layer_spec(parts.architecture.mtp_block, modules)},
        ),
    )


def _assistant_layer(parts: DrafterParts) -> ModuleSpec:
    layers = gemma4_assistant.layers_of(parts.architecture, parts.hf_config)
    text = gemma4_assistant.text_config(parts.hf_config)
    settings = {"hidden_size": text["hidden_size"], "layernorm_epsilon": text.get("rms_norm_eps", 1e-6)}
    for layer in layers:
        settings |= layer.attention.mcore_config() | layer.mlp.mcore_config()
    return ModuleSpec(
        module=AssistantLayer,
        params={
            "layers": [decoder_layer_spec(layer, parts.modules) for layer in layers],
            "reads": gemma4_assistant.features_read(parts.hf_config),
            "settings": _NEUTRAL | settings,
            "norm": parts.modules.norm,
            "clusters": gemma4_assistant.clusters_of(parts.hf_config),
            "trains_state": parts.heads.unroll > 1,
        },
    )


# The layers of all kinds of drafters (`families/drafters.py`), which megatron-core's MTP block contains. The class of
# layers other than MTP layers, or layers derived from them, is a `DrafterLayer`.
DRAFTERS: dict[str, Callable[[DrafterParts], ModuleSpec]] = {
    MTP: _mtp_layer,
    eagle3.KIND: _eagle3_layer,
    **dict.fromkeys(dflash.KINDS, _dflash_layer),
    MTP_FEATURES: _mtp_features_layer,
    gemma4_assistant.KIND: _assistant_layer,
}


def drafter_spec(parts: DrafterParts) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of the drafter's layers; None without layers."""
    if not parts.heads.layers:
        return None
    layer = DRAFTERS[parts.heads.kind](parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * parts.heads.layers)
