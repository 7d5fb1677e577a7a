"""`swiftlite megatron sft`: a run, phase by phase. Those that every training command shares are in `phases.py`.

Three names to keep apart: a `Trainable` says which parameters learn, a `Learner` holds the model with its optimizer, a
`Trainer` takes the steps.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from swiftlite.acceptance.held_out import HeldOut, Prompt
from swiftlite.acceptance.report import ACCEPTANCE_FILE
from swiftlite.args.commands import SftArgs
from swiftlite.bridge.adapter_files import Base
from swiftlite.bridge.adapter_rows import saved_names
from swiftlite.conventions.index import CONVENTIONS
from swiftlite.data import draft_vocab
from swiftlite.data.dataset import Data
from swiftlite.data.sampler import Sampler
from swiftlite.data.stream import Readers, Stream
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.errors import UserError
from swiftlite.families import Family
from swiftlite.heads import Heads
from swiftlite.log import logger
from swiftlite.model.build import check_computable
from swiftlite.model.open import HfModel, read_hf_model
from swiftlite.plan.flops import training_flops
from swiftlite.plan.kernels import largest_head, this_machine
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.plan.trainable import trainable_of
from swiftlite.redact import redact
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases
from swiftlite.train.base_digest import shared_digest_of
from swiftlite.train.batches import Batches
from swiftlite.train.checkpoint import Checkpointer
from swiftlite.train.exchange import gather
from swiftlite.train.head_fit import samples_to_fit
from swiftlite.train.learner import Learner, make_learner
from swiftlite.train.objective import NextTokenObjective, Objective
from swiftlite.train.rows import LoadData, MakeEncoder, load_data, make_conversation_encoder
from swiftlite.train.sinks import open_sinks
from swiftlite.train.source import check_model_links
from swiftlite.train.streaming import StreamedBatches, StreamedSteps, reads
from swiftlite.train.trainer import GetBatches, Trainer
from swiftlite.train.trunk_states import TrunkStates, open_trunk_states


def run(args: SftArgs, after_step: phases.AfterStep | None = None) -> int:
    """Fine-tune; returns 0, or 128 plus the number of the signal that stopped the run (a checkpoint was saved).

    Args:
        after_step: called on every rank after each step with its number and the weights as they are then.
    """
    with phases.open_session(args) as mesh, phases.claim_output_dir(args):
        prepared = prepare(args, mesh)
        state = phases.restore(prepared)
        trainer = make_trainer(prepared, state, after_step)
        outcome = phases.fit(prepared, trainer, state["step"], make_held_out(prepared))
        return phases.finish(prepared, outcome)


def prepare(
    args: SftArgs, mesh: Mesh, make_encoder: MakeEncoder = make_conversation_encoder, load: LoadData = load_data
) -> phases.Run:
    """Read data and model, and make what trains it; nothing is written but the cache of --cache_trunk_states.

    Args:
        make_encoder, load: of the command's rows.

    Raises:
        UserError: data, model or checkpoint cannot be used, or the ranks do not agree.
    """
    hf_model = read_hf_model(args.model)
    check_model_links(hf_model.directory)
    head = largest_head(hf_model.family.architecture(hf_model.config))
    plan = make_plan(args, dist.get_world_size(), hf_model.heads, this_machine(mesh.device.is_cuda), head)
    plan = replace(plan, heads=fed_as_asked(args, hf_model.family, plan.heads))
    check_computable(plan.layout, mesh.device)
    saved = saved_names(plan.lora, hf_model.family.rows(hf_model.config, 0)) if plan.lora else ()
    trainable = trainable_of(args, plan.heads, plan.lora, saved)

    tokenizer = load_tokenizer(hf_model.directory, args.trust_remote_code)
    vocab_size = hf_model.config["vocab_size"]
    encoder = make_encoder(args, tokenizer, vocab_size)
    data = load(args, encoder, vocab_size)
    plan = replace(plan, heads=choose_draft_vocab(args, hf_model, plan.heads, data))
    flops = training_flops(
        hf_model.config,
        plan.heads,
        heads_only=trainable.freezes_trunk,
        trunk_is_read=args.cache_trunk_states is not None,
        lora=plan.lora,
    )
    batches = Batches(plan, mesh.dp.rank(), cast(int, tokenizer.pad_token_id or 0), flops)
    rows = batches.rows(data.train)
    schedule = make_schedule(args, len(rows))

    checkpoint = phases.checkpoint_to_resume(args)
    phases.check_ranks_agree(args, plan, data, checkpoint)
    data_state = phases.data_state(args, data, tokenizer)
    phases.check_same_data(checkpoint, data_state)
    rows_to_fit = None
    if checkpoint is None and plan.mtp_init == "fit_last_layer":
        chosen = samples_to_fit(data.train, hf_model.config["hidden_size"])
        rows_to_fit = batches.evaluation([replace(sample, rejected=None) for sample in chosen])
    learner = make_learner(args, mesh, hf_model, plan, schedule, trainable, rows_to_fit)
    if checkpoint is None:  # so the weights of this report are those that training starts from
        logger.info("%s", learner.weights_report)
    return phases.Run(
        args=args,
        mesh=mesh,
        hf_model=hf_model,
        tokenizer=tokenizer,
        plan=plan,
        schedule=schedule,
        data=data,
        batches=batches,
        rows=rows,
        encoder=encoder,
        checkpoint=checkpoint,
        learner=learner,
        data_state=data_state,
        trunk_states=open_cache(args, mesh, hf_model, batches, learner, data),
    )


def adapter_state(run: phases.Run, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what checkpoints say of adapters and the model that they belong to; collective where a run starts.

    Args:
        state: what `phases.restore` returned.
    """
    if run.plan.lora is None:
        return {}
    base = state.get("base")
    if base is None:
        base = asdict(Base(run.args.model, shared_digest_of(run.hf_model.directory)))
    return {"lora": asdict(run.plan.lora), "base": base}


