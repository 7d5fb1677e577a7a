"""Define the properties of a run that determine its memory and time. This module does not import torch."""

import dataclasses
import math
from dataclasses import dataclass, field
from fractions import Fraction

from swiftlite.args.commands import DoctorArgs, DpoArgs, SftArgs
from swiftlite.args.fields import (
    KernelArgs,
    MtpMode,
    OptimizerName,
    ParallelLayout,
    PrecisionArgs,
    RecomputeArgs,
    TransformerImpl,
)
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.index import FAMILIES, architecture_of, image_sizes
from swiftlite.families.rank import FLOAT32, Rank
from swiftlite.families.tower import FROZEN, TrainedParts
from swiftlite.methods.index import method_for
from swiftlite.plan.layout import decoder_layers_per_stage, group_of, layout_of, layout_problems, parse_stages
from swiftlite.plan.low_precision import LowPrecision, low_precision_of, model_problems
from swiftlite.plan.trainable import trained_parts_of


@dataclass(frozen=True)
class ImageSetup:
    """The images of the rows of a run, and its vision tower.

    Attributes:
        items_per_row: number of items, which are the inputs of the tower, of all images of a row.
        trained: the trained parts of the tower.
        recomputes: whether a trained tower recomputes its activations.
    """

    items_per_row: int
    trained: TrainedParts = FROZEN
    recomputes: bool = True


HOST_BYTES = 4 * FLOAT32
"""Bytes of the host's memory per offloaded parameter: two moments, and copies of the main weight and the gradient."""
BLOCK_OF_MOMENTS = 256
"""Number of values with a common scale in the moments of `--optimizer adamw_8bit`."""


@dataclass(frozen=True)
class Setup:
    """The properties of a run except its model that determine its memory."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    recompute: RecomputeArgs = field(default_factory=RecomputeArgs)
    num_gpus: int = 1
    optimizer: OptimizerName = "adamw"
    use_distributed_optimizer: bool = False
    grad_reduce_in_bf16: bool = False
    num_distributed_optimizer_instances: int = 1
    offload_fraction: float = 0.0
    """Share of the parameters whose moments are in the memory of the host."""
    micro_batch_size: int = 1
    max_length: int = 2048
    parameter_bytes: int = 2
    """2 for bfloat16, with float32 main weights in the optimizer; 4 for float32."""
    heads: Heads = Heads()
    mtp_mode: MtpMode = "joint"
    is_fused: bool = False
    """Whether kernels of norms, activations and losses are fused (`plan.kernels.Kernels.is_fused`)."""
    lora: Lora | None = None
    transformer_impl: TransformerImpl = "local"
    low_precision: LowPrecision | None = None
    """Low precision of linear layers and experts; None for bfloat16 or float32."""
    images: ImageSetup | None = None
    """Images of the rows; None for rows without images, with which no vision tower is computed."""
    freeze_llm: bool = False
    """Whether the trunk has no gradients of weights, but passes gradients to the tower."""


def gradient_bytes(setup: Setup) -> int:
    """Return the bytes of the accumulated gradient of a parameter."""
    if setup.grad_reduce_in_bf16:
        return setup.parameter_bytes
    return FLOAT32


def moment_bytes(setup: Setup) -> Fraction:
    """Return the bytes of the two moments of a parameter."""
    if setup.optimizer == "adamw_8bit":
        return 2 * (1 + Fraction(FLOAT32, BLOCK_OF_MOMENTS))
    return Fraction(2 * FLOAT32)


def main_weight_bytes(setup: Setup) -> int:
    """Return the bytes of the optimizer's float32 copy of a parameter, which a float32 parameter does not need."""
    if setup.parameter_bytes == FLOAT32:
        return 0
    return FLOAT32


def planned_setup(args: DoctorArgs, hf_config: HfConfig, max_pixels: int | None = None) -> Setup:
    """Return the setup of `doctor --plan`. Without --num_gpus, it has the minimum number of GPUs of the layout.

    Args:
        max_pixels: maximum number of pixels of an image without --max_pixels (`Facts.max_pixels`).
    """
    layout = layout_of(args)
    per_replica = layout.tensor_model_parallel_size * layout.context_parallel_size
    per_experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    num_gpus = args.num_gpus or math.lcm(per_replica, per_experts) * layout.pipeline_model_parallel_size
    shares = args.use_distributed_optimizer
    if shares is None:
        shares = num_gpus > layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    return Setup(
        layout=layout,
        recompute=group_of(args, RecomputeArgs),
        num_gpus=num_gpus,
        optimizer=args.optimizer,
        use_distributed_optimizer=shares,
        grad_reduce_in_bf16=args.grad_reduce_in_bf16,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        offload_fraction=args.optimizer_offload_fraction * args.optimizer_cpu_offload,
        micro_batch_size=args.micro_batch_size * _sequences_per_sample(args),
        max_length=args.max_length,
        parameter_bytes={"bfloat16": 2, "float32": FLOAT32}[args.torch_dtype],
        heads=_planned_heads(args, hf_config),
        mtp_mode=args.mtp_mode,
        is_fused=args.fused_kernels == "auto",  # a plan assumes GPUs
        lora=_planned_lora(args, Heads.from_config(hf_config)),
        transformer_impl=args.transformer_impl,
        low_precision=low_precision_of(planned_kernels(args)),
        images=_planned_images(args, hf_config, args.max_pixels or max_pixels),
        freeze_llm=args.freeze_llm,
    )


