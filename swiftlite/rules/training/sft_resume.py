"""Rules of `megatron sft` for --output_dir, --resume and checkpoints.

A directory belongs to one run, whose options must not change.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import unsupported
from swiftlite.args.resume import CHANGE_UPDATES, CHANGEABLE
from swiftlite.base.json_file import read_json
from swiftlite.methods.index import command_of_run, method_of
from swiftlite.plan.best_metric import known_metrics, metric_of
from swiftlite.plan.facts import Facts, run_checkpoints
from swiftlite.plan.heads import heads_defaults, heads_of
from swiftlite.plan.megatron_config import kept_by_resume
from swiftlite.plan.run import holds_out
from swiftlite.runtime.lock import holder_of, in_use


def output_dir_fits_resume(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir:
        return
    directory = Path(args.output_dir)
    if holder := holder_of(directory):
        yield in_use(directory, holder)
        return
    checkpoints = run_checkpoints(directory)
    has_begun = (directory / "args.json").exists()
    if not args.resume and checkpoints:
        yield (
            f"--output_dir {directory} already contains a run (newest: {checkpoints[-1].name})",
            "add --resume to continue from there, or use another directory",
        )
    elif not args.resume and has_begun:
        yield (
            f"--output_dir {directory} already contains a run without a checkpoint",
            "add --resume to start it again, delete it, or use another directory",
        )


def ephemeral_saves_are_frequent(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    number = args.ephemeral_save_steps
    if number is not None and number >= args.save_steps:
        problem = f"--ephemeral_save_steps {number} must be less than --save_steps {args.save_steps}"
        yield problem, "use a smaller number or a larger --save_steps, or omit it"


def best_model_has_a_metric(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.early_stopping_threshold and args.early_stopping_patience is None:
        yield "--early_stopping_threshold requires --early_stopping_patience", "add it, or remove the threshold"
    metric = metric_of(args)
    if metric is None:
        for name in ("greater_is_better", "early_stopping_patience"):
            if getattr(args, name) is not None:
                yield f"--{name} requires --metric_for_best_model", "add --metric_for_best_model loss"
    elif metric == "eval_":
        yield "--metric_for_best_model is empty", "use --metric_for_best_model loss, acceptance or reward"
    elif not holds_out(args):
        yield "--metric_for_best_model requires held-out rows, and no rows are held out", "add --val_dataset FILE"
    else:
        name, known = metric.removeprefix("eval_"), known_metrics(args, heads_of(args, facts.heads))
        # An engine can draft more tokens than the heads were trained for.
        if name not in known and not (name.startswith("rollout/acceptance_") and "acceptance" in known):
            yield f"--metric_for_best_model {name} is not a metric of evaluations", f"use one of {', '.join(known)}"
    eval_steps = args.eval_steps or args.save_steps
    if args.load_best_model_at_end and args.save_steps % eval_steps:
        yield (
            f"--load_best_model_at_end: --save_steps {args.save_steps} is not a multiple of --eval_steps {eval_steps}",
            f"use --save_steps {args.save_steps // eval_steps * eval_steps or eval_steps}",
        )


def output_dir_is_not_the_model(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir or not args.model:
        return
    directory, model = Path(args.output_dir).resolve(), Path(args.model).resolve()
    resumes = args.resume and bool(run_checkpoints(directory)) and directory != model
    is_model = (model / "config.json").is_file()
    if is_model and directory.is_relative_to(model) and not resumes:
        problem = f"--output_dir {args.output_dir} must not be --model {args.model} or a directory in it"
        yield problem, "use another directory"


def resume_knows_the_options(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    path = Path(args.output_dir) / "args.json"
    if args.resume and run_checkpoints(path.parent) and _saved_options(args) is None:
        state = "does not exist"
        if path.exists():
            state = "is not valid JSON"
        yield f"--resume: {path} {state}", "restore it, or start a new run from an export of the newest checkpoint"


def resume_keeps_the_command(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    before, now = _command_before(args), method_of(args).words
    if before not in (None, now):
        problem = f"--resume: {args.output_dir} is a run of {before}"
        yield problem, f"use swiftlite {before}, or another --output_dir"


def resume_has_steps_left(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.resume or not args.output_dir or args.train_iters is None:
        return
    checkpoints = run_checkpoints(Path(args.output_dir))
    if not checkpoints:
        return
    done = int(checkpoints[-1].name.removeprefix("checkpoint-"))
    if done > args.train_iters:
        problem = f"--train_iters {args.train_iters} is less than the steps of {checkpoints[-1]}"
        yield problem, f"use --train_iters {done} or more"


def resume_keeps_the_options(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """Reject changes of options that are not in `CHANGEABLE`.

    With other data, another objective or other heads, the resumed run would be a different run with the same name.
    """
    changes = _changed_options(args, facts)
    # The state of one optimizer is not that of the other: Muon keeps no second moments of matrices.
    changes = [change for change in changes if change[0] not in CHANGEABLE or "muon" in change[1:]]
    # Defaults of other options depend on the model, so their values before are known only with the same one.
    changes = [change for change in changes if change[0] == "model"] or changes
    otherwise = "use another --output_dir"
    if not run_checkpoints(Path(args.output_dir)):
        otherwise += ", or delete it, because it has no checkpoint yet"
    for name, before, now in changes:
        given = f"use --{name} {shell_line(before)}"
        if before is None:
            given = f"remove --{name}"
        yield (
            f"--resume does not support a change of --{name} from {shell_line(before)} to {shell_line(now)}",
            f"{given} (see {Path(args.output_dir, 'args.json')}), or {otherwise}",
        )


def resume_packs_the_same_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.packing or args.sequence_packing_scheduler != "none":
        return
    for name, before, now in _changed_options(args, facts):
        if name == "context_parallel_size":
            yield (
                f"--resume does not support a change of --context_parallel_size from {before} to {now} with --packing",
                f"use --context_parallel_size {before}",
            )


def changes_apply_to_further_steps(args: SftArgs, facts: Facts) -> Iterator[str]:
    for name, before, now in _changed_options(args, facts):
        if name in ("train_iters", "num_train_epochs"):
            yield f"--{name} changed from {before} to {now}: the learning rate follows the new schedule"
        elif name in CHANGE_UPDATES:
            yield (
                f"--{name} changed from {before} to {now} for the steps after the checkpoint; "
                "use the new value again if the run resumes later"
            )


def _changed_options(args: SftArgs, facts: Facts) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value in args.json, value now) of the changed options.

    Nothing is yielded if another command started the run.
    """
    saved = _saved_options(args)
    if saved is None or _command_before(args) != method_of(args).words:
        return
    defaults = heads_defaults(args, facts.heads, is_quantized=facts.is_quantized)
    for name, now in vars(args).items():
        if name in unsupported(type(args)):  # of a release in which the command had the option, without effect
            continue
        before = saved.get(name, now)
        if name in defaults:  # None and the default that it selects are the same setting
            if before is None:
                before = defaults[name]
            if now is None:
                now = defaults[name]
        if name == "megatron_config":
            before, now = kept_by_resume(before), kept_by_resume(now)
        is_same_place = name == "model" and Path(str(before)).resolve() == Path(str(now)).resolve()
        if before != now and not is_same_place:
            yield name, before, now


def _command_before(args: SftArgs) -> str | None:
    """Return the words of the command that started the resumed run; None if they are unknown."""
    saved = _saved_options(args)
    if saved is None:
        return None
    return command_of_run(saved).words


def _saved_options(args: SftArgs) -> dict[str, Any] | None:
    """Return the content of args.json of the resumed run; None if it is missing or damaged."""
    if not args.resume or not args.output_dir:
        return None
    try:
        saved = read_json(Path(args.output_dir) / "args.json")
    except (OSError, ValueError):
        return None
    if not isinstance(saved, dict):
        return None
    return saved