def make_trainer(
    run: phases.Run,
    state: Mapping[str, Any],
    after_step: phases.AfterStep | None = None,
    objective: Objective | None = None,
) -> Trainer:
    """The trainer of a run that has been restored.

    Args:
        state: what `phases.restore` returned.
        objective: what is minimised; unset: the next-token loss.
    """
    args, learner = run.args, run.learner
    train_batches, get_data_state = open_train_batches(run, state)
    checkpointer = Checkpointer(
        run.output_dir,
        run.mesh,
        learner.chunks,
        learner.optimizer,
        {
            "mtp_num_layers": run.plan.heads.layers,
            "torch_dtype": args.torch_dtype,
            "data": dict(run.data_state),
            **adapter_state(run, state),
        },
        keep=args.save_total_limit,
        is_async=args.async_save,
    )
    checkpointer.clean_up()
    sinks = []
    if run.is_first_rank:
        config = redact(asdict(args))
        sinks = open_sinks(run.output_dir, state["step"], run.schedule.steps, args.report_to, config)
    return Trainer(
        mesh=run.mesh,
        model=learner.wrapped,
        objective=objective or NextTokenObjective(run.plan.heads, args.mtp_loss_scaling_factor, run.trunk_states),
        optimizer=learner.optimizer,
        scheduler=learner.scheduler,
        plan=run.plan,
        schedule=run.schedule,
        train_batches=train_batches,
        eval_batches=run.batches.evaluation(run.data.val, args.eval_iters),
        count_flops=lambda tokens, squares, counts: run.batches.flops.step(tokens, squares, counts[0]),
        sinks=sinks,
        logging_steps=args.logging_steps,
        checkpointer=checkpointer,
        get_data_state=get_data_state,
        after_step=phases.hand_out_weights(run, after_step) if after_step else None,
        seed=args.seed,
    )


def open_cache(
    args: SftArgs, mesh: Mesh, hf_model: HfModel, batches: Batches, learner: Learner, data: Data
) -> TrunkStates | None:
    """The cache of --cache_trunk_states; None without."""
    if args.cache_trunk_states is None:
        return None
    directory = Path(args.cache_trunk_states)
    return open_trunk_states(directory, mesh, batches, hf_model, learner, data, args.torch_dtype)


