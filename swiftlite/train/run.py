"""Execute a training run (a command of `megatron`), phase by phase.

The parts that differ between methods are in the method's `Training` (`train/methods/`). Three names are similar: a
`Trainable` selects the trained parameters, a `TrainState` holds the model with its optimizer, and a `Trainer` runs the
steps.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import HeldOut
from swiftlite.acceptance.report import ACCEPTANCE_FILE
from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import ProfilingArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.base.redact import redact
from swiftlite.bridge.adapters.rows import saved_names
from swiftlite.data import draft_vocab
from swiftlite.data.changed_samples import lengths_of
from swiftlite.data.dataset import Data
from swiftlite.data.encoder import Encoder
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.packing.stream import Readers, Stream
from swiftlite.data.rows.conversation import BadRow
from swiftlite.data.rows.sources import DataFile, check_row
from swiftlite.data.template import load_tokenizer, pad_token_of
from swiftlite.families.resolved import HfModel, resolve_options
from swiftlite.methods.index import method_of
from swiftlite.model.build import check_computable
from swiftlite.model.trunk import TrunkSource
from swiftlite.plan.cost.flops import Flops, training_flops
from swiftlite.plan.heads import heads_for_engine
from swiftlite.plan.kernels import largest_head, this_machine
from swiftlite.plan.layout import group_of
from swiftlite.plan.run import Plan, Schedule, make_plan, make_schedule
from swiftlite.plan.text import nsys_line
from swiftlite.plan.trainable import Trainable, trainable_of, trained_parts_of
from swiftlite.plan.trunk import Trunk
from swiftlite.runtime.malloc import return_large_blocks
from swiftlite.runtime.mesh import Mesh
from swiftlite.runtime.presence import wait_for_ranks
from swiftlite.runtime.progress import check_launcher
from swiftlite.store.copies import Copies
from swiftlite.train import phases
from swiftlite.train.bad_steps import BadSteps
from swiftlite.train.batches.anchors import with_anchors
from swiftlite.train.batches.exchange import gather
from swiftlite.train.batches.micro_batches import Batches, MicroBatches, SampleRows
from swiftlite.train.batches.prefetch import Prefetched
from swiftlite.train.batches.streaming import StreamedBatches, StreamedSteps, reads
from swiftlite.train.best_model import BestModel
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from swiftlite.train.checkpoint.checkpointer import Checkpointer
from swiftlite.train.checkpoint.source import check_model_links
from swiftlite.train.checkpoint.state import CheckpointState, StreamState
from swiftlite.train.head_fit import samples_to_fit
from swiftlite.train.hidden_state_cache import check_directory, open_hidden_state_cache
from swiftlite.train.methods.conversations import image_extras_of
from swiftlite.train.methods.training import TrainBatches, Training, training_of
from swiftlite.train.metrics.loggers import open_metric_loggers
from swiftlite.train.profiling import make_profiler
from swiftlite.train.restarts import make_restart_clock
from swiftlite.train.train_state import TrainState, make_train_state
from swiftlite.train.trainer import Trainer


def run(args: SftArgs, after_step: phases.AfterStep | None = None) -> int:
    """Run a training command; the class of the options selects the method.

    Args:
        after_step: called on every rank after each step, with the step's number and the updated weights.

    Returns:
        0, or 128 plus the number of the signal that stopped the run (a checkpoint was saved).
    """
    check_launcher(args.max_restarts)
    trunk = Trunk.of(args)
    if after_step:
        trunk.check_weights_can_be_sent()
    if not trunk.holds_layers:
        return_large_blocks()
    models = resolve_options(args)
    with (
        phases.open_session(args, models["model"]) as mesh,
        # Closed in reverse: copies end while the directory is locked and ranks can still exchange messages.
        phases.claim_output_dir(args),
        phases.copy_checkpoints(args) as copies,
    ):
        prepared = prepare(args, mesh, models)
        # Only now are the files of a run written: one that `prepare` refuses leaves none behind.
        state = phases.restore(prepared)
        trainer = make_trainer(prepared, state, after_step, copies)
        if copies and prepared.checkpoint and prepared.is_first_rank:  # a killed run may not have copied it
            copies.add_alone(prepared.checkpoint)
        try:
            outcome = phases.fit(prepared, trainer, state.step, make_held_out(prepared))
        finally:
            trainer.batches.release()
        return phases.finish(prepared, outcome)


def prepare(args: SftArgs, mesh: Mesh, models: Mapping[str, HfModel]) -> phases.Run:
    """Read data and model, and create everything that training needs. Only caches are written to disk.

    Args:
        models: the resolved models of the options, see `resolve_options`.

    Raises:
        UserError: data, model or checkpoint cannot be used, or ranks have different settings or files.
    """
    hf_model = models["model"]
    training = training_of(args)
    check_supported(args, mesh, hf_model, training)
    tokenizer = load_tokenizer(hf_model.directory, args.trust_remote_code, args.chat_template_kwargs)
    hf_model = with_pad_token(hf_model, tokenizer)
    vocab_size = hf_model.config["vocab_size"]
    encoder = training.encoder(args, tokenizer, hf_model)
    check_first_rows(args, encoder)
    data = training.load(args, encoder, vocab_size)
    # Not a collective, which has a time limit: tokenizing can take hours, and not equally many on each node.
    wait_for_ranks("reading and tokenizing rows")
    extras = list(training.extras)
    if data.has_images:
        # Otherwise the tower is not built, and exports contain its tensors unchanged.
        hf_model = hf_model.with_images()
        Trunk.of(args).check_tower(hf_model.tower, hf_model.family.name)
        extras += image_extras_of(hf_model, mesh)
    warn_of_long_samples(data, hf_model)
    plan = plan_run(args, mesh, hf_model, data)
    trainable = trainable_in(args, plan, hf_model)
    if data.has_images:
        logger.info("rows with images: the vision tower is computed; the run trains %s", trainable.words)
    flops = flops_of(args, plan, hf_model, trainable)
    # Without a pad token, any token will do, because padding is masked.
    batches = Batches(plan, mesh.dp.rank(), cast(int, tokenizer.pad_token_id or 0), flops, extras)
    rows = batches.rows(data.train)
    schedule = make_schedule(args, len(rows))
    check_profile_steps(args, schedule)

    checkpoint = phases.checkpoint_to_resume(args)
    # After the choice of the checkpoint, which ranks with another file system may not have.
    phases.check_ranks_agree(args, hf_model, plan, data, checkpoint)
    data_state = phases.data_state(data, tokenizer)
    phases.check_same_data(args, checkpoint, data_state, data)
    # Then checkpoints lack weights, which an export reads from --model.
    if plan.lora or plan.trunk.is_in_base:
        check_same_base(args, hf_model, checkpoint)
    rows_to_fit = None
    # A checkpoint replaces the heads of a resumed run, so they are not fitted again.
    if checkpoint is None and plan.mtp_init == "fit_last_layer":
        rows_to_fit = batches_to_fit(hf_model, batches, data)
    graft_from = models.get("mtp_graft_from")
    # After all checks, because it reads the whole model.
    train_state = make_train_state(args, mesh, hf_model, plan, schedule, trainable, rows_to_fit, graft_from)
    wait_for_ranks("reading the model")
    if checkpoint is None:  # a resumed run loads other weights afterwards
        logger.info("%s", train_state.weights_report)
    prepared = phases.Run(
        args=args,
        mesh=mesh,
        hf_model=hf_model,
        graft_from=graft_from,
        ref_model=models.get("ref_model"),
        tokenizer=tokenizer,
        plan=plan,
        schedule=schedule,
        data=data,
        batches=batches,
        rows=rows,
        encoder=encoder,
        checkpoint=checkpoint,
        train_state=train_state,
        data_state=data_state,
        trunk=open_source(args, mesh, hf_model, batches, train_state, rows, data),
        teacher_model=models.get("teacher_model"),
    )
    return training.prepare(prepared)


def with_pad_token(hf_model: HfModel, tokenizer: PreTrainedTokenizerBase) -> HfModel:
    """Return the model; a reward model with the pad token, by which transformers finds the last token of a row."""
    if not hf_model.family.is_reward_model:
        return hf_model
    return replace(hf_model, config={**hf_model.config, "pad_token_id": pad_token_of(tokenizer)})


def flops_of(args: SftArgs, plan: Plan, hf_model: HfModel, trainable: Trainable) -> Flops:
    """Return the FLOPs of a step as a function of its tokens."""
    return training_flops(
        hf_model.config,
        plan.heads,
        heads_only=args.mtp_mode == "heads_only" or (trainable.freezes_trunk and args.indexer_mode != "indexer_only"),
        trunk_is_read=plan.trunk.cache is not None,
        lora=plan.lora,
        tower=hf_model.tower,
        trained_parts=trained_parts_of(args),
        freeze_llm=args.freeze_llm,
        indexer_mode=args.indexer_mode,
    )


def check_supported(args: SftArgs, mesh: Mesh, hf_model: HfModel, training: Training) -> None:
    """Check requirements before any data is read.

    Raises:
        UserError: the model's directory contains a link that points outside of the directory, the device does not
            support the layout, or the method does not support streaming.
    """
    check_model_links(hf_model.directory)
    check_computable(mesh.layout, mesh.device)
    if args.cache_trunk_states is not None and dist.get_rank() == 0:
        check_directory(Path(args.cache_trunk_states))
    if args.streaming and training.extras:
        raise UserError(f"--streaming is not supported by {method_of(args).words}", "omit --streaming")


def check_first_rows(args: SftArgs, encoder: Encoder) -> None:
    """Parse the first rows of streamed files, so that rows of another format are refused before anything is written.

    Raises:
        UserError: a row is bad, and --max_bad_rows allows no bad row.
    """
    if not args.streaming or args.max_bad_rows:
        return
    for name in args.dataset:
        file = DataFile(Path(name))
        for row in itertools.islice(file.unparsed_rows(), NUM_FIRST_ROWS):
            checked = check_row(row.parse(), f"{file.name}:{row.line}", system=args.system, parse=encoder.parse)
            if isinstance(checked, BadRow):
                raise UserError(str(checked), checked.hint or "correct the row, or use --max_bad_rows 1")


NUM_FIRST_ROWS = 32
"""Number of rows of each streamed file that are checked before the run starts."""


def check_profile_steps(args: SftArgs, schedule: Schedule) -> None:
    """Check that the run has the steps to profile, before the model is read. For nsys, log how to start the run.

    Raises:
        UserError: the run ends before the last step to profile.
    """
    if args.profile_steps and args.profile_steps[-1] > schedule.steps:
        steps = " ".join(map(str, args.profile_steps))
        problem = f"--profile_steps {steps}: the run has {schedule.steps} steps"
        raise UserError(problem, f"use steps up to {schedule.steps}, or more --num_train_epochs")
    if args.profile_steps and args.profile_kind == "nsys":
        logger.info("--profile_kind nsys records only if this command was started with: %s", nsys_line(args))


def warn_of_long_samples(data: Data, hf_model: HfModel) -> None:
    """Log how many samples are longer than the model's maximum context. Streamed rows are not counted."""
    positions = hf_model.config.get("max_position_embeddings")
    if positions is None:
        return
    lengths, starts = lengths_of(data.train)
    num_long = int((np.maximum.reduceat(lengths, starts) > positions).sum())
    if num_long:
        logger.warning(
            "%d of %d samples are longer than max_position_embeddings in config.json: limit them with --max_length %d",
            num_long,
            len(data.train),
            positions,
        )


