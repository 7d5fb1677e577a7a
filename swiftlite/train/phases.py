"""Implement the phases of a training run that all methods share; `run.py` calls them in order."""

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import HeldOut
from swiftlite.acceptance.report import ACCEPTANCE_FILE, read_acceptance
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import write_config
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.bridge.adapters.files import AdapterBase
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import describe, some
from swiftlite.data.dataset import Data
from swiftlite.data.encoder import Encoder
from swiftlite.families.resolved import HfModel
from swiftlite.hub.commits import check_commits, write_commits
from swiftlite.hub.name import hub_names
from swiftlite.methods.index import method_of
from swiftlite.model.trunk import TrunkSource
from swiftlite.plan.layout import layout_of
from swiftlite.plan.run import Plan, Schedule
from swiftlite.plan.text import layout_lines
from swiftlite.report.metrics import evaluations_in, read_metrics, restarts_in
from swiftlite.report.profiles import read_profiles
from swiftlite.runtime.agreement import check_agreement, digest
from swiftlite.runtime.distributed import session
from swiftlite.runtime.environment import describe_machine, versions_of
from swiftlite.runtime.lock import only_run_in
from swiftlite.runtime.mesh import Mesh
from swiftlite.runtime.presence import key_value_store
from swiftlite.store.best import best_checkpoint
from swiftlite.store.copies import Copies, copies_of
from swiftlite.store.shares import ALONE, Shares
from swiftlite.train.batches.micro_batches import Batches, SampleRows
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from swiftlite.train.checkpoint.checkpointer import load_checkpoint
from swiftlite.train.checkpoint.source import describe_tensors, dtypes_of, source_tensors, write_source
from swiftlite.train.checkpoint.state import CheckpointState, Consumed, DataState
from swiftlite.train.checkpoint.verification import newest_whole_checkpoint
from swiftlite.train.image_files import changed_images, write_digests
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.metrics.run_report import check_frozen, compare_tensors, write_report
from swiftlite.train.train_state import TrainState
from swiftlite.train.trainer import Trainer, whole_parameters

VERSIONS = ("torch", "megatron-core", "transformers")
"""Packages whose versions affect numerical results."""
AfterStep = Callable[[int, LiveWeights], None]
"""A function that is called on every rank after each step, with the step's number and the current weights."""


