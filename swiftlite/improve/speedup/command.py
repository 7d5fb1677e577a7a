"""Run `swiftlite speedup`.

In each round the model writes prompts and answers them, heads are trained on all answers so far, and the drafts that
would be accepted on held-out prompts are counted. The first round is small and shows how fast the machine is; the next
rounds use the rest of the budget. At the end `bench` measures the speed with the best heads.
"""

import math
import os
import shutil
import sys
import time
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path

from swiftlite.acceptance.report import ACCEPTANCE_FILE, read_answers
from swiftlite.args.commands import SpeedupArgs
from swiftlite.args.duration import seconds_of
from swiftlite.base.atomic import check_writable
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.tensors import describe
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.data.user_turn import UserTurn
from swiftlite.engines.index import ENGINES
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.resolved import HfModel
from swiftlite.improve.resumable import MODEL
from swiftlite.improve.speedup import budget
from swiftlite.improve.speedup.dataset import RoundRows
from swiftlite.improve.speedup.held_out import MIN_ROWS, divide, read_rows, without_similar, write_rows
from swiftlite.improve.speedup.plan import ANSWERS, CANDIDATE, HELD_OUT, Commands, only_fits
from swiftlite.improve.speedup.results import ALL, When, accepted_drafts, concurrency_of, read_result, seconds_of_steps
from swiftlite.improve.speedup.screen import answer_lines, best_ratio, best_server, final_lines, other_lines, run_with
from swiftlite.improve.speedup.state import Progress
from swiftlite.improve.steps import CommandStep, is_complete, run_step
from swiftlite.runtime.environment import sees_gpu
from swiftlite.runtime.lock import only_run_in

# Options that may change when a command resumes: with a larger budget more rounds run, with another concurrency `bench`
# runs again, and the others do not change results.
NOT_SETTINGS = ("budget", "concurrency", "output_dir", "trust_remote_code")


def run(args: SpeedupArgs) -> None:
    """Train heads within the budget, and print speed and acceptance with these heads.

    Raises:
        UserError: an option or the model is invalid, or a step failed; completed steps are kept.
    """
    start = time.monotonic()
    model = resolve_served(args.model)
    _check_template(args, model)
    directory = Path(args.output_dir)
    rows = RoundRows(args, directory)
    settings = {name: value for name, value in asdict(args).items() if name not in NOT_SETTINGS}
    check_writable("--output_dir", directory)
    with only_run_in(directory):
        defaults = {option.name: option.default for option in fields(args) if option.default is not MISSING}
        progress = Progress.read(directory, settings, defaults)
        if not progress.rounds:
            _check_rows(rows.largest_round())
        progress.preparation += round(time.monotonic() - start, 1)
        progress.write(directory)
        if progress.seconds:
            used = f"{progress.spent / 60:.0f} minutes of --budget {args.budget} are used"
            logger.info("resuming: %d steps are complete, %s", len(progress.seconds), used)
        try:
            best = _Speedup(args, model, rows, directory, progress).best_heads()
        except KeyboardInterrupt:
            hint = "run the same command again to resume"
            raise UserError("interrupted; completed steps are kept", hint, 130) from None
    bench = directory / best / "bench" / "bench.json"
    other = directory / LLAMACPP.name / "bench" / "bench.json"
    answers = read_answers(directory / run_with(best)).get(_when(best), [])
    with_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    lines = read_result(bench, partial(final_lines, progress, best, acceptance=_accepted(directory, best)))
    if f"{LLAMACPP.name}/bench" in progress.seconds and other.exists():
        lines += read_result(other, partial(other_lines, read_result(bench, best_server), LLAMACPP.label))
    for line in [*answer_lines(answers, with_color), "", *lines]:
        print(line)


def _accepted(directory: Path, name: str) -> dict[str, list[float]]:
    """Return the share of accepted drafts of the heads called `name`, by channel and position."""
    path = directory / run_with(name) / ACCEPTANCE_FILE
    return read_result(path, partial(accepted_drafts, when=_when(name)))


def _when(name: str) -> When:
    """Return whether heads were measured before or after the training of a round. The heads of --model are those from
    which the first round starts.
    """
    if name == MODEL:
        return "before"
    return "after"


def _check_template(args: SpeedupArgs, model: HfModel) -> None:
    """Check that the model has a chat template, and that the model can write prompts with it if prompts are needed.

    Raises:
        UserError: there is no template, or the model cannot write prompts with it.
    """
    try:
        template = ChatTemplate(load_tokenizer(model.directory, args.trust_remote_code, args.chat_template_kwargs))
    except UserError as error:
        raise UserError(f"--model {args.model}: {error.problem}", error.hint) from None
    if args.dataset and args.self_prompts_share == 0:
        return
    try:
        UserTurn(template)
    except UserError as error:
        hint = "let it answer only rows of a dataset: --dataset FILE --self_prompts_share 0"
        raise UserError(f"--model {args.model} cannot write prompts: {error.problem}", hint) from None


