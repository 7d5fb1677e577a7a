"""`megatron dpo` at several layouts, the reference model at others, against one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from swiftlite import rules
from swiftlite.args.commands import DpoArgs
from swiftlite.errors import UserError
from swiftlite.train import dpo, phases
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import OPTIONS, SIZES
from tests.tiny import make_tiny_hf
from tests.train.pairs import write_pairs

pytestmark = pytest.mark.gloo

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
REF_TP2 = {"ref_tensor_model_parallel_size": 2, "ref_pipeline_model_parallel_size": 1}
REF_PP2 = {"ref_tensor_model_parallel_size": 1, "ref_pipeline_model_parallel_size": 2}
LORA = {"tuner_type": "lora", "lora_rank": 4, "lr": 1e-2}
# By what is trained (a family and options): the layouts that are to have the numbers of one process.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "lora": ("qwen3", LORA),
    "experts": ("qwen3_moe", LORA),
    "bfloat16": ("qwen3_moe", LORA | {"torch_dtype": "bfloat16"}),
}
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("full", "TP2, reference PP2"): TP2 | REF_PP2,
    ("full", "PP2, reference TP2"): PP2 | REF_TP2,
    ("full", "DP2, reference PP2"): REF_PP2,
    ("full", "CP2, packed"): {"context_parallel_size": 2, "padding_free": True},
    ("lora", "TP2"): TP2,
    ("lora", "PP2"): PP2,
    ("experts", "EP2, reference TP2"): EP2 | REF_TP2,
    ("bfloat16", "EP2"): EP2,
}
# Float32 sums in another order, on log-probabilities of about 100; rewards are differences of these. bfloat16 rounds
# to 3 digits, and after a step weights differ by that.
TOLERANCE: dict[str, Any] = {"float32": {"rel": 1e-3, "abs": 1e-3}, "bfloat16": {"rel": 3e-2, "abs": 5e-2}}


def run_all(jobs: list[DpoArgs], ports: list[int], world_size: int) -> None:
    for args, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        rules.check(args, world_size)
        dpo.run(args)


def start(num_processes: int, jobs: list[DpoArgs]) -> list[list[dict[str, float]]]:
    """The metrics of each job's steps, and of the evaluation after the last one."""
    stores = [open_store() for _ in jobs]
    launch(num_processes, run_all, jobs, [store.port for store in stores], num_processes)
    found = []
    for args in jobs:
        lines = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
        found.append([{name: line[name] for name in line if not name.endswith(("second", "_gb"))} for line in lines])
    return found


def make_options(place: Path, family: str, name: str, **changed: Any) -> DpoArgs:
    """A run of 3 steps of a tiny model, whose reference is another one."""
    models = [place / f"{family}-{which}" for which in ("model", "reference")]
    for seed, hf_dir in enumerate(models):
        if not hf_dir.exists():
            make_tiny_hf(hf_dir, family, depth=1, seed=seed, with_tokenizer=True, **SIZES)
    usual: dict[str, Any] = OPTIONS | {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 3}
    return DpoArgs(
        model=str(models[0]),
        ref_model=str(models[1]),
        dataset=[str(write_pairs(place / "pairs.jsonl"))],
        split_dataset_ratio=0.25,
        output_dir=str(place / name.replace(" ", "_")),
        acceptance_samples=0,
        report_to=[],
        **(usual | changed),
    )


def test_a_layout_changes_no_number(tmp_path):
    alone = {name: make_options(tmp_path, family, name, **options) for name, (family, options) in TRAINED.items()}
    by_one = dict(zip(alone, start(1, list(alone.values())), strict=True))
    cut_up = {}
    for (what, name), layout in LAYOUTS.items():
        cut_up[what, name] = replace(alone[what], output_dir=str(tmp_path / f"{what}_{name}"), **layout)
    by_two = start(2, list(cut_up.values()))
    for ((what, name), args), metrics in zip(cut_up.items(), by_two, strict=True):
        assert len(by_one[what]) == 4
        for one, many in zip(by_one[what], metrics, strict=True):
            assert many == pytest.approx(one, **TOLERANCE[args.torch_dtype]), f"{what} {name}"


def prepare_with(args: list[DpoArgs]) -> str:
    """What a rank is told that has options of its own."""
    with phases.open_session(args[0]) as mesh:
        try:
            dpo.prepare(args[dist.get_rank()], mesh)
        except UserError as error:
            return str(error)
    return ""


def test_ranks_with_other_references_are_told(tmp_path):
    args = make_options(tmp_path, "qwen3", "run")
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=0, with_tokenizer=True)
    told = launch(2, prepare_with, [args, replace(args, ref_model=str(other))])
    assert told[0] == told[1]
    assert told[0].splitlines()[1].startswith("  tensors of --ref_model: ")
