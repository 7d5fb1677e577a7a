"""Define the properties of a run that determine its memory and time. This module does not import torch."""

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import IndexerMode, MtpMode, OptimizerName, ParallelLayout, RecomputeArgs, TransformerImpl
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.index import FAMILIES, architecture_of, image_sizes, with_drafter_sizes
from swiftlite.families.rank import FLOAT32, Rank
from swiftlite.families.tower import FROZEN, TrainedParts
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import decoder_layers_per_stage, group_of, layout_problems, parse_stages
from swiftlite.plan.low_precision import LowPrecision, model_problems
from swiftlite.plan.run import Plan
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
    has_flash2: bool = False
    """Whether FlashAttention 2 computes attention on Hopper GPUs, where other kernels are faster."""
    transformer_impl: TransformerImpl = "local"
    low_precision: LowPrecision | None = None
    """Low precision of linear layers and experts; None for bfloat16 or float32."""
    images: ImageSetup | None = None
    """Images of the rows; None for rows without images, with which no vision tower is computed."""
    freeze_llm: bool = False
    """Whether the trunk has no gradients of weights, but passes gradients to the tower."""
    indexer_mode: IndexerMode = "frozen"
    """Training of the indexers of sparse attention."""

    @classmethod
    def of(cls, args: SftArgs, plan: Plan, images: ImageSetup | None = None) -> "Setup":
        """Return the setup of a run.

        Args:
            plan: plan of the run with these options.
            images: images of the rows; None without images.
        """
        rows, length = plan.micro_batch_size * method_of(args).sequences_per_sample, args.max_length
        if plan.packing == "rows":
            rows, length = plan.micro_batch_size, plan.packing_length
        elif plan.packing == "step":
            rows, length = 1, plan.packing_length
        distributed, kernels = plan.distributed, plan.kernels
        return cls(
            layout=plan.layout,
            recompute=group_of(args, RecomputeArgs),
            num_gpus=plan.world_size,
            optimizer=distributed.optimizer,
            use_distributed_optimizer=bool(distributed.use_distributed_optimizer),
            grad_reduce_in_bf16=distributed.grad_reduce_in_bf16,
            num_distributed_optimizer_instances=distributed.num_distributed_optimizer_instances,
            offload_fraction=distributed.optimizer_offload_fraction * distributed.optimizer_cpu_offload,
            micro_batch_size=rows,
            max_length=length,
            parameter_bytes={"bfloat16": 2, "float32": FLOAT32}[args.torch_dtype],
            heads=plan.heads,
            mtp_mode=args.mtp_mode,
            is_fused=kernels.is_fused,
            lora=plan.lora,
            has_flash2=kernels.has_flash2(plan.layout.context_parallel_size),
            transformer_impl=kernels.transformer_impl,
            low_precision=kernels.low_precision,
            images=images,
            freeze_llm=args.freeze_llm,
            indexer_mode=args.indexer_mode,
        )

    @property
    def trunk_is_frozen(self) -> bool:
        """Whether the trunk is computed without gradients."""
        return self.mtp_mode == "heads_only" or self.indexer_mode == "indexer_only"


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


def images_of(args: SftArgs, facts: Facts, images_per_row: int) -> ImageSetup | None:
    """Return rows with a number of images of the maximum size; None without images.

    Args:
        images_per_row: 0 without images.
    """
    sizes, max_pixels = image_sizes(facts.hf_config), args.max_pixels or facts.max_pixels
    if not images_per_row or max_pixels is None or sizes is None:
        return None
    items_per_row = images_per_row * (max_pixels // sizes.group_size**2)
    return ImageSetup(items_per_row, trained_parts_of(args), args.vit_gradient_checkpointing)


def planned_architecture(hf_config: HfConfig, setup: Setup) -> Architecture:
    """Return the architecture of a run, with its vision tower if its rows have images.

    Raises:
        UserError: the model_type is unknown, or config.json does not describe the tower.
    """
    if setup.images is None:
        return architecture_of(hf_config)
    family = FAMILIES[hf_config["model_type"]].with_images(hf_config)
    return with_drafter_sizes(family.architecture(hf_config), family, hf_config)


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
        norms_round_last=architecture.outside.norms_round_last
        or architecture.outside.mcore_config.get("layernorm_zero_centered_gamma", False),
        is_fused=setup.is_fused,
        copies_views=setup.transformer_impl == "transformer_engine",
        recomputed=recomputed,
    )


def low_rank_of(rank: Rank, setup: Setup) -> Rank:
    """Return the settings of a rank for layers whose products have 8 or 4 bits.

    Without low precision, return `rank`, and also with torch's products, for which unquantized inputs are stored.
    """
    low = setup.low_precision
    if low is None or low.is_local:
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