def plan_run(args: SftArgs, mesh: Mesh, hf_model: HfModel, data: Data) -> Plan:
    """Plan the run on this machine, with its heads and their draft vocabulary."""
    heads = heads_for_engine(args, hf_model.heads, hf_model.family)
    if args.draft_vocab and heads.layers:
        vocab_size = hf_model.config["vocab_size"]
        chosen = draft_vocab.choose_from(data, args.draft_vocab, vocab_size, args.tensor_model_parallel_size)
        heads = replace(heads, draft_vocab=chosen)
    machine = this_machine(mesh.device.is_cuda, mesh.device.capability)
    largest = largest_head(hf_model.family.architecture(hf_model.config))
    return make_plan(
        args,
        dist.get_world_size(),
        hf_model.heads,
        machine,
        largest,
        heads=heads,
        is_quantized=hf_model.is_quantized,
    )


def trainable_in(args: SftArgs, plan: Plan, hf_model: HfModel) -> Trainable:
    """Return which parameters of the model are trained.

    Raises:
        UserError: an option is about the tower, and the run computes no tower.
    """
    if plan.lora is None:
        has_tower = hf_model.tower is not None
        if args.freeze_llm and not has_tower:
            raise UserError(
                "--freeze_llm true requires rows with images",
                "to train only heads: swiftlite megatron sft --mtp_mode heads_only",
            )
        trained = [f"--{name} false" for name in ("freeze_vit", "freeze_aligner") if not getattr(args, name)]
        if trained and not has_tower:
            given = " and ".join(trained)
            raise UserError(f"{given}: the vision tower is trained only on rows with images", f"remove {given}")
        return trainable_of(args, plan.heads, has_tower=has_tower)
    saved = saved_names(plan.lora, hf_model.family.rows(hf_model.config, 0))
    return trainable_of(args, plan.heads, plan.lora, saved)


