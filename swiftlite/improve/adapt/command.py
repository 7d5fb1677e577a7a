"""Run `swiftlite adapt`: train heads on the requests of a running server, and send better ones to it.

A round begins when the log has enough new conversations. Heads are trained on the older ones, and the drafts that would
be accepted on the newest ones are counted before and after. Only heads that are better are sent. If the server then
accepts fewer drafts than before, it gets the previous heads back.
"""

import json
import math
import os
import shutil
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from swiftlite.acceptance.report import ACCEPTANCE_FILE
from swiftlite.args.commands import AdaptArgs
from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.served import LostServer
from swiftlite.families.resolved import HfModel
from swiftlite.improve.adapt.request_log import digest_of_end, divide, num_new, read_log
from swiftlite.improve.adapt.server import Server
from swiftlite.improve.adapt.state import Served, State, record
from swiftlite.improve.resumable import MODEL
from swiftlite.improve.speedup.results import ALL, When, accepted_drafts, read_result
from swiftlite.improve.steps import CommandStep, export_step, model_words, run_step
from swiftlite.runtime.lock import only_run_in

# A resumed command may change all other options: they only change rounds that have not started.
SETTINGS = ("model", "torch_dtype", "chat_template_kwargs")
PRIVATE = 0o077
"""Mask of file permissions: conversations are readable by this user alone, as in the log."""
NICENESS = 10
"""Training takes the processor time that the server leaves."""
WATCHED_STEPS = 200
"""Minimum number of drafting steps before and after new heads, to compare them."""
ERRORS = 3.0
"""New heads are taken back if they are worse by this number of standard errors."""


def run(args: AdaptArgs) -> None:
    """Train, compare and send heads until Ctrl-C, or until --rounds rounds are decided.

    Raises:
        UserError: an option, the server or the log is invalid, or a step failed; the same command resumes.
    """
    os.umask(PRIVATE)
    os.nice(NICENESS)
    model = resolve_served(args.model)
    if not model.heads.layers:
        raise UserError(f"--model {args.model} has no heads", "train some first: swiftlite speedup --model MODEL")
    directory = Path(args.output_dir)
    check_writable("--output_dir", directory)
    settings = {name: vars(args)[name] for name in SETTINGS}
    with only_run_in(directory):
        state = State.read(directory, settings)
        try:
            _Adapt(args, model, directory, state).follow()
        except KeyboardInterrupt:
            raise UserError(
                "interrupted; the server keeps its heads", "run the same command to continue", 130
            ) from None


