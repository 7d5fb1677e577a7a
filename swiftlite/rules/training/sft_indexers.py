"""Rules of `megatron sft` for models with sparse attention (DSA)."""

from collections.abc import Iterator
from itertools import accumulate

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import MTP_FEATURES
from swiftlite.families.architecture import Architecture
from swiftlite.families.index import known_architecture
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import heads_of, mtp_init_of
from swiftlite.plan.layout import decoder_layers_per_stage, layout_beside, layout_of, layout_problems
from swiftlite.rules import common

_OF_ROUTERS = ("moe_router_bias_update_rate", "moe_aux_loss_coeff")


def indexers_can_be_trained(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    architecture = facts.architecture
    if args.indexer_mode == "frozen" or architecture is None:
        return
    flag = f"--indexer_mode {args.indexer_mode}"
    heads, init = heads_of(args, facts.heads), mtp_init_of(args, facts.heads)
    if architecture.index_topk is None:
        problem = (
            f"{flag} requires a model with indexers, which model_type {facts.hf_config['model_type']!r} does not have"
        )
        yield problem, "remove --indexer_mode"
    elif args.tuner_type == "lora":
        yield f"{flag} does not support --tuner_type lora", "use --tuner_type full, or remove --indexer_mode"
    elif args.mtp_mode == "heads_only" and args.indexer_mode == "indexer_only":
        yield f"{flag} cannot be combined with --mtp_mode heads_only", "remove one of the two"
    elif args.indexer_mode == "indexer_only" and method_of(args).name not in ("sft", "pt"):
        yield f"{flag} is only supported in megatron sft and pt", "use one of them, or --indexer_mode joint"
    elif args.indexer_mode == "indexer_only" and heads.layers and init not in ("checkpoint", "graft"):
        yield f"{flag} does not train the new heads of --mtp_init {init}", "train heads in another run"
    elif args.indexer_mode == "indexer_only" and (changed := common.changed(args, _OF_ROUTERS)):
        yield f"{flag} trains no routers, so --{changed[0]} does not apply", "remove one of the two"
    elif heads.layers and heads.unroll > 1:
        yield (
            f"{flag}: the indexers of heads are not trained with --mtp_unroll",
            "remove --indexer_mode or --mtp_unroll",
        )


def long_rows_have_selections(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Reject rows above `index_topk` where a layer would not know the tokens that an indexer selects."""
    architecture = facts.architecture
    topk = architecture and architecture.index_topk
    if architecture is None or not topk or args.max_length <= topk:
        return
    heads = heads_of(args, facts.heads)
    why = f"--max_length {args.max_length} is above index_topk {topk} in config.json"
    shorter = f"use --max_length {topk}"
    if heads.layers and heads.unroll > 1:
        yield f"--mtp_unroll {heads.unroll}: drafts do not select tokens, but {why}", f"{shorter}, or --mtp_unroll 1"
    if args.mtp_features or heads.kind == MTP_FEATURES:
        problem = f"--mtp_features: heads with features do not select tokens, but {why}"
        yield problem, f"{shorter}, or remove --mtp_features"
    if args.stream_trunk and _shares(architecture):
        problem = f"--stream_trunk: layers of this model use selections of earlier layers, and {why}"
        yield problem, f"{shorter}, or remove --stream_trunk"
    yield from _stage_problems(layout_of(args), architecture, why, shorter)


def other_models_have_selections(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Reject stages of other models, as `long_rows_have_selections`."""
    for prefix in ("ref", "teacher"):
        option = f"{prefix}_model"
        if not getattr(args, option, None):
            continue
        sizes = [getattr(args, f"{prefix}_{kind}_model_parallel_size", None) for kind in ("tensor", "pipeline")]
        architecture = known_architecture(facts.described(option)[1])
        topk = architecture and architecture.index_topk
        if architecture and topk and args.max_length > topk:
            why = f"--max_length {args.max_length} is above index_topk {topk} in the config.json of --{option}"
            layout = layout_of(args)
            if any(sizes):
                layout = layout_beside(layout, sizes[0], sizes[1], architecture)
            yield from _stage_problems(layout, architecture, why, f"use --max_length {topk}")


def _stage_problems(layout: ParallelLayout, architecture: Architecture, why: str, shorter: str) -> Iterator[Problem]:
    """Yield a problem if a pipeline stage starts with a layer that uses the selection of an earlier stage."""
    if layout.pipeline_model_parallel_size == 1 or layout_problems(layout, architecture, 0):
        return
    ends = accumulate(decoder_layers_per_stage(layout, len(architecture.layers)))
    wrong = [end for end in ends if end < len(architecture.layers) and _is_shared(architecture, end)]
    if wrong:
        flag = f"--pipeline_model_parallel_size {layout.pipeline_model_parallel_size}"
        if layout.pipeline_model_parallel_layout:
            flag = f"--pipeline_model_parallel_layout {layout.pipeline_model_parallel_layout}"
        own = [number for number in range(1, len(architecture.layers)) if not _is_shared(architecture, number)]
        yield (
            f"{flag}: a stage starts with layer {wrong[0]} (from 0), which uses the selection of an earlier layer, and "
            f"{why}",
            f"use --pipeline_model_parallel_layout with stages that start with these layers: "
            f"{', '.join(map(str, own))}; or {shorter}",
        )


def _is_shared(architecture: Architecture, number: int) -> bool:
    indexer = architecture.layers[number].attention.indexer
    return indexer is not None and indexer.is_shared


def _shares(architecture: Architecture) -> bool:
    return any(_is_shared(architecture, number) for number in range(len(architecture.layers)))
