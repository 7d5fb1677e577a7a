"""Packed rows = the same samples one by one: losses of every token, gradients, metrics, at every kind of layout."""

from pathlib import Path

import pytest
import torch

from tests.parallel.packing import LONGEST, ROWS, Job, Result, run
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

SIZES = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LONGEST,
}
MODELS = [(family, depth) for family in ("llama", "mimo", "glm4_moe", "deepseek_v3") for depth in (1, 2)]
DENSE = [(family, depth) for family, depth in MODELS if family in ("llama", "mimo")]
LAYOUTS = {
    "CP2": {"context_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}
VPP2 = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
CHANGED = {"first": 0, "in the middle": 4, "longest": 5}
NUM_SAMPLES = sum(map(len, ROWS))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple, Result]:
    """By family, depth and name."""
    root: Path = tmp_path_factory.mktemp("packing")
    jobs: dict[int, dict[tuple, Job]] = {1: {}, 2: {}}
    for family, depth in MODELS:
        model = make_tiny_hf(root / f"{family}-{depth}", family, depth=depth, **SIZES)

        def add(num_processes: int, name: str, model=model, family=family, depth=depth, **options) -> None:
            out_dir = root / f"{family}-{depth}-{name}"
            jobs[num_processes][family, depth, name] = Job(model, out_dir, **options)

        add(1, "one by one", is_packed=False)
        add(1, "packed")
        for name, layout in LAYOUTS.items():
            add(2, name, layout=layout)
        if depth == 1:
            add(1, "full", recompute=FULL)
            add(1, "selective", recompute=SELECTIVE)
            for name, number in CHANGED.items():
                add(1, f"changed {name}", changed=number)
        else:
            add(2, "PP2xVPP2", layout=VPP2)
            add(2, "CP2 changed", layout=LAYOUTS["CP2"], changed=CHANGED["in the middle"])
            add(2, "TP2+SP changed", layout=LAYOUTS["TP2+SP"], changed=CHANGED["in the middle"])
    return {
        key: result
        for num_processes, chosen in jobs.items()
        for key, result in zip(chosen, run(num_processes, list(chosen.values())), strict=True)
    }


def assert_same_losses(ours: Result, expected: Result) -> None:
    for mine, its in zip(ours.losses, expected.losses, strict=True):
        # Losses are about 5 to 8; float32 sums in another order.
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)


def assert_same_gradients(ours: Result, expected: Result) -> None:
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        # Sums over tokens in another order: of each tensor's largest entry.
        torch.testing.assert_close(
            ours.gradients[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-9, msg=name
        )


@pytest.mark.parametrize("layout", ["packed", *LAYOUTS])
@pytest.mark.parametrize(("family", "depth"), MODELS)
def test_packed_is_one_by_one(results, family, depth, layout):
    alone, packed = results[family, depth, "one by one"], results[family, depth, layout]
    assert len(alone.losses) == NUM_SAMPLES
    assert all(len(losses) == 1 + depth for losses in alone.losses)
    assert_same_losses(packed, alone)
    assert_same_gradients(packed, alone)
    assert packed.metrics == pytest.approx(alone.metrics, rel=1e-6)


@pytest.mark.parametrize(("family", "depth"), DENSE)
def test_losses_of_a_dense_model_are_the_same_bits(results, family, depth):
    alone, packed = results[family, depth, "one by one"], results[family, depth, "packed"]
    assert all(map(torch.equal, packed.losses, alone.losses))


@pytest.mark.parametrize("family", sorted({family for family, _ in MODELS}))
def test_virtual_stages_take_rows_of_any_length(results, family):
    alone, packed = results[family, 2, "one by one"], results[family, 2, "PP2xVPP2"]
    assert_same_losses(packed, alone)
    assert_same_gradients(packed, alone)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("family", sorted({family for family, _ in MODELS}))
def test_recomputation_changes_no_bit(results, family, kind):
    kept, recomputed = results[family, 1, "packed"], results[family, 1, kind]
    assert all(map(torch.equal, recomputed.losses, kept.losses))
    assert recomputed.metrics == kept.metrics
    assert all(torch.equal(recomputed.gradients[name], gradient) for name, gradient in kept.gradients.items())


@pytest.mark.parametrize(
    "case",
    [
        *((1, f"changed {name}", "packed", number) for name, number in CHANGED.items()),
        (2, "CP2 changed", "CP2", 4),
        (2, "TP2+SP changed", "TP2+SP", 4),
    ],
    ids=lambda case: case[1],
)
@pytest.mark.parametrize("family", sorted({family for family, _ in MODELS}))
def test_a_sequence_does_not_see_another(results, family, case):
    depth, name, base, number = case
    before, after = results[family, depth, base].losses, results[family, depth, name].losses
    for other in range(NUM_SAMPLES):
        if other != number:
            assert torch.equal(before[other], after[other]), other
    if before[number].size(1) > 1:
        assert not torch.equal(before[number], after[number])
