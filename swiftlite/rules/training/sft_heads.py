"""Rules of `megatron sft` for MTP heads: their number, their training and the source of their weights."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.conventions.index import CONVENTIONS
from swiftlite.families import FAMILIES
from swiftlite.heads import Heads
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import (
    LR_OF_NEW_HEADS,
    heads_of,
    mtp_init_of,
    mtp_loss_of,
    new_heads_learn_alone,
    why_no_fit,
)
from swiftlite.plan.layout import layout_of


def mtp_weights_have_a_source(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or mtp_init_of(args, facts.heads) != "checkpoint":
        return
    wanted = args.mtp_num_layers
    present = facts.heads.layers
    if not wanted or wanted < 0 or wanted == present:
        return
    if not present:
        yield (
            f"--mtp_num_layers {wanted}, but the checkpoint has no MTP weights",
            "add --mtp_init fit_last_layer to start from its last layer, or --mtp_init random",
        )
    else:
        yield (
            f"--mtp_num_layers {wanted}, but the checkpoint has MTP depth {present}",
            f"leave --mtp_num_layers out to train its {present}, or make all {wanted} anew with "
            "--mtp_init fit_last_layer or random",
        )


def mtp_options_have_heads(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or heads_of(args, facts.heads).layers != 0:
        return
    why = "--mtp_num_layers is 0" if args.mtp_num_layers == 0 else "the checkpoint has none"
    if args.mtp_mode == "heads_only":
        yield f"--mtp_mode heads_only trains MTP heads alone, but {why}", _add_heads(args)
    elif args.mtp_init not in (None, "checkpoint") and args.mtp_num_layers is None:
        yield f"--mtp_init {args.mtp_init} has no head to fill: {why}, --mtp_num_layers is not set", _add_heads(args)


def _add_heads(args: SftArgs) -> str:
    init = args.mtp_init if args.mtp_init not in (None, "checkpoint") else "fit_last_layer"
    return f"add --mtp_num_layers 1 --mtp_init {init}"


def one_layer_is_unrolled(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    layers = heads_of(args, facts.heads).layers
    if facts.hf_config and args.mtp_unroll > 1 and layers > 1:
        yield (
            f"--mtp_unroll {args.mtp_unroll} applies one MTP layer again and again, but there are {layers}",
            "leave --mtp_unroll out, or start from one layer: --mtp_num_layers 1 --mtp_init fit_last_layer",
        )


def fit_has_something_to_fit_to(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    why = why_no_fit(args)
    if args.mtp_init == "fit_last_layer" and why:
        yield (
            f"--mtp_init fit_last_layer fits to what training rows give the last decoder layer, but {why}",
            "--mtp_init copy_last_layer starts without a fit",
        )


def draft_vocab_can_be_learned(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    heads = heads_of(args, facts.heads)
    whole = "--draft_vocab 0 lets them draft all tokens"
    if not facts.hf_config or not heads.layers or not (args.draft_vocab or heads.draft_vocab):
        return
    if args.draft_vocab and args.tuner_type == "lora":
        return  # `heads_and_adapters_go_together` reports it
    asked = (
        f"--draft_vocab {args.draft_vocab}" if args.draft_vocab else "the checkpoint's heads have a draft vocabulary"
    )
    size = facts.hf_config.get("vocab_size", 0)
    if not method_of(args).imitates_rows:
        yield f"{asked}, which heads learn behind a trunk that stays", f"{whole}; swiftlite megatron sft trains others"
    elif args.mtp_mode != "heads_only":
        yield f"{asked}, which heads learn behind a trunk that stays", f"add --mtp_mode heads_only; {whole}"
    elif mtp_loss_of(args) == "ce":
        yield f"{asked}, and --mtp_loss ce asks for tokens outside of it", f"leave --mtp_loss out; {whole}"
    elif args.draft_vocab and args.streaming:
        yield f"{asked} counts the training rows, and --streaming reads them later", "leave one of the two out"
    elif args.draft_vocab and args.sft_mock_dataset_config_json:
        yield f"{asked} counts the answers of training rows, and made-up samples have none", "leave --draft_vocab out"
    elif args.draft_vocab and args.draft_vocab >= size:
        yield f"{asked}, but the model's whole vocabulary is {size}", "choose fewer, or leave it out"


def draft_for_is_measured(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    family = FAMILIES.get(str(facts.hf_config.get("model_type")))
    if args.draft_for and family and CONVENTIONS[args.draft_for](family) is None:
        yield (
            f"--draft_for {args.draft_for}: what it feeds the heads of a {family.name} has not been measured",
            "leave it out: heads are then trained for vllm",
        )


def trunk_states_come_again(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Require the same micro-batches in every epoch, because hidden states are cached by micro-batch."""
    if args.cache_trunk_states is None:
        return
    flag = "--cache_trunk_states"
    if Path(args.cache_trunk_states).is_file():
        yield f"{flag} {args.cache_trunk_states} is a file", "name a directory, which may be new"
    if args.mtp_mode != "heads_only":
        yield f"{flag} keeps what a trunk says that stays as it is", "add --mtp_mode heads_only, or leave it out"
    if layout_of(args).pipeline_model_parallel_size > 1:
        yield f"{flag} with a pipeline: its stages would wait for each other all the same", "use tensor parallelism"
    if args.streaming or args.sft_mock_dataset_config_json:
        yield f"{flag} needs rows that are known beforehand", "give files with --dataset, without --streaming"
    if args.micro_batch_size > 1 and args.sequence_packing_scheduler == "none":
        yield (
            f"{flag} with --micro_batch_size {args.micro_batch_size}: other rows would meet in every epoch",
            "--micro_batch_size 1, with --packing true to fill it",
        )
    if args.sequence_packing_scheduler != "none":
        yield f"{flag} with --sequence_packing_scheduler: each step is packed anew", "leave one of the two out"
    if args.moe_aux_loss_coeff or args.moe_router_bias_update_rate:
        yield f"{flag}: a trunk that is read has no routers to balance", "leave out the options that balance them"