def _check_rows(number: int | None) -> None:
    """Check that a dataset is large enough for the first round.

    Args:
        number: number of its different rows; None if the model writes prompts too.

    Raises:
        UserError: there are too few rows.
    """
    if number is not None and number < MIN_ROWS:
        problem = f"--dataset has only {number} different prompts, at least {MIN_ROWS} are required"
        raise UserError(problem, "give more prompts, or let the model write some: --self_prompts_share 0.5")


class _Speedup:
    """One run of `swiftlite speedup`. `best_heads` runs all steps that are not complete."""

    def __init__(self, args: SpeedupArgs, model: HfModel, rows: RoundRows, directory: Path, progress: Progress):
        self._model = model
        self._rows = rows
        self._args = args
        self._directory = directory
        self._progress = progress
        self._commands = Commands(args, model, directory)
        self._total = float(seconds_of(args.budget) or 0)  # a rule has checked the duration
        self._compares = args.drafter == "auto" and self._can_compare()

    def _can_compare(self) -> bool:
        """Return whether two drafters are compared; otherwise say why not."""
        reason = ENGINES[self._args.infer_backend].why_no_drafter(self._model.family, self._model.config, CANDIDATE)
        if self._model.heads.layers:
            reason = "--model has heads already"
        elif not reason and self._total < budget.MIN_FOR_TWO:
            reason = f"--budget {self._args.budget} is too small for two drafters, use {budget.MIN_FOR_TWO / 60:.0f}m"
        if reason:
            logger.info("--drafter auto: MTP heads, without a comparison with %s: %s", CANDIDATE, reason)
        return not reason

    def best_heads(self) -> str:
        """Run rounds while the budget lasts, then `bench`; return the name of the best heads, or of the other drafter
        if it is faster.

        After an interruption, this function starts with the first round again, and `run_step` skips the complete steps.
        """
        number = 1
        while prompts := self._prompts_of(number):
            self._run_round(number, prompts)
            number += 1
        best = self._progress.best
        accepted = self._progress.acceptance[best]
        compares = self._compares and self._can_train_candidate(best)
        other_seconds = budget.other_seconds(self._total)
        other = self._commands.other_engine(other_seconds)
        later = (other_seconds + budget.START_OF_OTHER) * len(other)
        candidate = budget.candidate_seconds(self._times()) if compares else 0.0
        seconds = budget.bench_seconds(self._total, self._progress.spent, later + candidate, 1 + compares)
        self._run_bench(self._commands.bench(best, accepted, budget.bench_rounds(self._total), seconds))
        try:
            if compares and self._is_candidate_faster(best, later):
                best = CANDIDATE
        except UserError as error:
            logger.warning("%s is not compared: %s", CANDIDATE, error.problem)
        try:
            for step in other:
                self._run_bench(step)
        except UserError as error:
            logger.warning("%s is not compared: %s", LLAMACPP.label, error.problem)
        return best

    def _can_train_candidate(self, best: str) -> bool:
        """Return whether the other drafter was trained, or can be trained and measured in the rest of the budget."""
        progress = self._progress
        if is_complete(self._commands.training(progress.rounds, "", CANDIDATE), progress):
            return True
        num_benches = 2 - (f"{best}/bench" in progress.seconds)
        benches = num_benches * (budget.STARTS + budget.MIN_BENCH)
        needed = progress.spent + budget.candidate_seconds(self._times()) + benches
        if needed <= self._total:
            return True
        used = f"{progress.spent / 60:.0f} minutes of --budget {self._args.budget} are used"
        enough = f"--budget {5 * math.ceil(needed / 300)}m"
        logger.info(
            "--drafter auto: MTP heads, because %s; the same command with %s trains %s", used, enough, CANDIDATE
        )
        return False

    def _is_candidate_faster(self, best: str, later: float) -> bool:
        """Train and measure the other drafter on the answers of all rounds, and return whether it is faster than the
        best heads.

        Args:
            later: seconds for the steps after it.
        """
        progress, rounds = self._progress, self._progress.rounds
        training = self._commands.training(rounds, "", CANDIDATE)
        if not is_complete(training, progress):
            progress.candidate_rounds = len(rounds)
        elif progress.candidate_rounds < len(rounds):
            logger.warning(
                "%s was trained on the answers of %d of %d rounds", CANDIDATE, progress.candidate_rounds, len(rounds)
            )
        self._run(training)
        shutil.rmtree(self._directory / CANDIDATE / "states", ignore_errors=True)
        progress.candidate = _accepted(self._directory, CANDIDATE)[ALL]
        self._run(self._commands.export(CANDIDATE))
        seconds = budget.bench_seconds(self._total, progress.spent, later)
        step = self._commands.bench(CANDIDATE, progress.candidate, budget.bench_rounds(self._total), seconds)
        self._run_bench(step)
        # Ratios, because the load of the machine can change between the two measurements.
        files = {name: self._directory / name / "bench" / "bench.json" for name in (best, CANDIDATE)}
        ratios = {name: read_result(file, best_ratio) for name, file in files.items()}
        shown = ", ".join(f"{name} {ratio:.2f}x as fast as without drafts" for name, ratio in ratios.items())
        logger.info("--drafter auto, %d concurrent requests: %s", self._args.concurrency[0], shown)
        return ratios[CANDIDATE] > ratios[best]

    def _run_bench(self, step: CommandStep) -> None:
        """Run a step like `_run`; a complete `bench` runs again if it was for another --concurrency."""
        measured = self._args.concurrency
        if step.words[0] == "bench" and is_complete(step, self._progress):
            measured = read_result(step.result, concurrency_of)
        if measured != self._args.concurrency:
            logger.info("bench runs again, for another --concurrency")
            self._progress.repeat(step.name)
        self._run(step)

    def _prompts_of(self, number: int) -> int:
        """Return the number of prompts of a round; 0 if the rest of the budget is too small for a round.

        For a round that has started, the stored number is returned. For a new round, the number is computed from the
        current --budget, which may be larger than in a previous call.
        """
        rounds = self._progress.rounds
        if number <= len(rounds):
            return rounds[number - 1]
        largest = self._rows.largest_round()
        if number == 1:
            seconds, spent = self._seconds_per_prompt(), self._progress.spent
            # Two drafters have half of the time each.
            prompts = budget.first_round(self._total / (1 + self._compares), largest, seconds, spent=spent)
        else:
            spent, times = self._progress.spent, self._times()
            prompts = budget.next_round(self._total, spent, times, largest, compares=self._compares)
        if prompts:
            rounds.append(prompts)
            self._progress.write(self._directory)
            logger.info("round %d: %d prompts", number, prompts)
        return prompts

    def _seconds_per_prompt(self) -> float:
        """Return the estimated seconds for a prompt of the first round; 0 with a GPU, where starts take longer."""
        if sees_gpu():
            return 0.0
        tensors = describe(self._model.directory)
        num_parameters = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
        return budget.seconds_per_prompt(num_parameters, self._args.max_new_tokens)

    def _times(self) -> list[budget.RoundTimes]:
        return [self._times_of(number) for number in range(1, len(self._progress.rounds) + 1)]

    def _times_of(self, number: int) -> budget.RoundTimes:
        seconds, rounds = self._progress.seconds, self._progress.rounds
        answers, training = seconds[f"round-{number}/answers"], seconds[f"round-{number}/training"]
        fixed = seconds[f"round-{number}/export"]
        if number == 1 and only_fits(rounds[:1], self._own_heads, self._commands.drafter):
            training = max(training, budget.TRAINING_PER_ANSWERS * answers)  # the next round is trained
        else:
            report = self._directory / f"round-{number}" / "run" / "run_report.json"
            steps = min(read_result(report, seconds_of_steps) or training, training)
            fixed, training = fixed + training - steps, steps
        return budget.RoundTimes(rounds[number - 1], answers, training, fixed)

    @property
    def _own_heads(self) -> str:
        """Name of the heads of --model; empty if it has none."""
        return MODEL if self._model.heads.layers else ""

    def _run_round(self, number: int, prompts: int) -> None:
        commands, progress, directory = self._commands, self._progress, self._directory
        rows = self._rows.of_round(number, prompts)
        first = sum(progress.rounds[: number - 1])
        self._run(commands.answers(number, prompts, len(rows), first))
        self._divide(number)
        base = progress.best or self._own_heads
        self._run(commands.training(progress.rounds[:number], base))
        shutil.rmtree(directory / f"round-{number}" / "states", ignore_errors=True)
        for name in {base, f"round-{number}"} - {""}:
            progress.acceptance.setdefault(name, _accepted(directory, name)[ALL])
        self._run(commands.export(f"round-{number}"))

    def _run(self, step: CommandStep) -> None:
        """Run a step unless it is complete, after a line about the time so far."""
        if not is_complete(step, self._progress):
            spent = self._progress.spent
            used = f"{spent / 60:.1f} minutes of --budget {self._args.budget} used"
            if spent > self._total:
                logger.warning("%s: %s; the first round and bench always run", step.name, used)
            else:
                logger.info("%s: %s", step.name, used)
        run_step(step, self._progress, self._directory)

    def _divide(self, number: int) -> None:
        """Write the training rows of a round; in the first round also the held-out rows that all rounds share."""
        training = self._directory / f"round-{number}" / "train.jsonl"
        held_out = self._directory / HELD_OUT
        if training.exists() and held_out.exists():
            return
        rows = read_rows(training.parent / ANSWERS / "dataset.jsonl")
        if number == 1:
            rows, kept = divide(rows)
            write_rows(held_out, kept)
        write_rows(training, without_similar(rows, read_rows(held_out)))
