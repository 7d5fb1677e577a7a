"""Test `megatron gkd` with several layouts against one process, on stored completions and on answers."""

from pathlib import Path
from typing import Any

import pytest

from swiftlite.args.commands import GkdArgs
from swiftlite.families.resolved import resolve
from swiftlite.plan.distillation import on_policy_steps
from swiftlite.train import phases
from tests.parallel.launch import prepare_session
from tests.parallel.parity import SIZES
from tests.parallel.runs import CP2, EP2, PP2, TP2, check_layouts, start
from tests.tiny import make_tiny_hf
from tests.train.distilled import gkd_options, make_models, store

pytestmark = pytest.mark.gloo

STEPS = 2
SEED = 1
"""With this seed, the first step is on answers, the second on completions."""
TRAINED: dict[str, dict[str, Any]] = {
    "mixture": {"beta": 0.3, "loss_temperature": 0.8},
    "reverse": {"beta": 1.0, "padding_free": True},
    "forward": {"beta": 0.0, "tuner_type": "lora", "lora_rank": 4, "lr": 1e-2},
}
TEACHER_TP2 = {"teacher_tensor_model_parallel_size": 2, "teacher_pipeline_model_parallel_size": 1}
TEACHER_PP2 = {"teacher_tensor_model_parallel_size": 1, "teacher_pipeline_model_parallel_size": 2}
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("mixture", "TP2+SP"): TP2 | {"sequence_parallel": True},
    ("mixture", "PP2"): PP2,
    ("mixture", "PP2xVPP2"): PP2 | {"num_virtual_stages_per_pipeline_rank": 2},
    ("mixture", "PP2, layout"): PP2 | {"pipeline_model_parallel_layout": "Ettt|tmL"},
    ("mixture", "CP2"): CP2,
    ("mixture", "DP2, distributed optimizer"): {"use_distributed_optimizer": True},
    ("reverse", "TP2"): TP2,
    ("reverse", "CP2, packed"): CP2,
    ("reverse", "PP2"): PP2,
    ("forward", "TP2"): TP2,
    ("mixture", "DP2, teacher TP2"): TEACHER_TP2,
    ("mixture", "TP2, teacher PP2"): TP2 | TEACHER_PP2,
    ("reverse", "PP2, packed, teacher TP2"): PP2 | TEACHER_TP2,
    ("forward", "TP2, teacher DP2"): TP2 | {"teacher_tensor_model_parallel_size": 1},
}
IN_CI = [("mixture", "TP2+SP"), ("reverse", "CP2, packed")]
# Float32 sums in another order.
TOLERANCE: dict[str, Any] = {"rel": 1e-3, "abs": 2e-4}


def make_options(place: Path, name: str, **changed: Any) -> GkdArgs:
    models = place / "student", place / "teacher"
    if not models[0].exists():
        make_models(place, **SIZES)
    usual = {"rollouts_from": str(place / f"rollouts-{name}"), "output_dir": str(place / name), "train_iters": STEPS}
    return gkd_options(models, place)(**{"seed": SEED} | usual | changed)


def store_all(jobs: list[GkdArgs], ports: list[int]) -> None:
    for args, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        with phases.open_session(args, resolve(args.model)) as mesh:
            for step in on_policy_steps(args, STEPS):
                store(args, mesh, Path(args.rollouts_from or ""), step)


def compare(
    alone: dict[str, GkdArgs], layouts: dict[tuple[str, str], dict[str, Any]], *, on_three: bool = False
) -> None:
    """Train each job in one process and in its layouts, and compare their metrics."""
    start(1, store_all, [args for what, args in alone.items() if any(what == of for of, _ in layouts)])
    for lines in check_layouts(alone, layouts, TOLERANCE, on_three=layouts if on_three else ()).values():
        assert [line["on_policy"] for line in lines] == [0, 1]
        assert all(line["loss"] > 0.05 and line["mtp_1_loss"] > 0 and line["grad_norm"] > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("is_in_ci", [True, False], ids=["chosen", "others"])
def test_a_layout_changes_no_number(tmp_path, is_in_ci):
    alone = {name: make_options(tmp_path, name, **options) for name, options in TRAINED.items()}
    compare(alone, {key: layout for key, layout in LAYOUTS.items() if (key in IN_CI) == is_in_ci})


@pytest.mark.slow
def test_a_rank_without_a_part_of_the_teacher(tmp_path):
    """Three ranks train; two of them hold the teacher."""
    args = make_options(tmp_path, "mixture", **TRAINED["mixture"])
    layouts = {("mixture", "DP3, teacher TP2"): {"micro_batch_size": 2} | TEACHER_TP2}
    compare({"mixture": args}, layouts, on_three=True)


@pytest.mark.slow
def test_models_of_other_kinds(tmp_path):
    """Either model has experts or a tied output layer, which the other does not have."""
    kinds = {"dense": ("qwen3", False), "tied": ("qwen3", True), "experts": ("qwen3_moe", False)}
    made = {}
    for seed, (kind, (family, tied)) in enumerate(kinds.items()):
        sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 4 if kind == "dense" else 6}
        made[kind] = make_tiny_hf(tmp_path / kind, family, depth=1, tied=tied, seed=seed, with_tokenizer=True, **sizes)
    cases = {
        ("dense", "tied"): PP2,
        ("tied", "dense"): PP2,
        ("experts", "dense"): EP2,
        ("dense", "experts"): TP2 | {"sequence_parallel": True},
        ("experts", "tied"): PP2,
    }
    alone, layouts = {}, {}
    for (student, teacher), layout in cases.items():
        name = f"{student} of {teacher}"
        alone[name] = make_options(
            tmp_path, name, model=str(made[student]), teacher_model=str(made[teacher]), micro_batch_size=2
        )
        layouts[name, "divided"] = layout
    compare(alone, layouts)
