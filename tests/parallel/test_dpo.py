"""`megatron dpo` at several layouts, the reference model at others, against one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs
from swiftlite.train import dpo
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import OPTIONS, SIZES
from tests.tiny import make_tiny_hf
from tests.train.pairs import write_pairs

pytestmark = pytest.mark.gloo

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
REF_PP2 = {"ref_tensor_model_parallel_size": 1, "ref_pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2, reference PP2": TP2 | REF_PP2,
    "PP2, reference TP2": PP2 | {"ref_tensor_model_parallel_size": 2, "ref_pipeline_model_parallel_size": 1},
    "DP2, reference PP2": REF_PP2,
    "CP2, packed": {"context_parallel_size": 2, "padding_free": True},
}


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


def test_a_layout_changes_no_number(tmp_path):
    models = {
        name: make_tiny_hf(tmp_path / name, "qwen3", depth=1, seed=seed, with_tokenizer=True, **SIZES)
        for seed, name in enumerate(("model", "reference"))
    }

    def args(name: str, **layout: Any) -> DpoArgs:
        usual: dict[str, Any] = OPTIONS | {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 3}
        return DpoArgs(
            model=str(models["model"]),
            ref_model=str(models["reference"]),
            dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
            split_dataset_ratio=0.25,
            output_dir=str(tmp_path / name.replace(" ", "_")),
            acceptance_samples=0,
            report_to=[],
            **(usual | layout),
        )

    (alone,) = start(1, [args("alone")])
    others = start(2, [args(name, **layout) for name, layout in LAYOUTS.items()])
    assert len(alone) == 4
    for name, metrics in zip(LAYOUTS, others, strict=True):
        for one, many in zip(alone, metrics, strict=True):
            # Float32 sums in another order, on log-probabilities of about 100; rewards are differences of these.
            assert many == pytest.approx(one, rel=1e-3, abs=1e-3), name