def _planned_images(args: DoctorArgs, hf_config: HfConfig, max_pixels: int | None) -> ImageSetup | None:
    sizes = image_sizes(hf_config)
    if not args.images_per_row or max_pixels is None or sizes is None:
        return None
    items_per_row = args.images_per_row * (max_pixels // sizes.group_size**2)
    return ImageSetup(items_per_row, trained_parts_of(args), args.vit_gradient_checkpointing)


def planned_architecture(hf_config: HfConfig, setup: Setup) -> Architecture:
    """Return the architecture of a run, with its vision tower if its rows have images.

    Raises:
        UserError: the model_type is unknown, or config.json does not describe the tower.
    """
    if setup.images is None:
        return architecture_of(hf_config)
    return FAMILIES[hf_config["model_type"]].with_images(hf_config).architecture(hf_config)


def _sequences_per_sample(args: DoctorArgs) -> int:
    """Return the number of sequences per sample of the planned method."""
    if args.loss_type is None:
        return method_for(SftArgs, args).sequences_per_sample
    return method_for(DpoArgs, args).sequences_per_sample


def _planned_heads(args: DoctorArgs, hf_config: HfConfig) -> Heads:
    """Return the heads of a run with these options (`plan.heads.heads_of`).

    Of the draft vocabulary of --draft_vocab, only the size is known; the ids are placeholders.
    """
    checkpoint = Heads.from_config(hf_config)
    layers = args.mtp_num_layers
    if layers is None:
        layers = checkpoint.layers or int(args.mtp_mode == "heads_only")
    if not layers:
        return Heads(0, args.mtp_unroll)
    draft_vocab = checkpoint.draft_vocab
    if args.draft_vocab is not None:
        draft_vocab = tuple(range(args.draft_vocab))
    return Heads(layers, args.mtp_unroll, draft_vocab=draft_vocab)


def planned_kernels(args: DoctorArgs) -> KernelArgs:
    """Return the kernel options of a plan."""
    return KernelArgs(**dataclasses.asdict(group_of(args, PrecisionArgs)))


def _planned_lora(args: DoctorArgs, checkpoint: Heads) -> Lora | None:
    """Return the adapters of a run with these options (`plan.heads.lora_of`).

    Args:
        checkpoint: heads of the model.
    """
    if args.tuner_type != "lora":
        return None
    heads_tuner = args.mtp_tuner
    if heads_tuner is None:
        heads_tuner = "lora" if checkpoint.layers else "full"  # new heads have no weights to adapt
    on_trunk = args.mtp_mode != "heads_only"
    targets, saved = tuple(args.target_modules), tuple(args.lora_modules_to_save)
    return Lora(
        args.lora_rank,
        1.0,
        has_magnitudes=args.use_dora,
        targets=targets,
        saved=saved,
        on_trunk=on_trunk,
        heads=heads_tuner,
    )


def is_possible(layout: ParallelLayout, architecture: Architecture, setup: Setup) -> bool:
    """Return whether the model and its low precision support a layout."""
    if layout_problems(layout, architecture, setup.heads.layers):
        return False
    return setup.low_precision is None or not any(model_problems(setup.low_precision, layout, architecture))


def rank_of(architecture: Architecture, setup: Setup) -> Rank:
    """Return the settings of a rank in this setup."""
    layout, recompute = setup.layout, setup.recompute
    recomputed: frozenset[str] = frozenset()
    if recompute.recompute_granularity == "selective":
        recomputed = frozenset(recompute.recompute_modules)
    return Rank(
        tp=layout.tensor_model_parallel_size,
        cp=layout.context_parallel_size,
        ep=layout.expert_model_parallel_size,
        etp=layout.expert_tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        itemsize=setup.parameter_bytes,
        rows=setup.micro_batch_size,
        length=setup.max_length // layout.context_parallel_size,
        norms_round_last=architecture.outside.rounds_last
        or architecture.outside.mcore_config.get("layernorm_zero_centered_gamma", False),
        is_fused=setup.is_fused,
        copies_views=setup.transformer_impl == "transformer_engine",
        recomputed=recomputed,
    )


def low_rank_of(rank: Rank, setup: Setup) -> Rank:
    """Return the settings of a rank for layers whose products have 8 or 4 bits.

    Without low precision, return `rank`.
    """
    low = setup.low_precision
    if low is None:
        return rank
    return dataclasses.replace(rank, quantized=low.quantized)


def held_by_stages(setup: Setup, num_layers: int) -> list[str]:
    """Return the content of each virtual stage in forward order, in the format of `parse_stages`."""
    layout = setup.layout
    if layout.pipeline_model_parallel_layout:
        return parse_stages(layout.pipeline_model_parallel_layout)
    held = ["t" * count for count in decoder_layers_per_stage(layout, num_layers)]
    held[0] = "E" + held[0]
    held[-1] += "m" * setup.heads.layers + "L"
    return held