def batches_to_fit(hf_model: HfModel, batches: Batches, data: Data) -> MicroBatches:
    """Return the micro-batches to which new heads are fitted."""
    num_inputs = (2 + len(hf_model.heads.features)) * hf_model.config["hidden_size"]
    chosen = samples_to_fit(data.train, num_inputs)
    # Heads must not imitate rejected answers and companions.
    return batches.evaluation([replace(sample, others=(), companion=None) for sample in chosen])


def check_same_base(args: SftArgs, hf_model: HfModel, checkpoint: Path | None) -> None:
    """Compute the digest of --model, and check that a resumed run has the weights that it was started with. Collective.

    This is done before the trunk is read, so that files which are replaced later have another digest.

    Raises:
        UserError: the checkpoint was trained with other weights of --model.
    """
    sha256 = shared_digest_of(hf_model.directory)
    if checkpoint is None:
        return
    base = CheckpointState.read(checkpoint).base
    if base is not None and base.sha256 != sha256:
        raise UserError(
            f"--resume: {checkpoint} was trained with other weights of --model {args.model}",
            "restore the weights, or start a new run in another --output_dir",
        )


def make_checkpointer(
    run: phases.Run, state: CheckpointState, copies: Copies | None, reference: Sequence[MegatronModule]
) -> Checkpointer:
    """Return the checkpointer of a restored run."""
    args = run.args
    return Checkpointer(
        run.output_dir,
        run.mesh,
        run.train_state.chunks,
        run.train_state.optimizer,
        phases.state_of(run, state.base),
        keep=args.save_total_limit,
        is_async=args.async_save,
        copies=copies,
        reference=reference,
    )