def heads_learn_slowly(args: SftArgs, facts: Facts) -> Iterator[str]:
    if args.lr is None or args.lr >= LR_OF_NEW_HEADS / 30:
        return
    if new_heads_learn_alone(args, facts.heads):
        yield f"--lr {args.lr:g} is small for new heads, which hardly move with it; left out, it is {LR_OF_NEW_HEADS:g}"


def a_frozen_trunk_is_rounded(args: SftArgs, facts: Facts) -> Iterator[str]:
    stored = facts.hf_config.get("dtype") or facts.hf_config.get("torch_dtype")
    if args.mtp_mode == "heads_only" and args.torch_dtype == "bfloat16" and stored == "float32":
        yield (
            "--torch_dtype bfloat16 rounds the trunk, which the checkpoint has in float32: the heads learn behind a "
            "rounded one, and so it is exported; --torch_dtype float32 keeps it to the bit"
        )


def graft_is_asked_for_once(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.mtp_init == "graft" and args.mtp_graft_from is None:
        yield "--mtp_init graft does not say whose heads to take", "add --mtp_graft_from DIR"
    elif args.mtp_init != "graft" and args.mtp_graft_from is not None:
        yield (
            f"--mtp_graft_from without --mtp_init graft: heads come from {mtp_init_of(args, facts.heads)}",
            "add --mtp_init graft",
        )
    elif args.mtp_graft_from is not None and facts.hf_config:
        wanted = heads_of(args, facts.heads).layers
        grafted = Heads.from_config(facts.described("mtp_graft_from")[1])
        present = grafted.layers
        if grafted.draft_vocab and args.draft_vocab is None:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has heads with a draft vocabulary",
                "say which tokens they draft now: --draft_vocab N, or 0 for all",
            )
        if grafted.drafting and args.draft_for is None:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has heads that were trained for one engine",
                "say which one will run them: --draft_for vllm, sglang or transformers",
            )
        if wanted and present and wanted != present:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has MTP depth {present}, this run {wanted}",
                f"--mtp_num_layers {present}",
            )