@dataclass(frozen=True)
class Run:
    """The components of a run before its first step.

    Attributes:
        hf_model, graft_from, ref_model, teacher_model: the models that --model, --mtp_graft_from, --ref_model and
            --teacher_model name.
        rows: the training rows; batch sizes are numbers of these rows. Empty if rows are streamed.
        encoder: converts rows of data files to samples.
        checkpoint: the checkpoint to resume from; None for a new run.
        data_state: digests of data and tokenizer that checkpoints store, see the function `data_state`.
        trunk: the source of the trunk's output in each step.
    """

    args: SftArgs
    mesh: Mesh
    hf_model: HfModel
    graft_from: HfModel | None
    ref_model: HfModel | None
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    schedule: Schedule
    data: Data
    batches: Batches
    rows: SampleRows
    encoder: Encoder
    checkpoint: Path | None
    train_state: TrainState
    data_state: DataState
    trunk: TrunkSource
    teacher_model: HfModel | None = None

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, which writes the files of the run."""
        return dist.get_rank() == 0


@dataclass(frozen=True)
class Outcome:
    """The result of training.

    Attributes:
        stopped_by: number of the signal that stopped training before the last step; 0 if training was not stopped.
        seconds: time of the steps of this process. A run that resumes does not count the steps before its checkpoint.
        first: step of the checkpoint that the run resumed from; 0 without a checkpoint.
        evaluation: the last metrics over held-out rows, by name; empty without held-out rows.
        times: seconds of the first rank by part of the work, see `StepClock.totals`.
        consumed: tokens and samples of all steps, also of earlier processes.
        last: number of the last step; less than that of the schedule if training ended early.
    """

    stopped_by: int
    seconds: float
    evaluation: Mapping[str, float]
    times: Mapping[str, float] = field(default_factory=dict)
    first: int = 0
    consumed: Consumed = field(default_factory=Consumed)
    last: int = 0


def open_session(args: SftArgs, hf_model: HfModel) -> AbstractContextManager[Mesh]:
    """Initialize torch.distributed and the mesh of the run."""
    return session(
        layout_of(args),
        # Then the last stage has a copy of the embedding, and belongs to the group that sums its gradients.
        tied_embeddings=hf_model.is_tied,
        seed=args.seed,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        timeout_minutes=args.distributed_timeout_minutes,
        deterministic=args.deterministic_mode,
    )


def claim_output_dir(args: SftArgs) -> AbstractContextManager[None]:
    """Lock --output_dir against other runs, on the first rank.

    Raises:
        UserError: another run uses the directory.
    """
    if dist.get_rank() != 0:
        return nullcontext()
    return only_run_in(Path(args.output_dir))


def copy_checkpoints(args: SftArgs) -> AbstractContextManager[Copies | None]:
    """Copy checkpoints to --checkpoint_store while the context is open.

    Raises:
        UserError: when the context ends, the newest checkpoint was not copied; on the first rank.
    """
    shares = ALONE
    if args.checkpoint_store and dist.get_world_size() > 1:
        # A store, because copies run in a thread, which cannot call collectives.
        shares = Shares(dist.get_rank(), dist.get_world_size(), key_value_store())
    return copies_of(Path(args.output_dir), args.checkpoint_store, args.save_total_limit, shares)


def checkpoint_to_resume(args: SftArgs) -> Path | None:
    """Return the newest whole checkpoint if --resume is set (`newest_whole_checkpoint`); collective.

    Returns:
        None without --resume, or if the run has no checkpoint yet.

    Raises:
        UserError: all checkpoints are damaged.
    """
    if not args.resume:
        return None
    checkpoint = newest_whole_checkpoint(Path(args.output_dir), args.checkpoint_store)
    if checkpoint is None:
        logger.info("--resume: %s has no checkpoint yet; the run starts from its first step", args.output_dir)
    return checkpoint


def check_ranks_agree(args: SftArgs, hf_model: HfModel, plan: Plan, data: Data, checkpoint: Path | None) -> None:
    """Check that all ranks have the same options and files, because nodes may have separate copies of files.

    Raises:
        UserError: options or files differ; raised on every rank, with the differences.
    """
    # These may differ between nodes.
    where = ("model", "mtp_graft_from", "cache_trunk_states", "output_dir", "dataset", "val_dataset")
    where += ("media_root", "ref_model", "ref_logprobs_cache", "teacher_model", "dataset_cache", "reward_model")
    where += ("external_plugins", "rollouts_from")  # only the first rank reads them
    options = {f"--{name}": str(value) for name, value in asdict(args).items() if name not in where}
    versions = {name: version(name) for name in VERSIONS}
    check_agreement(
        {
            **options,
            **versions,
            **plan.kernels.described,
            "rows of the dataset": data.digest[:16],
            "tensors of --model": digest(describe(hf_model.directory)),
            "commit of --model": hf_model.identity,
            "checkpoint": checkpoint.name if checkpoint else "none",
        }
    )


def data_state(data: Data, tokenizer: PreTrainedTokenizerBase) -> DataState:
    """Return digests of data and tokenizer, which checkpoints store. The steps of a run depend on both.

    Files that --streaming reads during training are not included. Their digests are in the state of the stream.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    return {"tokenizer": digest([vocabulary, tokenizer.chat_template]), "rows": data.digest}


def check_same_data(args: SftArgs, checkpoint: Path | None, state: DataState, data: Data) -> None:
    """Check that a resumed run has the same data as before.

    The order of rows, the held-out split and a draft vocabulary depend on the data. With other data, rows that were
    used for training could become held-out rows.

    Args:
        checkpoint: the checkpoint to resume from, if any.
        state: `data_state` of this run.
        data: the data of this run.

    Raises:
        UserError: the data differ.
    """
    if checkpoint is None:
        return
    saved = CheckpointState.read(checkpoint)
    before = saved.data or state  # missing in checkpoints of earlier releases
    if saved.stream and "files" not in saved.stream:  # of an earlier release, which knew only the sizes of the files
        sizes = [Path(name).stat().st_size for name in args.dataset]
        state = {**state, "rows": digest({"held out": data.digest, "sizes": sizes})}
    changed = [_NAMES_OF_DATA[name] for name in state if before[name] != state[name]]
    if changed:
        problem = f"--resume: {checkpoint} was trained with another {' and another '.join(changed)}"
        if files := changed_images(checkpoint.parent, data):
            problem += f"; changed images: {', '.join(some(files, 5))}"
        raise UserError(
            problem,
            "restore the files; or export the checkpoint (swiftlite export --to_hf), and start a new run from it in "
            "another --output_dir",
        )


