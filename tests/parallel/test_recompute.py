"""Test that recomputation on two tensor-parallel ranks gives bitwise identical results."""

import pytest
import torch

from swiftlite.args.fields import ParallelLayout
from swiftlite.runtime.distributed import session
from tests.model.test_recompute import assert_same, full, make_model, train
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo

SETTINGS = {
    "none": {},
    **{f"{method} {number}": full(method, number) for method, number in (("uniform", 1), ("uniform", 3), ("block", 2))},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}


def train_all(sequence_parallel: bool) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    """Train all cases in this process."""
    layout = ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    with session(layout) as mesh:
        return {
            (depth, name): train(make_model(mesh, depth, **options))
            for depth in (1, 2)
            for name, options in SETTINGS.items()
        }


@pytest.fixture(scope="module", params=[False, True], ids=["TP2", "TP2+SP"])
def trained(request):
    return launch(2, train_all, request.param)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "none"])
@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_compute_the_same_bits(trained, depth, name):
    for rank in trained:
        assert_same(rank[depth, name], rank[depth, "none"])
