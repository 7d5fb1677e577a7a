"""Test that all ranks skip a step if the gradients of one rank are bad."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from swiftlite.args.commands import SftArgs
from swiftlite.families.resolved import resolve_options
from swiftlite.train import phases
from tests.parallel.launch import prepare_session
from tests.parallel.runs import metrics_of, start
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.conftest import options_in
from tests.train.test_bad_steps import NAN, run, tensors_of, without_update

pytestmark = pytest.mark.gloo

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "DP2 distributed": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}


def skip_and_leave_out(jobs: Sequence[SftArgs], ports: Sequence[int]) -> None:
    """Run two jobs: in the first, the last rank has gradients of NaN at step 2; the second leaves step 2 out."""
    phases.write_page = lambda run: None  # this process ends with the runs
    for number, (args, port) in enumerate(zip(jobs, ports, strict=True)):
        prepare_session(port)
        with phases.open_session(args, resolve_options(args)["model"]) as mesh:
            if number % 2:
                run(args, mesh, {}, without_update(2))
            else:
                run(args, mesh, {2: NAN} if dist.get_rank() == 1 else {})


@pytest.mark.parametrize("name", some_of(LAYOUTS, "DP2 distributed"))
def test_all_ranks_skip_a_step_of_which_one_has_bad_gradients(tmp_path, name):
    make = options_in(tmp_path, make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True))
    skips = make(output_dir=str(tmp_path / "skips"), micro_batch_size=1, skip_bad_steps=6.0, **LAYOUTS[name])
    left_out = replace(skips, output_dir=str(tmp_path / "left out"), skip_bad_steps=0.0)
    start(2, skip_and_leave_out, [skips, left_out])
    (decision,) = (line for line in metrics_of(skips) if line.get("fault") == "bad_step")
    assert decision["step"] == 2
    checkpoints = [tensors_of(Path(job.output_dir) / "checkpoint-4") for job in (skips, left_out)]
    assert checkpoints[0] == checkpoints[1]