def make_trainer(
    run: phases.Run,
    state: CheckpointState,
    after_step: phases.AfterStep | None = None,
    copies: Copies | None = None,
) -> Trainer:
    """Return the trainer of a restored run.

    Args:
        state: result of `phases.restore`.
        copies: copies checkpoints to a store.
    """
    args, train_state = run.args, run.train_state
    batches = open_train_batches(run, state)
    wait_for_ranks("opening the rows")  # a resumed stream skips those that it has read
    evaluates_rows = method_of(args).evaluates_rows
    checkpointer = make_checkpointer(run, state, copies, batches.reference)
    checkpointer.clean_up()
    metric_loggers = []
    if run.is_first_rank:
        # Trackers can be services, which must not get the keys in options.
        config = redact(asdict(args))
        metric_loggers = open_metric_loggers(
            run.output_dir, state.step, run.schedule.steps, args.report_to, config, resumes=args.resume
        )
    hand_out = phases.hand_out_weights(run, after_step) if after_step else lambda step: None

    def after(step: int) -> None:
        batches.after_step(step)
        hand_out(step)

    return Trainer(
        mesh=run.mesh,
        model=train_state.wrapped,
        objective=training_of(args).make_objective(run),
        optimizer=train_state.optimizer,
        scheduler=train_state.scheduler,
        plan=run.plan,
        schedule=run.schedule,
        batches=batches,
        # Methods whose rows are prompts evaluate completions instead (`TrainBatches.evaluate`).
        eval_batches=run.batches.evaluation(run.data.val if evaluates_rows else [], args.eval_iters),
        flops=run.batches.flops,
        metric_loggers=metric_loggers,
        logging_steps=args.logging_steps,
        checkpointer=checkpointer,
        bad_steps=BadSteps.of(run.mesh, args.skip_bad_steps, state.bad_steps),
        consumed=state.consumed,
        lacks_evaluation=run.is_first_rank and phases.lacks_evaluation(run, state.step),
        after_step=after,
        seed=args.seed,
        profiler=make_profiler(
            group_of(args, ProfilingArgs), run.output_dir, dist.get_rank(), is_cuda=run.mesh.device.is_cuda
        ),
        restart_clock=make_restart_clock(is_first_rank=run.is_first_rank),
        best=BestModel.of(args, state.step, is_first_rank=run.is_first_rank),
    )