_NAMES_OF_DATA = {
    "tokenizer": "tokenizer of --model",
    "rows": "content of --dataset or --val_dataset, or of their images",
}


def state_of(run: Run, base: AdapterBase | None = None) -> CheckpointState:
    """Return what the checkpoints of a run store besides tensors, before the first step.

    Args:
        base: the model that an earlier checkpoint of the run names; None for a new run.
    """
    lora, trunk = run.plan.lora, run.plan.trunk
    if not (lora or trunk.is_in_base):
        base = None
    elif base is None:  # `check_same_base` has computed the digest
        base = AdapterBase(_model_to_store(run), shared_digest_of(run.hf_model.directory))
    return CheckpointState(
        step=0,
        mtp_num_layers=run.plan.heads.layers,
        torch_dtype=run.args.torch_dtype,
        images=run.hf_model.computes_images,
        data=run.data_state,
        lora=lora,
        base=base,
        **trunk.to_state(),
    )


def _model_to_store(run: Run) -> str:
    """Return --model as an export finds it: an absolute path if the export reads the trunk from a directory."""
    model = run.args.model
    if run.plan.lora is None and Path(model).is_dir():
        return str(Path(model).absolute())
    return model


def restore(run: Run) -> CheckpointState:
    """Load the checkpoint to resume from. In a new run, write the first files instead.

    Returns:
        The checkpoint's state, or that of a new run.

    Raises:
        UserError: the checkpoint cannot be used, or --output_dir cannot be written.
    """
    if run.checkpoint is None:
        if run.is_first_rank:
            write_source(run.hf_model, run.output_dir, run.plan.heads, run.graft_from)
            write_config(run.args, run.output_dir / "args.json", method_of(run.args).words)
            write_commits(run.output_dir, hub_names(run.args))
            if run.data.has_images:
                write_digests(run.output_dir, run.data)
        return state_of(run)
    check_commits(run.output_dir)
    state = CheckpointState.read(run.checkpoint)
    if state.step > run.schedule.steps:
        raise UserError(
            f"{run.checkpoint} is past the last step of this run, {run.schedule.steps}",
            "use a larger --train_iters or --num_train_epochs",
        )
    if run.is_first_rank:
        check_run_files(run)
    # `checkpoint_to_resume` has verified the digests of its files.
    load_checkpoint(run.checkpoint, run.mesh, run.train_state.chunks, run.train_state.optimizer, is_verified=True)
    # Checkpoints have no state of the scheduler: the learning rate is a function of the number of steps.
    run.train_state.scheduler.step(increment=state.step)
    logger.info("resuming from %s", run.checkpoint)
    return state


def check_run_files(run: Run) -> None:
    """Check the files that the last phase of a resumed run and an export read, and write missing files again.

    Raises:
        UserError: acceptance.json, to which the last phase adds results, is damaged.
    """
    source = run.output_dir / "source"
    try:
        source_tensors(source)
        read_config(source)
    except UserError as error:
        logger.warning("%s; written again from --model", error.problem)
        write_source(run.hf_model, run.output_dir, run.plan.heads, run.graft_from)
    acceptance = run.output_dir / ACCEPTANCE_FILE
    if acceptance.exists():
        try:
            read_acceptance(acceptance)
        except UserError as error:
            raise UserError(error.problem, "delete it; the run then reports acceptance after it") from None


def lacks_evaluation(run: Run, step: int) -> bool:
    """Return whether the step that a run resumes from must be evaluated before the next step, because a signal came
    first.
    """
    if not step or step % run.plan.eval_steps or step >= run.schedule.steps:
        return False
    return all(line["step"] != step for line in evaluations_in(read_metrics(run.output_dir)))


def fit(run: Run, trainer: Trainer, first: int, held_out: HeldOut) -> Outcome:
    """Run all steps after step `first`. Before the first and after the last step, evaluate and measure acceptance; in a
    run without steps once, as after the last step.
    """

    def measure(when: Literal["before", "after"], evaluation: Mapping[str, float]) -> None:
        with trainer.evaluating():
            held_out.measure(when, trainer.model, evaluation)

    if not first and run.schedule.steps:  # also if the run resumes from the checkpoint of a run without steps
        evaluation = trainer.evaluate(0)
        if trainer.best:
            # Before the first step, so that a metric that evaluations do not have ends the run at once.
            trainer.best.check(evaluation)
        if not method_of(run.args).evaluates_rows:  # acceptance.json has no place for metrics of completions
            trainer.log(0, evaluation)
        measure("before", evaluation)
    start = time.perf_counter()
    stopped_by = 0
    if run.schedule.steps or run.checkpoint is None:  # otherwise checkpoint-0 is complete
        stopped_by = trainer.fit(first)
    seconds = time.perf_counter() - start
    if stopped_by:
        trainer.close()
        logger.warning("stopped by signal %d after saving; the same command with --resume continues", stopped_by)
        return Outcome(stopped_by, seconds, {})
    evaluation = trainer.evaluate_last()
    if run.args.load_best_model_at_end:
        evaluation = load_best(run, trainer) or evaluation
    measure("after", evaluation)
    if run.is_first_rank:
        trainer.summarize(held_out.summary())
    trainer.close()
    return Outcome(
        stopped_by, seconds, evaluation, trainer.clock.totals, first, trainer.consumed, last=trainer.last_step
    )


