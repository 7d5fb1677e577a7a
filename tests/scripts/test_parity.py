"""Test how scripts/parity.py shows measured cells. tests/parallel/test_parity.py measures some of them."""

import pytest

from tests.parallel.parity import BOUNDS


@pytest.fixture
def script(load_script):
    return load_script("parity")


ZERO = dict.fromkeys(BOUNDS, 0.0)
REASON = "--expert_model_parallel_size 2, but the model has no experts"


def test_a_table(script):
    half = ZERO | {"gradients": BOUNDS["gradients"] / 2}
    text = script.render({"llama": {"PP2": half, "EP2": REASON}, "glm4_moe": {"PP2": ZERO, "EP2": half}})
    assert text.splitlines()[:4] == [
        "| | llama | glm4_moe |",
        "|---|---|---|",
        "| PP2 | 0.50 (gradients 1e-05) | 0 |",
        "| EP2 | [1] | 0.50 (gradients 1e-05) |",
    ]
    assert text.splitlines()[-1] == f"1. {REASON}"


def test_what_is_beyond_rounding(script):
    tiny, wrong = ZERO | {"loss": 1e-9}, ZERO | {"grad_norm_5": 0.01, "weights": float("nan")}
    table = {"llama": {"PP2": tiny, "full uniform 2": tiny, "EP2": REASON}, "mimo": {"PP2": wrong}}
    assert script.problems(table, is_exact=True) == [
        "llama, full uniform 2: loss 1.0e-09",
        "mimo, PP2: grad_norm_5 1.0e-02",
        "mimo, PP2: weights nan",
    ]
    assert len(script.problems(table, is_exact=False)) == 2
