"""Build this rank's part of a model from a family and a config.json."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.args.fields import IndexerArgs, MoeArgs, ParallelLayout, RecomputeArgs
from swiftlite.base.errors import OptionError
from swiftlite.families.architecture import Architecture
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.mlp import CLAMPED_SWIGLU, RELU2
from swiftlite.model.attention.mla import MLATransformerConfig
from swiftlite.model.attention.rope import RotaryEmbedding, RotaryEmbeddings
from swiftlite.model.drafter import DrafterParts
from swiftlite.model.features import Features
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.kernels import modules_of
from swiftlite.model.layers.own_inputs import OwnInputs
from swiftlite.model.settings import ModelSettings, Stage
from swiftlite.model.shared_states import Sharing
from swiftlite.model.specs import TOWERS, decoder_spec, drafter_spec
from swiftlite.model.tower import SentOutputs
from swiftlite.plan.kernels import Kernels, automatic, largest_head
from swiftlite.plan.layout import (
    decoder_layers_per_stage,
    layout_problems,
    mtp_pipeline_rank,
    num_virtual_stages,
    parse_stages,
    sequence_parallel_size,
    tower_outputs_sent,
)
from swiftlite.runtime.device import Device
from swiftlite.runtime.mesh import Mesh

# Names of transformers. megatron-core's fused function for F.gelu in a gated MLP has the tanh approximation; without
# fusion the class of the spec is used (`model/layers/swiglu.py`). It has no fused function for _UNFUSED, and does
# not call the function given here.
_ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": F.gelu, CLAMPED_SWIGLU: F.silu, RELU2: F.relu}
_UNFUSED = (CLAMPED_SWIGLU, RELU2)


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_config(
    mcore_config: dict[str, Any],
    *,
    device: Device,
    dtype: torch.dtype,
    mtp_num_layers: int,
    layout: ParallelLayout | None = None,
    recompute: RecomputeArgs | None = None,
    moe: MoeArgs | None = None,
    indexer: IndexerArgs | None = None,
    kernels: Kernels = Kernels(),
    settings: Mapping[str, Any] = {},
) -> TransformerConfig:
    """Build megatron-core's config from the settings of the architecture and of the run.

    Args:
        mcore_config: arguments of TransformerConfig from `Architecture.mcore_config`.
        settings: further arguments of TransformerConfig, from --megatron_config.
    """
    moe = moe or MoeArgs()
    config_class = TransformerConfig
    indexer_fields: dict[str, Any] = {}
    if mcore_config.get("multi_latent_attention"):
        config_class, indexer_fields = MLATransformerConfig, _indexer_config(indexer or IndexerArgs())
    is_fused = kernels.is_fused and mcore_config["activation_func"] not in _UNFUSED
    architecture_fields = mcore_config | {"activation_func": _ACTIVATIONS[mcore_config["activation_func"]]}
    low_precision: dict[str, Any] = {}
    if kernels.low_precision:
        low_precision = kernels.low_precision.mcore_config()
    return config_class(
        **architecture_fields,
        **_layout_config(layout or ParallelLayout()),
        **_recompute_config(recompute or RecomputeArgs()),
        **low_precision,
        **indexer_fields,
        mtp_num_layers=mtp_num_layers or None,
        # gloo sends from the tensor itself, which would be freed before it is sent.
        deallocate_pipeline_outputs=device.is_cuda,
        moe_token_dispatcher_type=moe.moe_token_dispatcher_type,
        moe_flex_dispatcher_backend=moe.moe_flex_dispatcher_backend,
        moe_shared_expert_overlap=moe.moe_shared_expert_overlap,
        moe_aux_loss_coeff=moe.moe_aux_loss_coeff,
        moe_router_bias_update_rate=moe.moe_router_bias_update_rate,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Required: otherwise megatron-core does not mark along which axis a parameter is split (layers.py:913).
        perform_initialization=True,
        # The bridge sets the weights; random initialization would take longer than loading them.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        use_cpu_initialization=not device.is_cuda,
        # The only mode whose loss and gradient do not depend on micro-batches, data parallelism or padding.
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Either the activation is the class of the spec (model/layers/swiglu.py), or megatron-core compiles its own.
        use_te_activation_func=not is_fused,
        bias_activation_fusion=is_fused,
        # These fusions need Transformer Engine or CUDA kernels, or change the order of operations.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=kernels.is_deterministic,
        **settings,
    )


def _layout_config(layout: ParallelLayout) -> dict[str, Any]:
    """Return the arguments of TransformerConfig for the parallel layout."""
    is_interleaved = num_virtual_stages(layout) is not None
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": num_virtual_stages(layout),
        "pipeline_model_parallel_layout": _stages(layout),
        "num_layers_in_first_pipeline_stage": layout.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": layout.decoder_last_pipeline_num_layers,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        # Rows are padded to the longest row of their micro-batch; `pipeline.py` computes the shapes.
        "variable_seq_lengths": layout.pipeline_model_parallel_size > 1,
        # gloo matches messages between two ranks in order, and sends directly from the tensor. With batched messages,
        # two stages would exchange activations and gradients by mistake, and a freed tensor would be sent as garbage.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        "batch_p2p_sync": False,  # a workaround for old releases of torch, which waits for the GPU after each message
    }


def _recompute_config(recompute: RecomputeArgs) -> dict[str, Any]:
    """Return the arguments of TransformerConfig for activation recomputation."""
    config: dict[str, Any] = {
        "recompute_modules": recompute.recompute_modules,
    }
    if recompute.recompute_granularity != "none":
        config["recompute_granularity"] = recompute.recompute_granularity
    if recompute.recompute_granularity == "full":
        config["recompute_method"] = recompute.recompute_method
        config["recompute_num_layers"] = recompute.recompute_num_layers
    return config


def _indexer_config(indexer: IndexerArgs) -> dict[str, Any]:
    """Return the arguments of MLATransformerConfig for the training of indexers."""
    is_trained = indexer.indexer_mode != "frozen"
    return {
        "indexer_loss_coeff": is_trained * indexer.indexer_loss_coeff,
        "indexer_is_alone": indexer.indexer_mode == "indexer_only",
    }


def _stages(layout: ParallelLayout) -> str | None:
    """Return the pipeline layout as a string without spaces, as megatron-core requires it."""
    text = layout.pipeline_model_parallel_layout
    return text and "|".join(parse_stages(text))


def build_model(
    architecture: Architecture,
    hf_config: dict[str, Any],
    *,
    mesh: Mesh,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
    **settings: Any,
) -> list[GPTModel]:
    """Build this rank's part of the model with uninitialized weights on the device.

    Args:
        architecture: from `Family.architecture`.
        hf_config: config.json, for the rotary frequencies and the settings of a drafter.
        mesh: the model's ranks and layout; it does not have to be the active mesh.
        kernels: kernels of the layers; default: the automatic choice for the device.
        settings: fields of `ModelSettings`.

    Returns:
        One chunk per virtual pipeline stage.

    Raises:
        OptionError: the model does not support the layout.
    """
    if kernels is None:
        is_float32 = dtype is torch.float32
        kernels = automatic(mesh.device.is_cuda, is_float32=is_float32, head=largest_head(architecture))
    used = ModelSettings(loss_in_chunks=kernels.is_fused, **settings)
    if problems := layout_problems(mesh.layout, architecture, used.heads.layers):
        raise OptionError(problems)
    mcore_config = architecture.mcore_config()
    modules = modules_of(kernels, norms_round_last=architecture.outside.norms_round_last)
    drafter = DrafterParts(hf_config, architecture, used.heads, used.drafting, modules)
    chunks = []
    for vp_stage in range(num_virtual_stages(mesh.layout) or 1):
        # A separate config for each stage, because megatron-core's schedules write to it.
        config = build_config(
            mcore_config,
            device=mesh.device,
            dtype=dtype,
            mtp_num_layers=used.heads.layers,
            layout=mesh.layout,
            recompute=used.recompute,
            moe=used.moe,
            indexer=used.indexer,
            kernels=kernels,
            settings=used.mcore_config,
        )
        rotary_pos_emb = _rotary_embedding(architecture, mcore_config.get("hf_rope", hf_config), mesh, dtype)
        # megatron-core's MTP layers and experts read its global process groups when they are built.
        with mesh.active():
            stage = _stage(config, architecture, mesh, vp_stage, used, drafter)
            chunk = GPTModel(config, used, stage, architecture.outside, rotary_pos_emb, mesh.groups)
        chunks.append(chunk.to(mesh.device.torch_device))
    return chunks


def _rotary_embedding(
    architecture: Architecture, hf_rope: dict[str, Any], mesh: Mesh, dtype: torch.dtype
) -> RotaryEmbedding | RotaryEmbeddings:
    """Return the rotary embedding of all layers.

    Args:
        hf_rope: rotary settings with the names of config.json. Latent attention rotates only a part of each head, and
            its config holds them separately.
    """
    outside = architecture.outside
    # Then rotations are computed in float32, and only their results are rounded (`rope.rotate`).
    if outside.rotary_rounds_last:
        dtype = torch.float32
    if outside.ropes:
        return RotaryEmbeddings(outside.ropes, mesh.device.torch_device, dtype)
    in_pairs = any(
        isinstance(attention, GroupedQueryAttention) and attention.rope_interleave
        for attention in architecture.attentions
    )
    return RotaryEmbedding(hf_rope, mesh.device.torch_device, dtype, in_pairs)


def _stage(
    config: TransformerConfig,
    architecture: Architecture,
    mesh: Mesh,
    vp_stage: int,
    settings: ModelSettings,
    drafter: DrafterParts,
) -> Stage:
    """Return the part of the model on one virtual stage of this rank."""
    layout, heads, drafting = mesh.layout, settings.heads, settings.drafting
    pp_rank = mesh.pp.rank()
    per_stage = decoder_layers_per_stage(layout, config.num_layers)
    # Ranks take turns: of 2 ranks with 2 virtual stages each, rank 0 has the stages 0 and 2.
    stage = vp_stage * mesh.pp.size() + pp_rank
    first_layer = sum(per_stage[:stage])
    layers = architecture.layers[first_layer : first_layer + per_stage[stage]]
    is_last_virtual = vp_stage == (num_virtual_stages(layout) or 1) - 1

    mtp_block = None
    if is_last_virtual and pp_rank == mtp_pipeline_rank(layout):
        mtp_block = drafter_spec(drafter)
    tower, num_deepstack, sent_outputs = None, 0, SentOutputs()
    if architecture.tower is not None:
        num_deepstack = architecture.tower.num_deepstack
        per_stage_sent = tower_outputs_sent(layout, config.num_layers, heads.drafts, num_deepstack)
        sent_outputs = SentOutputs(per_stage_sent, stage, 1 + num_deepstack)
        # Only here: its outputs are sent on to the stages that read them.
        if stage == 0:
            tower = TOWERS[type(architecture.tower)](architecture.tower, config)
    follows_norm = first_layer == config.num_layers
    sharing, own_inputs = sharing_of(architecture, layout, per_stage), None
    if sharing.input_size and stage == 0:
        own_inputs = partial(OwnInputs, config, size=sharing.input_size, norm=drafter.modules.norm)
    return Stage(
        decoder=decoder_spec(config, layers, drafting, drafter.modules, num_deepstack > 0, first_layer),
        mtp_block=mtp_block,
        tower=tower,
        sent_outputs=sent_outputs,
        features=Features.of_stage(
            heads.features,
            first_layer,
            len(layers),
            sharing.num_blocks(stage - 1) + 1 + (follows_norm and drafting.takes_before_norm),
        ),
        number=stage,
        sharing=sharing,
        own_inputs=own_inputs,
        is_first=stage == 0,
        is_last=stage == len(per_stage) - 1,
        vp_stage=vp_stage if num_virtual_stages(layout) else None,
    )


def sharing_of(architecture: Architecture, layout: ParallelLayout, per_stage: Sequence[int]) -> Sharing:
    """Return what decoder layers read in addition to the state.

    Args:
        per_stage: number of decoder layers of each stage.
    """
    attentions: dict[int, Any] = {number: architecture.layers[number].attention for number in architecture.key_sources}
    tp = layout.tensor_model_parallel_size
    return Sharing(
        [architecture.cross_layer_reads(end) for end in accumulate(per_stage[:-1])],
        # Each tensor-parallel rank sends the keys of its own heads to the same rank of the next stage.
        {number: (attention.groups // tp, attention.head_dim) for number, attention in attentions.items()},
        architecture.outside.own_inputs,
        architecture.outside.hidden,
        sequence_parallel_size(layout),
    )


def check_computable(layout: ParallelLayout, device: Device) -> None:
    """Check that the device supports computing with the layout; converting a model does not require it.

    Raises:
        OptionError: the device does not support an option of the layout.
    """
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    if not device.is_cuda and ep > 1 and etp > 1:
        # Sequence parallelism gathers lists of unequal length (tensor_parallel/mappings.py:143 of 0.16.1).
        problem = (
            f"--expert_model_parallel_size {ep} with --expert_tensor_parallel_size {etp} requires a GPU: gloo does not "
            "support megatron-core's alltoall over both"
        )
        raise OptionError([(problem, "use --expert_tensor_parallel_size 1")])
