"""Create the model that a run trains, with its optimizer. The model is built, loaded, frozen in part, and wrapped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import IndexerArgs, MoeArgs, RecomputeArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import depth_key
from swiftlite.base.log import logger
from swiftlite.bridge.transfer import WeightsReport
from swiftlite.data.batch import Batch
from swiftlite.families.resolved import HfModel
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.lora import add_adapters
from swiftlite.model.open import open_model
from swiftlite.model.trunk import TrunkLayers, open_trunk
from swiftlite.model.vision import VisionTransformer
from swiftlite.plan.layout import group_of
from swiftlite.plan.megatron_config import settings_of
from swiftlite.plan.run import Plan, Schedule
from swiftlite.plan.trainable import Trainable
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.clipping import ClippedOptimizer
from swiftlite.train.head_fit import fit_heads
from swiftlite.train.metrics.run_report import hash_tensors
from swiftlite.train.optim import make_optimizer, wrap_model


@dataclass(frozen=True)
class TrainState:
    """The model, optimizer and scheduler of a run, on this rank.

    Attributes:
        chunks: the model without wrappers, one chunk per virtual pipeline stage.
        wrapped: the chunks in megatron-core's wrappers.
        weights_report: whether each tensor was loaded, initialized, dropped or carried over.
        trainable: which parameters are trained.
        hashes: hash of each parameter before training, see `train.metrics.run_report.hash_tensors`.
        trunk: runs the decoder layers.
    """

    chunks: Sequence[GPTModel]
    wrapped: Sequence[DistributedDataParallel]
    optimizer: ClippedOptimizer
    scheduler: OptimizerParamScheduler
    weights_report: WeightsReport
    trainable: Trainable
    hashes: Mapping[str, str]
    trunk: TrunkLayers


def make_train_state(
    args: SftArgs,
    mesh: Mesh,
    hf_model: HfModel,
    plan: Plan,
    schedule: Schedule,
    trainable: Trainable,
    rows_to_fit: Sequence[Batch] | None = None,
    graft_from: HfModel | None = None,
) -> TrainState:
    """Load --model as the options specify, and create everything that its training requires. Collective.

    Args:
        rows_to_fit: micro-batches to which new heads are fitted; None if no fit is needed.
        graft_from: the model whose heads are copied if `plan.mtp_init` is graft.

    Raises:
        UserError: the directory cannot be read, does not match the model, or has heads that the options neither
            request nor drop.
        OptionError: the model does not support the layout.
    """
    dtype = getattr(torch, args.torch_dtype)
    chunks, report = open_model(
        hf_model,
        mesh,
        dtype=dtype,
        heads=plan.heads,
        mtp_init=plan.mtp_init,
        graft_from=graft_from,
        seed=args.seed,
        freeze_trunk=trainable.freezes_trunk,
        holds_layers=plan.trunk.holds_layers,
        recompute=group_of(args, RecomputeArgs),
        moe=group_of(args, MoeArgs),
        indexer=group_of(args, IndexerArgs),
        mtp_loss=plan.mtp_loss,
        detached_heads=plan.detached_heads,
        temperature=plan.temperature,
        kernels=plan.kernels,
        mcore_config=settings_of(args.megatron_config, "TransformerConfig"),
    )
    if args.vit_gradient_checkpointing and not args.freeze_vit:
        for chunk in chunks:
            if isinstance(chunk.tower, VisionTransformer):
                chunk.tower.recompute_activations()
    report = report.over_all_ranks()
    _check_no_head_is_forgotten(args, hf_model, plan, report)
    trunk = open_trunk(plan.trunk, chunks, hf_model, mesh)
    if rows_to_fit is not None:
        block = hf_model.family.architecture(hf_model.config).mtp_block
        fit_heads(chunks, mesh, rows_to_fit, block, trunk)
    if plan.lora:
        rows = hf_model.family.rows(hf_model.config, plan.heads.layers)
        logger.info("adapters: %d on this rank", add_adapters(chunks, plan.lora, rows, args.seed))
    trainable.apply(chunks)
    hashes = hash_tensors(chunks)
    ddp_settings = settings_of(args.megatron_config, "DistributedDataParallelConfig")
    wrapped = wrap_model(chunks, mesh, dtype, plan.distributed, ddp_settings)
    optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, mesh)
    return TrainState(chunks, wrapped, optimizer, scheduler, report, trainable, hashes, trunk)


def _check_no_head_is_forgotten(args: SftArgs, hf_model: HfModel, plan: Plan, report: WeightsReport) -> None:
    """Raise UserError if the weights contain heads that config.json does not declare, unless the options drop them."""
    if args.mtp_num_layers is not None or plan.heads.layers:
        return
    if any(hf_model.family.is_mtp(hf_model.config, key) for key in report.dropped):
        raise UserError(
            f"{args.model} has MTP tensors, but its config.json declares no MTP layer",
            f"use --mtp_num_layers 0 to drop them; to keep them, set {depth_key(hf_model.config)} in config.json",
        )
