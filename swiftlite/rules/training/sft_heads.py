"""Rules of `megatron sft` for MTP heads: their number, their training and the source of their weights."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import unsupported
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import DRAFTER_KEY, MTP, Heads
from swiftlite.families import FAMILIES, dflash, gemma4_assistant
from swiftlite.families.architecture import Architecture
from swiftlite.families.drafters import BLOCKS, DRAFTERS, are_features
from swiftlite.families.index import known_architecture
from swiftlite.families.serving import stock
from swiftlite.families.serving.index import DRAFT_FOR
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import (
    LR_OF_NEW_HEADS,
    OVERLAP_LOSSES,
    heads_of,
    mtp_init_of,
    mtp_loss_of,
    new_heads_learn_alone,
    why_no_fit,
)
from swiftlite.plan.layout import choices, decoder_layers_per_stage, layout_of, mtp_is_with_losses
from swiftlite.rules import common


def mtp_weights_have_a_source(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or mtp_init_of(args, facts.heads) != "checkpoint":
        return
    wanted, present, given = args.mtp_num_layers, facts.heads.layers, f"--mtp_num_layers {args.mtp_num_layers}"
    named, new = "MTP weights", "--mtp_init fit_last_layer or random"
    if facts.heads.kind != MTP:
        named = f"weights of the drafter {facts.heads.kind!r}"
        if not DRAFTERS[facts.heads.kind].is_fitted:
            new = "--mtp_init random"
        if wanted is None:  # files can have MTP heads that config.json does not declare, but no other drafter
            wanted, given = heads_of(args, facts.heads).layers, "--mtp_init checkpoint"
    if not wanted or wanted < 0 or wanted == present:
        return
    if not present:
        yield f"{given}, but the checkpoint has no {named}", f"use {new} for new ones"
    else:
        yield (
            f"{given}, but the checkpoint has MTP depth {present}",
            f"remove --mtp_num_layers to train its {present}, or use {new} for {wanted}",
        )


def mtp_options_have_heads(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or heads_of(args, facts.heads).layers != 0:
        return
    why = "the checkpoint has none"
    if args.mtp_num_layers == 0:
        why = "--mtp_num_layers is 0"
    if args.mtp_mode == "heads_only":
        hint = _add_heads(args)
        if facts.heads.kind != MTP:
            hint = "remove --mtp_num_layers to train the drafter"
        yield f"--mtp_mode heads_only requires MTP heads or a drafter, but {why}", hint
    elif args.mtp_init not in (None, "checkpoint") and args.mtp_num_layers is None and facts.heads.kind == MTP:
        yield f"--mtp_init {args.mtp_init} requires --mtp_num_layers: {why}", _add_heads(args)


def _add_heads(args: SftArgs) -> str:
    init = args.mtp_init
    if init in (None, "checkpoint"):
        init = "fit_last_layer"
    return f"add --mtp_num_layers 1 --mtp_init {init}"


def one_layer_is_unrolled(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    layers = heads_of(args, facts.heads).layers
    if facts.hf_config and args.mtp_unroll > 1 and layers > 1 and not facts.heads.features:
        yield (
            f"--mtp_unroll {args.mtp_unroll} requires exactly one MTP layer, but there are {layers}",
            "remove --mtp_unroll, or train one new layer: --mtp_num_layers 1 --mtp_init fit_last_layer",
        )


def joint_weights_have_an_overlap(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    kind = mtp_loss_of(args)
    if heads_of(args, facts.heads).has_joint_weights and kind not in OVERLAP_LOSSES:
        yield (
            f"--mtp_unroll_weights joint does not support --mtp_loss {kind}, which is not computed with the overlap",
            f"use --mtp_loss {' or '.join(OVERLAP_LOSSES)}",
        )


def fit_has_something_to_fit_to(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    why = why_no_fit(args)
    if args.mtp_init == "fit_last_layer" and why:
        yield (
            f"--mtp_init fit_last_layer requires inputs of the last decoder layer on training rows, but {why}",
            "use --mtp_init copy_last_layer, which copies the layer without a fit",
        )


def options_apply_to_the_drafter(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.drafter_layers is not None and args.drafter not in BLOCKS:
        names = " or ".join(BLOCKS)
        yield f"--drafter_layers {args.drafter_layers} requires --drafter {names}", "remove it, or add --drafter dflash"
    if args.markov_rank is not None and args.drafter != dflash.DSPARK:
        yield f"--markov_rank {args.markov_rank} requires --drafter dspark", "remove it, or use --drafter dspark"
    is_other = args.drafter not in (None, facts.heads.kind)
    if args.mtp_init == "graft" and facts.heads.has_output_layer and (is_other or args.mtp_features):
        other = "--mtp_features" if args.mtp_features else f"--drafter {args.drafter}"
        yield f"{other}: --mtp_graft_from {args.mtp_graft_from} is another drafter", "remove one of the two"
    if args.drafter_anchors < 1 and facts.heads.kind not in BLOCKS:
        problem = f"--drafter_anchors {args.drafter_anchors} requires a block drafter"
        yield problem, "remove it, or use --drafter dflash"
    if facts.heads.kind == dflash.DSPARK and not mtp_is_with_losses(layout_of(args)):
        yield (
            f"--pipeline_model_parallel_layout {args.pipeline_model_parallel_layout}: the Markov head of a DSpark "
            "drafter is a part of the output layer",
            "put m on the stage of L",
        )
    if args.mtp_features and args.drafter:
        problem = f"--mtp_features is for MTP heads, not for --drafter {args.drafter}, which reads features anyway"
        yield problem, "remove one of the two"
    if facts.heads.kind == MTP:
        return
    name, drafter = _drafter(args, facts), DRAFTERS[facts.heads.kind]
    if (args.drafter or args.mtp_features) and args.mtp_mode != "heads_only":
        yield f"{name} requires --mtp_mode heads_only", "add --mtp_mode heads_only"
    copies = drafter.starts_with_copies
    can_start = {"fit_last_layer": drafter.is_fitted, "copy_last_layer": copies}
    if not can_start.get(args.mtp_init or "", True):
        hint = f"use --mtp_init {'copy_last_layer' if copies else 'random'}"
        yield f"--mtp_init {args.mtp_init} initializes MTP heads, not {name}", hint
    if args.draft_for:
        yield f"--draft_for {args.draft_for} sets the inputs of MTP heads, not of {name}", "remove it"
    has_clusters = facts.heads.kind == gemma4_assistant.KIND and gemma4_assistant.clusters_of(facts.hf_config)
    if args.mtp_init == "random" and has_clusters:
        yield (
            f"--mtp_init random: {name} has clusters of tokens (use_ordered_embeddings), which cannot be random",
            "remove it, or use --mtp_init graft --mtp_graft_from with the published assistant",
        )


def features_are_layers(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    num_layers = facts.hf_config.get("num_hidden_layers")
    if not args.mtp_features or not isinstance(num_layers, int):
        return
    if num_layers == 1:
        yield "--mtp_features requires a model with two decoder layers or more", "remove it"
    elif 0 in args.mtp_features or not are_features(args.mtp_features, num_layers):
        given, middle = ",".join(map(str, args.mtp_features)), sorted({num_layers // 2, max(num_layers - 3, 1)})
        yield (
            f"--mtp_features {given} must be numbers of decoder layers from 1 to {num_layers - 1}, in ascending order",
            f"for example --mtp_features {','.join(map(str, middle))}",
        )


def _drafter(args: SftArgs, facts: Facts) -> str:
    """Return the name, in messages, of a drafter other than MTP heads."""
    if args.drafter:
        return f"--drafter {args.drafter}"
    if args.mtp_features:
        return f"--mtp_features {','.join(map(str, args.mtp_features))}"
    if args.mtp_graft_from and DRAFTERS[facts.heads.kind].published:
        return f"--mtp_graft_from {args.mtp_graft_from}"
    return f"the drafter {facts.heads.kind!r} that config.json declares"


def drafter_fits_the_model(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    family = FAMILIES.get(str(facts.hf_config.get("model_type")))
    without = {key: value for key, value in facts.hf_config.items() if key != DRAFTER_KEY}
    is_given = args.drafter or args.mtp_features or args.mtp_graft_from
    if not is_given or family is None or known_architecture(without) is None:
        return
    if why := family.drafter(facts.hf_config).why_not(family, facts.hf_config):
        name = _drafter(args, facts)
        yield f"{name} is not supported for --model {args.model}: {why}", "omit it to train MTP heads"


def drafter_reads_a_frozen_trunk(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Reject what a drafter that reads inputs of decoder layers does not support."""
    heads = heads_of(args, facts.heads)
    if not heads.layers or not heads.features or facts.architecture is None:
        return
    name, without = _drafter(args, facts), "use --mtp_num_layers 0 to train without it"
    of_lora = "remove --tuner_type"
    if args.mtp_mode != "heads_only" and not args.drafter and not args.mtp_features:
        of_lora += f", or {without}"
        hint = f"add --mtp_mode heads_only, or {without}"
        if "mtp_mode" in unsupported(type(args)):
            hint = without
        yield f"{name} requires a frozen trunk", hint
    if heads.layers > 1:
        yield f"{name} has one layer, not {heads.layers}", "add --mtp_num_layers 1, and --mtp_unroll N"
    if args.tuner_type == "lora":
        yield f"{name} does not support --tuner_type lora", of_lora
    if args.mtp_init == "graft" and not DRAFTERS[heads.kind].published:
        yield f"{name} does not support --mtp_init graft", "remove --mtp_init and --mtp_graft_from"
    if facts.is_quantized:
        yield f"{name} does not support quantized models", "use the model before its quantization"