def open_train_batches(run: phases.Run, state: Mapping[str, Any]) -> tuple[GetBatches, Callable[[], dict[str, Any]]]:
    """Two functions: one gives the micro-batches of a step, the other what a checkpoint keeps of the data."""
    args = run.args
    if args.streaming:
        streamed = open_streamed_batches(run, state.get("stream"))
        return streamed.train, streamed.state
    sampler = Sampler(len(run.rows), run.plan.global_batch_size, args.seed, args.dataset_shuffle)
    get_data_state = dict  # empty, because the step alone says which rows the sampler takes
    return partial(run.batches.train, run.rows, sampler), get_data_state


def make_held_out(run: phases.Run) -> HeldOut:
    """The first held-out questions of the run, for acceptance.json."""
    template = ChatTemplate(run.tokenizer)
    prompts = []
    for conversation in run.data.val_conversations[: run.args.acceptance_samples]:
        asked = conversation.prompt()
        token_ids = template.encode_prompt(asked.messages, asked.tools)
        prompts.append(Prompt(token_ids, asked.messages[-1]["content"], asked.channel or ""))
    return held_out(run, prompts, stop_token_ids(template, run.hf_model.directory))


def held_out(run: phases.Run, prompts: Sequence[Prompt], eos_token_ids: Collection[int | None]) -> HeldOut:
    """These prompts, to be continued as the run's options say."""
    args = run.args
    return HeldOut(
        path=run.output_dir / ACCEPTANCE_FILE,
        mesh=run.mesh,
        num_drafts=run.plan.heads.drafts,
        prompts=prompts,
        eos_token_ids=eos_token_ids,
        max_new_tokens=args.acceptance_max_new_tokens,
        max_length=run.hf_model.config["max_position_embeddings"],
        tokenizer=run.tokenizer,
    )


def fed_as_asked(args: SftArgs, family: Family, heads: Heads) -> Heads:
    """The heads, fed what the engine of --draft_for feeds them."""
    line = CONVENTIONS[args.draft_for](family) if args.draft_for and heads.layers else None
    return replace(heads, drafting=line.drafting) if line else heads


def choose_draft_vocab(args: SftArgs, hf_model: HfModel, heads: Heads, data: Data) -> Heads:
    """The heads with the tokens that --draft_vocab lets them draft, chosen from the answers of the training rows.

    Raises:
        UserError: a tensor-parallel rank holds none of these tokens.
    """
    if not args.draft_vocab or not heads.layers:
        return heads
    vocab_size = hf_model.config["vocab_size"]
    counts = draft_vocab.count((sample.labels for sample in data.train), vocab_size)
    chosen = draft_vocab.choose(counts, args.draft_vocab)
    words = f"draft vocabulary: {args.draft_vocab} of {vocab_size} tokens are {chosen.coverage:.2%} of the answers"
    if data.val:
        held_out = draft_vocab.count((sample.labels for sample in data.val), vocab_size)
        share = draft_vocab.covered(held_out, chosen.ids)
        words += f" to train on and {share:.2%} of those held out: no more drafts than that can be right"
    logger.info("%s", words)
    rows_per_rank = vocab_size // args.tensor_model_parallel_size
    if len({token // rows_per_rank for token in chosen.ids}) < args.tensor_model_parallel_size:
        raise UserError(
            f"--draft_vocab {args.draft_vocab}: a tensor-parallel rank holds none of these tokens",
            "choose more of them",
        )
    return replace(heads, draft_vocab=chosen.ids)


def open_streamed_batches(run: phases.Run, state: dict[str, Any] | None) -> StreamedBatches:
    """The rows of --streaming, from where a checkpoint's state says."""
    if not reads(run.mesh):
        return StreamedBatches(run.batches, None, None, run.mesh)
    args, group = run.args, run.mesh.dp
    stream = Stream(
        args.dataset,
        copy.deepcopy(run.encoder),  # a thread of the stream uses it, and a tokenizer must not be in use twice
        readers=Readers(group.rank(), group.size(), partial(gather, group=group, device=run.mesh.device.torch_device)),
        probabilities=args.interleave_prob,
        seed=args.seed,
        max_bad_rows=args.max_bad_rows,
        system=args.system,
        state=state,
    )
    steps = StreamedSteps(run.batches, stream, args.streaming_buffer_size, state)
    return StreamedBatches(run.batches, stream, steps, run.mesh)