def open_source(
    args: SftArgs,
    mesh: Mesh,
    hf_model: HfModel,
    batches: Batches,
    train_state: TrainState,
    rows: SampleRows,
    data: Data,
) -> TrunkSource:
    """Return the source of the trunk's output in each step, with the cache of --cache_trunk_states if it is given."""
    if args.cache_trunk_states is None:
        return train_state.trunk
    directory, held_out = Path(args.cache_trunk_states), batches.rows(data.val)
    cache = open_hidden_state_cache(
        directory, mesh, batches, hf_model, train_state, rows, held_out, args.torch_dtype, Path(args.output_dir)
    )
    cache.fill(batches, rows, held_out)
    return cache


def open_train_batches(run: phases.Run, state: CheckpointState) -> TrainBatches:
    """Return the source of the micro-batches of all steps."""
    args = run.args
    if open_batches := training_of(args).open_batches:
        return open_batches(run)
    if args.streaming:
        streamed = open_streamed_batches(run, state.stream)
        get = with_anchors(streamed.train, args.drafter_anchors, args.seed)
        return TrainBatches(get, streamed.state, lambda step: streamed.sources())
    sampler = Sampler(len(run.rows), run.plan.global_batch_size, args.seed, args.dataset_shuffle)
    batches = TrainBatches(  # the rows depend only on the step
        with_anchors(partial(run.batches.train, run.rows, sampler), args.drafter_anchors, args.seed),
        sources_of=lambda step: run.rows.sources(sampler.global_batch(step)),
    )
    if run.mesh.device.is_cuda:  # on a CPU, the thread would compete with the step
        prefetched = Prefetched(batches.get, run.schedule.steps)
        batches = replace(batches, get=prefetched, release=prefetched.close)
    return batches


def make_held_out(run: phases.Run) -> HeldOut:
    """Return the held-out prompts of the run, with the options for generating answers to them."""
    args = run.args
    prompts, eos_token_ids = training_of(args).held_out_prompts(run)
    if not run.plan.trunk.holds_layers:
        prompts = ()  # continuing them would read all layers for each token
    return HeldOut(
        path=run.output_dir / ACCEPTANCE_FILE,
        mesh=run.mesh,
        num_drafts=run.plan.heads.drafts,
        prompts=prompts,
        eos_token_ids=eos_token_ids,
        max_new_tokens=args.acceptance_max_new_tokens,
        max_length=run.hf_model.max_length,
        tokenizer=run.tokenizer,
        extras=run.batches.extras,
        trunk_is_frozen=run.train_state.trainable.freezes_trunk and run.args.indexer_mode != "indexer_only",
    )


def open_streamed_batches(run: phases.Run, state: StreamState | None) -> StreamedBatches:
    """Open the rows of --streaming. If there is a state from a checkpoint, continue at its position."""
    if not reads(run.mesh):
        return StreamedBatches(run.batches, None, None, run.mesh, run.output_dir)
    args, group = run.args, run.mesh.dp
    stream = Stream(
        args.dataset,
        copy.deepcopy(run.encoder),  # a thread of the stream uses it; two threads must not share a tokenizer
        readers=Readers(group.rank(), group.size(), partial(gather, group=group, device=run.mesh.device.torch_device)),
        probabilities=args.interleave_prob,
        seed=args.seed,
        max_bad_rows=args.max_bad_rows,
        system=args.system,
        state=state,
    )
    steps = StreamedSteps(run.batches, stream, args.streaming_buffer_size, state)
    return StreamedBatches(run.batches, stream, steps, run.mesh, run.output_dir)