def load_best(run: Run, trainer: Trainer) -> Mapping[str, float] | None:
    """Load the weights of the best checkpoint, and return their evaluation; None if they are those of the last step.
    Collective.

    Raises:
        UserError: the checkpoint is damaged.
    """
    found: list[Path | None] = [None]
    if run.is_first_rank:
        found = [best_checkpoint(run.output_dir)]
    # Only the first rank has the file of evaluations.
    dist.broadcast_object_list(found)
    best = found[0]
    if best is None or best.name == f"checkpoint-{trainer.last_step}":
        return None
    logger.info("loading %s, the best checkpoint (--load_best_model_at_end)", best)
    with whole_parameters(trainer.model):
        load_checkpoint(best, run.mesh, run.train_state.chunks)
    return trainer.evaluate(CheckpointState.read(best).step)


def finish(run: Run, outcome: Outcome) -> int:
    """Report on a run after its last step, and return the exit code.

    The exit code is 0, or 128 plus the number of the signal that stopped the run, as in a shell.
    """
    if outcome.stopped_by:
        if run.is_first_rank:
            write_page(run)
        return 128 + outcome.stopped_by
    report(run, outcome)
    return 0


def report(run: Run, outcome: Outcome) -> None:
    """Write run_report.json, and check that frozen tensors did not change; collective.

    Raises:
        UserError: a frozen tensor has changed.
    """
    train_state = run.train_state
    # The hashes are of whole parameters, like those before training.
    with whole_parameters(train_state.wrapped):
        tensors = compare_tensors(train_state.chunks, train_state.hashes, train_state.trainable)
    if run.is_first_rank:
        measured = {
            "steps": outcome.last,
            "resumed_from": outcome.first,
            "seconds": round(outcome.seconds, 1),
            "times": {name: round(seconds, 3) for name, seconds in outcome.times.items()},
            **outcome.consumed.metrics(),
            "evaluation": outcome.evaluation,
            "layout": dict(layout_lines(run.plan)),
            "kernels": run.plan.kernels.described,
            "versions": versions_of(VERSIONS),
            "machine": describe_machine(),
        }
        if profiles := read_profiles(run.output_dir):
            measured["profiles"] = profiles
        if restarts := restarts_in(read_metrics(run.output_dir)):
            measured["restarts"] = restarts
        write_report(run.output_dir, measured, run.data, train_state.weights_report, tensors)
        write_page(run)
    # Last, so that the report exists if this check fails.
    check_frozen(tensors, train_state.trainable)
    paths = ("--model", str(run.output_dir), "--output_dir", f"{run.output_dir}-hf")
    logger.info("done. Next: swiftlite export --to_hf %s", shlex.join(paths))


def write_page(run: Run) -> None:
    """Write run_report.html on the first rank. An error is logged and does not end the run."""
    from swiftlite.report.run_page import write_run_page  # importing matplotlib takes 0.5 s

    try:
        logger.info("report for the browser: %s", write_run_page(run.output_dir))
    except Exception as error:  # any error of drawing or writing
        logger.warning("%s was not written: %s: %s", "run_report.html", type(error).__name__, reason_of(error))


def hand_out_weights(run: Run, after_step: AfterStep) -> Callable[[int], None]:
    """Return a function that is called after each step and passes the weights to `after_step`."""
    weights = live_weights(run)
    return lambda step: after_step(step, weights)


def live_weights(run: Run) -> LiveWeights:
    """Return the current weights of a run, with the dtypes of an export."""
    dtypes = dtypes_of(describe_tensors(run.hf_model, run.graft_from))
    return LiveWeights(run.train_state.wrapped, run.hf_model, dtypes)
