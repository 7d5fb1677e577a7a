"""Test the draft acceptance on prompts with images, for layouts of two ranks, against transformers' model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from swiftlite.acceptance.held_out import HeldOut, Prompt
from swiftlite.acceptance.report import read_acceptance
from swiftlite.args.commands import SftArgs
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from tests.engines.seeing import NEW_TOKENS, Seeing, counts_within_answers, make_prompts, write_seeing
from tests.images import extras_of
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import SIZES, TP2_SP
from tests.tiers import some_of

pytestmark = pytest.mark.gloo

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": TP2_SP,
    "DP2": {},
    "PP2xVPP2": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
}


@dataclass(frozen=True)
class Job:
    """A measurement with a layout, written to `path`."""

    hf_dir: Path
    path: Path
    options: dict[str, Any]
    prompts: list[Prompt]


def measure_all(jobs: Sequence[Job], ports: Sequence[int]) -> None:
    for job, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        measure(job)


def measure(job: Job) -> None:
    with session(layout_of(SftArgs(model=str(job.hf_dir), **job.options)), timeout_minutes=2) as mesh:
        chunks, _ = open_model(resolve(job.hf_dir).with_images(), mesh, dtype=torch.float32)
        held_out = HeldOut(
            path=job.path,
            mesh=mesh,
            num_drafts=2,
            prompts=job.prompts,
            eos_token_ids=(),
            max_new_tokens=NEW_TOKENS,
            max_length=100,
            extras=extras_of(job.hf_dir),
        )
        held_out.measure(
            "before", [model.eval() for model in chunks], {"eval_mtp_1_acceptance": 0.5, "eval_mtp_2_acceptance": 0.5}
        )


@pytest.mark.parametrize("names", some_of([["TP2+SP", "DP2"], ["PP2xVPP2"]]), ids=" ".join)
def test_counts_are_those_of_an_engine(shared, tmp_path, names):
    hf_dir = shared("seeing-parallel", lambda directory: write_seeing(directory, "qwen3_5", 2, **SIZES))
    hf: Any = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32).eval()
    reference = Seeing.open(hf_dir, "qwen3_5", 2)
    seen = make_prompts(hf_dir, reference, hf)
    expected = counts_within_answers(reference, hf, seen, 2)
    prompts = [Prompt(each.ids_1S[0].tolist(), extras=each.sample(hf).extras) for each in seen]
    jobs = [Job(hf_dir, tmp_path / name, LAYOUTS[name], prompts) for name in names]
    stores = [open_store() for _ in jobs]
    launch(2, measure_all, jobs, [store.port for store in stores])
    for job in jobs:
        found = read_acceptance(job.path)["before"]["generated"]
        accepted = [round(rate * found["drafts"]) for rate in found["acceptance_per_position"]]
        assert (found["drafts"], accepted) == (expected.drafts, list(expected.accepted_per_position)), job.path.name
