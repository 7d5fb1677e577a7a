"""Test training in FP8 without Transformer Engine: layouts and recomputation against one process."""

from typing import Any

import pytest
import torch

from swiftlite.plan.kernels import Kernels
from swiftlite.plan.low_precision import LowPrecision
from tests.parallel import parity
from tests.parallel.parity import CASES, FULL, TP2_SP, Job, Result
from tests.tiers import selected

pytestmark = pytest.mark.gloo

LORA = {"tuner_type": "lora", "lora_rank": 4, "use_dora": True}
EXPERTS = "glm4_moe"
# Model, number of processes, recipe and options of each run. Without a recipe, a run computes in bfloat16.
RUNS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "bf16": ("qwen3", 1, "", {}),
    "rowwise": ("qwen3", 1, "rowwise", {}),
    "recomputed": ("qwen3", 1, "rowwise", FULL["uniform 2"]),
    "LoRA": ("qwen3", 1, "rowwise", LORA),
    "tensorwise": ("qwen3", 1, "tensorwise", {}),
    "TP2": ("qwen3", 2, "rowwise", CASES["TP2"].options),
    "TP2+SP": ("qwen3", 2, "rowwise", TP2_SP),
    "tensorwise TP2+SP": ("qwen3", 2, "tensorwise", TP2_SP),
    "PP2": ("qwen3", 2, "rowwise", CASES["PP2"].options),
    "DP2": ("qwen3", 2, "rowwise", CASES["DP2+overlap"].options),
    "experts bf16": (EXPERTS, 1, "", {}),
    "experts": (EXPERTS, 1, "rowwise", {}),
    "experts EP2": (EXPERTS, 2, "rowwise", CASES["EP2"].options),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: parity.make_model(root / family, family, 1) for family in ("qwen3", EXPERTS)}


@pytest.fixture(scope="module")
def computed(request, models, tmp_path_factory) -> dict[str, Result]:
    """Compute the runs that the selected tests need."""
    root = tmp_path_factory.mktemp("runs")
    needed = {"bf16", *selected(request, "one"), *selected(request, "other")}
    groups: dict[int, dict[str, Job]] = {1: {}, 2: {}}
    for name, (family, num_processes, recipe, options) in RUNS.items():
        if name in needed:
            kernels = Kernels(low_precision=LowPrecision("hybrid", recipe, is_local=True)) if recipe else Kernels()
            options = parity.SMALL | {"torch_dtype": "bfloat16"} | options
            job = Job(models[family], root / name, options, parity.FEW_STEPS, kernels=kernels)
            groups[num_processes][name] = job
    return parity.run_each(groups)


def losses(result: Result) -> list[tuple[float, float]]:
    return [(step["loss"], step["mtp_1_loss"]) for step in result.metrics]


@pytest.mark.parametrize(
    ("one", "other"),
    [("rowwise", "recomputed"), ("rowwise", "PP2"), pytest.param("rowwise", "DP2", marks=pytest.mark.slow)],
)
def test_the_same_rows_make_the_same_bits(computed, one, other):
    """A row is quantized by itself, so it does not matter where, how often and next to which rows it is computed."""
    assert losses(computed[other]) == losses(computed[one])


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [("experts", "experts EP2")])
def test_experts_on_two_ranks(computed, one, other):
    """An expert multiplies tokens of both ranks together, so gradients of its weights are rounded to bfloat16 once."""
    assert losses(computed[other])[0] == losses(computed[one])[0]
    assert losses(computed[other])[1] == pytest.approx(losses(computed[one])[1], rel=1e-2)
    assert computed[other].metrics[0]["grad_norm"] == pytest.approx(computed[one].metrics[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rowwise", "TP2+SP"),
        pytest.param("rowwise", "TP2", marks=pytest.mark.slow),
        pytest.param("tensorwise", "tensorwise TP2+SP", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_ranks_scale_their_part_of_a_sum(computed, one, other):
    """A sum of which each rank has half has two scales where one process has one: as far as from bfloat16.

    A missing sum over ranks leaves about half of a gradient. Those of the norms of queries and keys are the noisiest.
    """
    expected, found, plain = computed[one], computed[other], computed["bf16"]
    assert losses(found)[0] == pytest.approx(losses(expected)[0], rel=1e-2)
    assert found.metrics[0]["grad_norm"] == pytest.approx(expected.metrics[0]["grad_norm"], rel=0.05)
    for key, gradient in expected.gradients.items():
        noise = distance(gradient, plain.gradients[key])
        assert distance(found.gradients[key], gradient) < 2 * noise + 0.02, (key, noise)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bf16", "rowwise"),
        pytest.param("bf16", "tensorwise", marks=pytest.mark.slow),
        pytest.param("experts bf16", "experts", marks=pytest.mark.slow),
    ],
)
def test_losses_are_near_those_of_bfloat16_and_not_the_same(computed, one, other):
    """With three mantissa bits a number is rounded by up to 6 %; in sums over 64 products these errors average out."""
    plain, low = computed[one], computed[other]
    assert losses(low) == [pytest.approx(step, rel=3e-2) for step in losses(plain)]
    assert losses(low) != losses(plain)
    assert low.metrics[0]["grad_norm"] == pytest.approx(plain.metrics[0]["grad_norm"], rel=0.1)
    shapes = [{key: tensor.shape for key, tensor in result.weights.items()} for result in (low, plain)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [("rowwise", "LoRA")])
def test_adapters_leave_the_products_of_their_layers_in_low_precision(computed, one, other):
    """Adapters initially add zero."""
    assert losses(computed[other])[0] == losses(computed[one])[0]
    assert any(gradient.any() for gradient in computed[other].gradients.values())


@pytest.mark.slow
def test_checkpoints_are_those_of_bfloat16(models, tmp_path):
    """A run in FP8 resumes from a checkpoint in bfloat16, and the other way round, as if it had written it itself."""
    low = Kernels(low_precision=LowPrecision("hybrid", "rowwise", is_local=True))
    options = parity.SMALL | {"torch_dtype": "bfloat16"}

    def job(name: str, steps: tuple[int, int], kernels: Kernels, resume: str = "", save: bool = False) -> Job:
        checkpoint = tmp_path / resume / "checkpoint-1" if resume else None
        return Job(models["qwen3"], tmp_path / name, options, steps, checkpoint, kernels=kernels, save=save)

    both = {"low": low, "plain": Kernels()}
    parity.run(1, [job(name, (1, 1), kernels, save=True) for name, kernels in both.items()])
    mixed = [("low", "plain"), ("plain", "low"), ("low", "low"), ("plain", "plain")]
    jobs = [job(f"{first} {then}", (2, 2), both[then], first) for first, then in mixed]
    by_name = dict(zip(mixed, parity.run(1, jobs), strict=True))
    assert by_name["low", "plain"].weights.keys() == by_name["plain", "plain"].weights.keys()
    for first, then in mixed[:2]:
        assert losses(by_name[first, then]) == [pytest.approx(losses(by_name[then, then])[0], rel=1e-2)]
