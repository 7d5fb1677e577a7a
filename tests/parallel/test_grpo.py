"""Test `megatron grpo` with several layouts on stored completions against one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.args.commands import GrpoArgs
from swiftlite.families.resolved import resolve
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.parallel.launch import prepare_session
from tests.parallel.parity import SIZES, save_gradients
from tests.parallel.runs import CP2, EP2, PP2, TP2, check_layouts, metrics_of, run_all, start
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.completions import make_teacher, policy_options, store
from tests.train.prepared import prepare

pytestmark = pytest.mark.gloo

STEPS = 2
# By what is trained (a family and options): the layouts that must have the numbers of one process. Completions have
# tokens of tools, except those "without tools".
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("qwen3", {"beta": 0.1, "teacher_kl_coef": 0.5, "entropy_coef": 0.1}),
    "bnpo": ("qwen3", {"loss_type": "bnpo", "entropy_coef": 0.1}),
    "sequence": (
        "qwen3",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "beta": 0.05}
        | {"teacher_kl_coef": 1.0},
    ),
    "experts": ("qwen3_moe", {"loss_type": "dr_grpo", "temperature": 0.7, "teacher_kl_coef": 0.5}),
    "without tools": ("qwen3", {"loss_type": "grpo", "beta": 0.1, "teacher_kl_coef": 0.5}),
    "lora": ("qwen3", {"tuner_type": "lora", "lora_rank": 4, "lr": 1e-2}),
}
# Layouts of the reference model and the teacher.
FROZEN_TP2 = {f"{name}_tensor_model_parallel_size": 2 for name in ("ref", "teacher")}
FROZEN_TP2 |= {f"{name}_pipeline_model_parallel_size": 1 for name in ("ref", "teacher")}
FROZEN_PP2 = {name: 3 - size for name, size in FROZEN_TP2.items()}
THIRDS = ("dapo", "DP3, frozen models TP2")
"""A layout of three ranks that all train; two of them hold the frozen models."""
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("dapo", "TP2+SP"): TP2 | {"sequence_parallel": True},
    ("dapo", "PP2"): PP2,
    ("dapo", "PP2xVPP2"): PP2 | {"num_virtual_stages_per_pipeline_rank": 2},
    ("dapo", "DP2, distributed optimizer"): {"use_distributed_optimizer": True},
    ("dapo", "dp_balanced"): {"packing": True, "sequence_packing_scheduler": "dp_balanced"},
    ("sequence", "CP2"): CP2,
    ("sequence", "CP2, packed"): CP2 | {"padding_free": True},
    ("sequence", "TP2"): TP2,
    ("bnpo", "CP2"): CP2,
    ("bnpo", "DP2"): {},
    ("experts", "EP2"): EP2,
    ("lora", "TP2"): TP2,
    ("without tools", "DP2"): {},
    ("without tools", "TP2, frozen models PP2"): TP2 | FROZEN_PP2,
    ("dapo", "PP2, frozen models TP2"): PP2 | FROZEN_TP2,
    ("dapo", "DP2, packed, frozen models TP2"): {"padding_free": True} | FROZEN_TP2,
    ("dapo", "TP2, frozen models DP2"): TP2 | dict.fromkeys(FROZEN_TP2, 1),
    THIRDS: {"micro_batch_size": 2} | FROZEN_TP2,
}
# Float32 sums in another order; the log-probabilities of completions are sums of about 10 numbers near 5.
TOLERANCE: dict[str, Any] = {"rel": 1e-3, "abs": 2e-4}


def make_options(place: Path, family: str, name: str, **changed: Any) -> GrpoArgs:
    model, reference = place / family, place / f"{family}-reference"
    for seed, directory in enumerate((model, reference)):
        if not directory.exists():
            make_tiny_hf(directory, family, depth=1, seed=seed, with_tokenizer=True, **SIZES)
    if not (place / "teacher").exists():
        make_teacher(place / "teacher", **SIZES)
    if changed.get("teacher_kl_coef"):
        changed["teacher_model"] = str(place / "teacher")  # its layers divide into equal stages
    if changed.get("beta"):
        changed["ref_model"] = str(reference)  # its log-probabilities are not stored, but computed in the layout
    usual = {"rollouts_from": str(place / f"rollouts-{name}"), "output_dir": str(place / name), "train_iters": STEPS}
    return policy_options(model, place)(**usual | changed)


def store_all(jobs: list[GrpoArgs], ports: list[int]) -> None:
    for args, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        with phases.open_session(args, resolve(args.model)) as mesh:
            for number in range(STEPS):
                directory = Path(args.rollouts_from or "")
                store(args, mesh, directory, number, has_tools="without" not in directory.name)


# CI runs stages, packed parts of sequences, and completions without tools. All others are in the slow tier.
CI = [("dapo", "PP2xVPP2"), ("sequence", "CP2, packed"), ("without tools", "TP2, frozen models PP2")]
CHOSEN = {name: LAYOUTS[name] for name in CI}


@pytest.mark.parametrize("layouts", some_of([CHOSEN, LAYOUTS], CHOSEN), ids=["chosen", "all"])
def test_a_layout_changes_no_number(tmp_path, layouts):
    alone = {}
    for name in dict.fromkeys(what for what, _ in layouts):
        family, options = TRAINED[name]
        alone[name] = make_options(tmp_path, family, name, **options)
    start(1, store_all, list(alone.values()))
    for name, lines in check_layouts(alone, layouts, TOLERANCE, on_three=[THIRDS]).items():
        assert len(lines) == STEPS
        assert all(line["mtp_1_loss"] > 0 and line["grad_norm"] > 0 for line in lines)
        assert all(("teacher_kl" in line) == bool(alone[name].teacher_model) for line in lines)


def gradients_of(jobs: list[GrpoArgs], ports: list[int]) -> None:
    """Write the gradients of the first step of each job."""
    for args, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        hf_model = resolve(args.model)
        with phases.open_session(args, hf_model) as mesh:
            run = prepare(args, mesh)
            trainer = training.make_trainer(run, phases.state_of(run))
            trainer.step(1)
            state = run.train_state
            directory = Path(args.output_dir) / "gradients"
            save_gradients(state.wrapped, state.chunks, directory, hf_model.family, hf_model.config)


@pytest.mark.parametrize(
    "layout", some_of([{}, PP2, TP2 | {"sequence_parallel": True}], {}), ids=["one", "PP2", "TP2+SP"]
)
def test_heads_change_no_bit_of_the_trunk(tmp_path, layout):
    """The gradients of the trunk are those of a run that drops the heads."""
    with_heads = make_options(tmp_path, "qwen3", "heads", overlap_grad_reduce=True, **layout)
    start(1, store_all, [make_options(tmp_path, "qwen3", "heads")])
    without = replace(with_heads, mtp_num_layers=0, output_dir=str(tmp_path / "none"))
    for args in (with_heads, without):
        Path(args.output_dir).mkdir()
    start(2 if layout else 1, gradients_of, [with_heads, without])
    of_heads, of_none = (load_file(tmp_path / name / "gradients" / "model.safetensors") for name in ("heads", "none"))
    trunk = {name for name in of_heads if not name.startswith("mtp.")}
    assert trunk == set(of_none)
    assert trunk < set(of_heads)
    assert all(torch.equal(of_heads[name], of_none[name]) for name in trunk)
    assert all(of_heads[name].any() for name in set(of_heads) - trunk)


@pytest.mark.slow
def test_a_layout_changes_no_evaluation(tmp_path):
    """The first rank draws the completions with the weights of all stages; the teacher has the layout of the run."""
    (tmp_path / "held_out.jsonl").write_text('{"query": "What is 8 plus 8?"}\n{"query": "What is 9 plus 9?"}\n')
    changed: dict[str, Any] = {"teacher_kl_coef": 0.5, "val_dataset": [str(tmp_path / "held_out.jsonl")]}
    alone = make_options(tmp_path, "qwen3", "alone", rollouts_from=None, num_generations=1, train_iters=1, **changed)
    divided = replace(alone, output_dir=str(tmp_path / "PP2"), **PP2)
    start(1, run_all, [alone], 1)
    start(2, run_all, [divided], 2)
    (first, *_), (other, *_) = metrics_of(alone), metrics_of(divided)
    assert first["step"] == 0
    assert first["eval_teacher_kl"] > 0
    assert other == pytest.approx(first, **TOLERANCE)
    assert [line["step"] for line in metrics_of(alone) if "eval_teacher_kl" in line] == [0, 1]