class _Adapt:
    """One run of the command."""

    def __init__(self, args: AdaptArgs, model: HfModel, directory: Path, state: State):
        self._args, self._model, self._directory, self._state = args, model, directory, state
        self._has_succeeded = False

    def follow(self) -> None:
        args, state = self._args, self._state
        self._watch()  # errors about the server end the command at its start, and not later
        is_waiting = False
        while args.rounds is None or state.rounds < args.rounds or state.is_in_round or state.previous:
            self._try_to_watch()
            is_last = args.rounds is not None and state.rounds >= args.rounds
            if state.is_in_round or (not is_last and self._begin()):
                self._run_round()
                is_waiting = False
                continue
            if not is_waiting and is_last:
                logger.info("waiting for %d drafting steps of the server with the new heads", WATCHED_STEPS)
            elif not is_waiting:
                logger.info("waiting for %d new conversations in %s", args.min_rows, args.request_log)
            is_waiting = True
            time.sleep(args.poll_seconds)

    def _begin(self) -> bool:
        """Write the rows of the next round if the log has enough new ones; return whether it has."""
        args, state = self._args, self._state
        lines = read_log(Path(args.request_log))
        if num_new(lines, state.last) < args.min_rows:
            return False
        state.last = digest_of_end(lines)
        training, held_out = divide(lines, args.max_rows)
        if not training:
            logger.warning("no conversation has another question than the %d newest ones; waiting", len(held_out))
            return False
        state.rounds += 1
        directory = self._round()
        directory.mkdir(exist_ok=True)
        for name, part in (("train.jsonl", training), ("held_out.jsonl", held_out)):
            atomic_write(directory / name, b"".join(json.dumps(row).encode() + b"\n" for row in part))
        state.is_in_round, state.base = True, state.heads
        state.write(self._directory)
        logger.info("round %d: %d conversations, %d held out", state.rounds, len(training), len(held_out))
        return True

    def _run_round(self) -> None:
        """Train heads, and send them if they are better on the held-out conversations."""
        state, name = self._state, f"round-{self._state.rounds}"
        try:
            for step in self._steps(name):
                run_step(step, state, self._directory)
        except UserError as error:
            self._give_up(error)
            return
        before, after = self._held_out("before"), self._held_out("after")
        details = {"round": state.rounds, "held_out": {"before": round(before, 4), "after": round(after, 4)}}
        change = f"{before:.3f} accepted drafts per step on held-out conversations before, {after:.3f} after"
        if after > before:
            self._send(name, "sent", change, **details)
        else:
            record(self._directory, "kept", f"round {state.rounds}: {change}", **details)
        state.is_in_round, self._has_succeeded = False, True
        state.write(self._directory)
        self._clean_up()

    def _give_up(self, error: UserError) -> None:
        """End a round whose training failed; the next one begins with new conversations.

        Raises:
            UserError: no round since the start of this command has succeeded.
        """
        state = self._state
        record(self._directory, "failed", f"round {state.rounds}: {error.problem}", round=state.rounds)
        state.is_in_round = False
        state.write(self._directory)
        self._clean_up()
        if not self._has_succeeded:
            raise error

    def _held_out(self, when: When) -> float:
        """Return the accepted drafts per step on the held-out conversations of the round, before or after training."""
        shares = read_result(self._round() / "run" / ACCEPTANCE_FILE, partial(accepted_drafts, when=when))
        return sum(shares[ALL])

    def _steps(self, name: str) -> list[CommandStep]:
        """Return the commands that train and export the heads of a round."""
        args, directory = self._args, self._directory / name
        run = directory / "run"
        words = ["megatron", "sft", *model_words(args, self._path_of(self._state.base), args.torch_dtype)]
        words += ["--dataset", str(directory / "train.jsonl"), "--val_dataset", str(directory / "held_out.jsonl")]
        words += "--mtp_mode heads_only --mtp_loss nla --packing true --global_batch_size 1".split()
        words += ["--max_length", str(args.max_length), "--num_train_epochs", str(args.num_train_epochs)]
        words += ["--lr", str(args.lr), "--cache_trunk_states", str(directory / "states")]
        words += "--acceptance_samples 48 --acceptance_max_new_tokens 32 --report_to none".split()
        if self._model.heads.layers == 1:
            words += ["--mtp_unroll", "3"]
        words += ["--resume", "true", "--output_dir", str(run)]
        training = CommandStep(f"{name}/training", tuple(words), run / "run_report.json")
        return [training, export_step(name, directory)]

    def _send(self, name: str, decision: str, why: str, **details: object) -> None:
        """Send heads to the server, and begin to watch them."""
        args, state = self._args, self._state
        server = Server(args.server, self._model)
        try:
            counted = server.counts()
            server.send(self._path_of(name))
            state.before = counted.since(state.sent) if server.instance == state.instance else Served()
            if name != state.heads:
                state.previous = state.heads if decision == "sent" else ""
            state.heads, state.instance, state.sent = name, server.instance, server.counts()
        finally:
            server.close()
        record(self._directory, decision, f"{name}: {why}", heads=name, **details)
        state.write(self._directory)

    def _try_to_watch(self) -> None:
        """Call `_watch`; a server that is restarted at this moment is asked again later."""
        try:
            self._watch()
        except LostServer as error:
            logger.warning("%s; it is asked again", error.problem)

    def _watch(self) -> None:
        """Give a restarted server its heads, and take heads back with which it accepts fewer drafts."""
        args, state = self._args, self._state
        server = Server(args.server, self._model)
        try:
            counted, instance = server.counts(), server.instance
        finally:
            server.close()
        if instance != state.instance:
            if state.heads != MODEL:
                self._send(state.heads, "restored", "the server was restarted with the heads of --model")
                return
            state.instance, state.sent, state.before = instance, Served(), Served()
            state.write(self._directory)
            return
        if not state.previous:
            return
        now = counted.since(state.sent)
        if now.steps < WATCHED_STEPS:
            return
        change = f"{state.before.per_step:.3f} accepted drafts per served step before, {now.per_step:.3f} with them"
        served = {"before": asdict(state.before), "after": asdict(now)}
        if state.before.steps >= WATCHED_STEPS and is_worse(now, state.before):
            self._send(state.previous, "rolled_back", f"after {state.heads}: {change}", served=served)
            return
        logger.info("%s: %s", state.heads, change)
        state.previous = ""
        state.write(self._directory)

    def _path_of(self, name: str) -> str:
        if name == MODEL:
            return self._args.model
        return str(self._directory / name / "hf")

    def _round(self) -> Path:
        return self._directory / f"round-{self._state.rounds}"

    def _clean_up(self) -> None:
        """Delete what later rounds do not need: states, checkpoints, and models that cannot be served again."""
        needed = {self._state.heads, self._state.previous}
        for directory in self._directory.glob("round-*"):
            shutil.rmtree(directory / "states", ignore_errors=True)
            if directory.name not in needed:
                shutil.rmtree(directory / "hf", ignore_errors=True)
            for checkpoint in directory.glob("run/checkpoint-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)


def is_worse(now: Served, before: Served) -> bool:
    """Return whether fewer drafts are accepted per step than before, by more than chance explains."""
    error = math.sqrt(now.squared_error + before.squared_error)
    return now.per_step < before.per_step - ERRORS * error