def drafter_is_with_the_layers_it_reads(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Reject layouts and options with which modules of an assistant of Gemma 4 are not next to those that it reads."""
    heads, architecture = heads_of(args, facts.heads), facts.architecture
    if not heads.has_output_layer or architecture is None:
        return
    name, layout = _drafter(args, facts), layout_of(args)
    if args.stream_trunk:
        yield f"{name} reads decoder layers and does not support --stream_trunk", "remove --stream_trunk"
    if args.draft_vocab or heads.draft_vocab:
        yield f"--draft_vocab is not supported: {name} has an output layer of its own", "add --draft_vocab 0"
    if layout.pipeline_model_parallel_size > 1 and not _is_with_features(layout, architecture, heads):
        yield (
            f"--pipeline_model_parallel_size {layout.pipeline_model_parallel_size}: {name} must be on the stage of the "
            f"decoder layers {' and '.join(map(str, heads.features))} (from 0), whose keys it reads, and of the loss",
            "give the last stage more layers, or use --tensor_model_parallel_size",
        )


def _is_with_features(layout: ParallelLayout, architecture: Architecture, heads: Heads) -> bool:
    """Return whether the last stage has the heads and the decoder layers whose inputs they read."""
    num_layers = len(architecture.layers)
    try:
        last = decoder_layers_per_stage(layout, num_layers)[-1]
    except ValueError:  # which `layout_problems` reports
        return True
    return mtp_is_with_losses(layout) and num_layers - last <= min(heads.features)


def draft_vocab_can_be_learned(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    heads = heads_of(args, facts.heads)
    whole = "--draft_vocab 0 lets them draft all tokens"
    if not facts.hf_config or not heads.layers or not (args.draft_vocab or heads.draft_vocab):
        return
    if args.draft_vocab and args.tuner_type == "lora":
        return  # `heads_and_adapters_go_together` reports it
    vocab = "the draft vocabulary of the checkpoint's heads"
    if args.draft_vocab:
        vocab = f"--draft_vocab {args.draft_vocab}"
    size = facts.hf_config.get("vocab_size", 0)
    if facts.architecture is not None and facts.architecture.outside.heads_have_output_layers:
        yield f"{vocab} is not supported: each head of this model has an output layer of its own", whole
    elif not method_of(args).imitates_rows:
        yield f"{vocab} requires a frozen trunk", f"{whole}; or train heads: swiftlite megatron sft"
    elif args.mtp_mode != "heads_only":
        yield f"{vocab} requires a frozen trunk", f"add --mtp_mode heads_only; {whole}"
    elif mtp_loss_of(args) == "ce":
        yield f"{vocab} does not support --mtp_loss ce, whose targets include all tokens", f"remove --mtp_loss; {whole}"
    elif args.draft_vocab and args.streaming:
        yield f"{vocab} counts tokens in all rows and does not support --streaming", "remove one of the two"
    elif args.draft_vocab and args.sft_mock_dataset_config_json:
        problem = f"{vocab} counts tokens in answers and does not support --sft_mock_dataset_config_json"
        yield problem, "remove --draft_vocab"
    elif args.draft_vocab and args.draft_vocab >= size:
        yield f"{vocab} must be below the model's vocab_size {size}", "use a smaller number, or remove it"


def draft_for_is_measured(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    family = FAMILIES.get(str(facts.hf_config.get("model_type")))
    if args.draft_for in (None, stock.STOCK):
        return
    if family and DRAFT_FOR[args.draft_for](family) is None:
        yield (
            f"--draft_for {args.draft_for} is not supported for {family.name}: not measured with this engine",
            "remove it to train heads for vllm",
        )


def vllm_drafts_without_plugin(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    family, heads = FAMILIES.get(str(facts.hf_config.get("model_type"))), heads_of(args, facts.heads)
    if args.draft_for != stock.STOCK or family is None or facts.architecture is None:
        return
    flag, hint = f"--draft_for {stock.STOCK}", "use --draft_for vllm"
    if why := stock.why_not(family, facts.hf_config):
        yield f"{flag} is not supported for {family.name}: {why}", hint
    if heads.layers > 1:
        yield f"{flag} supports one MTP layer, not {heads.layers}", "add --mtp_num_layers 1, and --mtp_unroll N"
    if args.draft_vocab or heads.draft_vocab:
        yield f"{flag} does not support a draft vocabulary: vLLM drafts all tokens", "add --draft_vocab 0"
    if facts.is_quantized:
        yield f"{flag} does not support quantized models, whose drafts vLLM builds quantized", hint


def trunk_states_repeat(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Require the same micro-batches in every epoch, because hidden states are cached by micro-batch."""
    if args.cache_trunk_states is None:
        return
    flag = "--cache_trunk_states"
    if Path(args.cache_trunk_states).is_file():
        yield f"{flag} {args.cache_trunk_states} is a file", "give a directory, which may be new"
    if args.output_dir and Path(args.cache_trunk_states).resolve() == Path(args.output_dir).resolve():
        yield f"{flag} {args.cache_trunk_states} must not be --output_dir", "give a separate directory"
    if args.mtp_mode != "heads_only":
        yield f"{flag} requires a frozen trunk", "add --mtp_mode heads_only, or remove it"
    if layout_of(args).pipeline_model_parallel_size > 1:
        yield f"{flag} does not support pipeline parallelism", "use --tensor_model_parallel_size"
    if args.streaming or args.sft_mock_dataset_config_json:
        yield f"{flag} requires files with a fixed set of rows", "give files with --dataset, without --streaming"
    if args.micro_batch_size > 1 and args.sequence_packing_scheduler == "none":
        yield (
            f"{flag} does not support --micro_batch_size {args.micro_batch_size}: micro-batches differ in every epoch",
            "use --micro_batch_size 1 and --packing true",
        )
    if args.sequence_packing_scheduler != "none":
        yield f"{flag} does not support --sequence_packing_scheduler", "remove one of the two"
    for name in common.changed(args, ("moe_aux_loss_coeff", "moe_router_bias_update_rate")):
        yield f"{flag} does not support --{name}: routers of a cached trunk do not run", f"remove --{name}"


def trunk_in_files_is_only_read(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Reject options that need decoder layers during training."""
    if not args.stream_trunk:
        return
    flag = "--stream_trunk"
    if args.cache_trunk_states is None:
        yield (
            f"{flag} requires --cache_trunk_states",
            "add --cache_trunk_states DIR, for the hidden states of the trunk",
        )
    if args.tuner_type == "lora":
        yield f"{flag} does not support --tuner_type lora", "remove one of the two"
    if facts.architecture is not None and not facts.architecture.is_chain:
        problem = f"{flag}: decoder layers of this model read states of earlier ones besides the output of the last"
        yield problem, f"remove {flag}"
    for name in common.changed(args, ("fp8_format", "fp4_format")):
        yield f"{flag} does not support --{name}", f"remove --{name}"
    for name in common.changed(args, ("acceptance_samples",)):
        if args.acceptance_samples:
            yield (
                f"{flag} does not support --{name}, whose answers are generated token by token",
                f"remove --{name}, and use swiftlite evaluate on the export",
            )


def idle_of_trunk(args: SftArgs) -> dict[str, tuple[bool, str]]:
    """Return whether options of the trunk have no effect, and why, as `sft.Idle`."""
    return {"stream_trunk_gb": (not args.stream_trunk, "--stream_trunk is not given")}


def heads_learn_slowly(args: SftArgs, facts: Facts) -> Iterator[str]:
    if args.lr is None or args.lr >= LR_OF_NEW_HEADS / 30:
        return
    if new_heads_learn_alone(args, facts.heads):
        yield f"--lr {args.lr:g} is small for new heads; without --lr it is {LR_OF_NEW_HEADS:g}"


def heads_draft_fewer_tokens(args: SftArgs, facts: Facts) -> Iterator[str]:
    trained = facts.heads.unroll
    is_continued = heads_of(args, facts.heads).layers and mtp_init_of(args, facts.heads) == "checkpoint"
    if facts.heads.layers and is_continued and args.mtp_unroll < trained:
        yield (
            f"--mtp_unroll {args.mtp_unroll}: the export will draft {args.mtp_unroll} tokens, but the heads of the "
            f"checkpoint were trained for {trained}; --mtp_unroll {trained} keeps them"
        )


def blocks_have_several_tokens(args: SftArgs, facts: Facts) -> Iterator[str]:
    if args.drafter in BLOCKS and args.mtp_unroll == 1:
        yield f"--drafter {args.drafter} with --mtp_unroll 1 drafts one token, not a block; --mtp_unroll 5 drafts five"


def a_frozen_trunk_is_rounded(args: SftArgs, facts: Facts) -> Iterator[str]:
    stored = facts.hf_config.get("dtype") or facts.hf_config.get("torch_dtype")
    if args.mtp_mode == "heads_only" and args.torch_dtype == "bfloat16" and stored == "float32":
        also = ", also in exports"
        if facts.is_quantized:  # exports keep its files
            also = ""
        yield (
            f"--torch_dtype bfloat16 rounds the float32 trunk of the checkpoint{also}; --torch_dtype float32 "
            "keeps it bitwise identical"
        )


def graft_is_given_once(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.mtp_init == "graft" and args.mtp_graft_from is None:
        hint = "add --mtp_graft_from DIR"
        if "mtp_graft_from" in unsupported(type(args)):
            hint = "remove --mtp_init"
        yield "--mtp_init graft requires --mtp_graft_from", hint
    elif args.mtp_init != "graft" and args.mtp_graft_from is not None:
        yield (
            f"--mtp_graft_from requires --mtp_init graft, but --mtp_init is {mtp_init_of(args, facts.heads)}",
            "add --mtp_init graft",
        )
    elif args.mtp_graft_from is not None and facts.hf_config:
        wanted = heads_of(args, facts.heads).layers
        grafted = Heads.from_config(facts.described("mtp_graft_from")[1])
        present = grafted.layers
        if grafted.kind != MTP:
            return  # `graft_has_heads` reports it
        if grafted.draft_vocab and args.draft_vocab is None:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has heads with a draft vocabulary",
                "add --draft_vocab N, or --draft_vocab 0 for all tokens",
            )
        if grafted.drafting and args.draft_for is None:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has heads trained for one engine",
                f"add the engine that will run them: --draft_for {choices(list(DRAFT_FOR))}",
            )
        if wanted and present and wanted != present:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has MTP depth {present}, but --mtp_num_layers is {wanted}",
                f"use --mtp_num_layers {present}",
            )
