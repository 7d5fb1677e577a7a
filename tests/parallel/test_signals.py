"""Test that all ranks end an evaluation after the same micro-batches if one of them receives a signal."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swiftlite.args.commands import SftArgs
from swiftlite.families.resolved import resolve_options
from swiftlite.model import forward
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.parallel.launch import prepare_session
from tests.parallel.runs import metrics_of, start
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.conftest import options_in
from tests.train.prepared import prepare

pytestmark = pytest.mark.gloo

LAYOUTS: dict[str, dict[str, Any]] = {"DP2": {}, "PP2": {"pipeline_model_parallel_size": 2}}


def train_with_and_without_a_signal(jobs: Sequence[SftArgs], ports: Sequence[int]) -> None:
    """Run three jobs: an uninterrupted one, one that rank 1 ends in its first evaluation, and one that resumes.

    The first one evaluates all micro-batches as one group.
    """
    phases.write_page = lambda run: None  # this process ends with the runs
    for number, (args, port) in enumerate(zip(jobs, ports, strict=True)):
        prepare_session(port)
        forward.GROUP_PER_STAGE = 1 if number % 3 else 1000
        with phases.open_session(args, resolve_options(args)["model"]) as mesh:
            ends = fit(args, mesh, stops=number % 3 == 1)
            assert ends == (signal.SIGTERM if number % 3 == 1 else 0)


def fit(args: SftArgs, mesh: Mesh, *, stops: bool) -> int:
    run = prepare(args, mesh)
    state = phases.restore(run)
    done: list[int] = []
    seen: list[int] = []
    trainer = replace(training.make_trainer(run, state), after_step=done.append)

    def see(model: torch.nn.Module, inputs: tuple) -> None:
        if done and not torch.is_grad_enabled():
            seen.append(1)
            if stops and len(seen) == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    run.train_state.chunks[0].register_forward_pre_hook(see)
    outcome = phases.fit(run, trainer, state.step, training.make_held_out(run))
    assert not stops or len(seen) == mesh.pp.size()  # one group
    return outcome.stopped_by


@pytest.mark.parametrize("name", some_of(LAYOUTS, "PP2"))
def test_an_evaluation_ends_on_all_ranks_and_is_repeated(tmp_path, name):
    make = options_in(tmp_path, make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True))
    usual = {"micro_batch_size": 1, "eval_steps": 2, "split_dataset_ratio": 0.4}
    stopped = make(output_dir=str(tmp_path / "stopped"), **usual, **LAYOUTS[name])
    unbroken = replace(stopped, output_dir=str(tmp_path / "unbroken"))
    start(2, train_with_and_without_a_signal, [unbroken, stopped, replace(stopped, resume=True)])
    assert (Path(stopped.output_dir) / "checkpoint-2").is_dir()
    assert metrics_of(stopped) == metrics_of(unbroken)
