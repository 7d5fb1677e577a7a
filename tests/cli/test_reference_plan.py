"""Test the output of `swiftlite doctor --plan --loss_type`. tests/parallel/test_dpo.py tests its numbers."""

from typing import Any

import pytest

from swiftlite import rules
from swiftlite.base.errors import OptionError
from tests.cli.test_doctor_plan import model  # noqa: F401, a fixture
from tests.messages import mentions
from tests.planned import plan, planned

PAIRS: dict[str, Any] = {"loss_type": "sigmoid", "tensor_model_parallel_size": 4, "num_gpus": 8}


def by_rank(lines: list[str]) -> list[str]:
    """Return the rows of the table with the memory of both models, and the lines after it; empty without a reference
    model.
    """
    starts = [number for number, line in enumerate(lines) if line.split()[:1] == ["ranks"]]
    return lines[starts[0] + 1 :] if starts else []


def test_both_models_by_rank(capsys, model):  # noqa: F811
    reference = {"ref_tensor_model_parallel_size": 1, "ref_pipeline_model_parallel_size": 2}
    code, lines = plan(capsys, model=model, **PAIRS, **reference)
    assert code == 0
    assert mentions(lines[1], "2 2048")  # both answers of a pair
    assert [line.split()[:2] for line in by_rank(lines)[:2]] == [["0-3", "0"], ["4-7", "0"]]

    code, lines = plan(capsys, model=model, gpu_memory_gb=10.0, **PAIRS, ref_tensor_model_parallel_size=1)
    assert code == 1
    assert mentions(lines[-1], "--ref_tensor_model_parallel_size --ref_pipeline_model_parallel_size")
    _, lines = plan(capsys, model=model, **PAIRS | {"loss_type": "simpo"})
    assert by_rank(lines) == []


def test_ranks_that_the_reference_leaves_out(capsys, model):  # noqa: F811
    options = {"loss_type": "sigmoid", "num_gpus": 3, "gpu_memory_gb": 400.0}
    code, lines = plan(capsys, model=model, ref_tensor_model_parallel_size=2, **options)
    assert code == 0
    shared, left_out = (line.split() for line in by_rank(lines)[:2])
    assert [shared[0], shared[3], left_out[0], left_out[3]] == ["0-1", "0", "2", "-"]
    assert left_out[4:7] == ["0.00", "0.00", "0.00"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"loss_type": "ipo", "ref_pipeline_model_parallel_size": 2, "num_gpus": 1},
            "--ref_pipeline_model_parallel_size 2 1",
        ),
        ({"loss_type": "ipo", "ref_model": "nowhere"}, "--ref_model nowhere config.json"),
        ({"loss_type": "ipo", "mtp_mode": "heads_only"}, "megatron dpo --mtp_mode heads_only"),
    ],
)
def test_what_cannot_be_planned(model, options, problem):  # noqa: F811
    with pytest.raises(OptionError) as raised:
        rules.check(planned(model=model, **options))
    assert mentions(str(raised.value), problem)
