"""Test the output of `swiftlite doctor --plan --loss_type`. tests/parallel/test_dpo.py tests its numbers."""

import json
import re
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.base.errors import OptionError
from tests.cli.test_doctor_plan import model  # noqa: F401, a fixture
from tests.messages import mentions
from tests.planned import QWEN3_8B, plan, planned

PAIRS: dict[str, Any] = {"loss_type": "sigmoid", "tensor_model_parallel_size": 4, "num_gpus": 8}


def by_stage(lines: list[str]) -> list[list[str]]:
    """Return the rows of the table with the memory of both models; empty without a reference model."""
    starts = [number for number, line in enumerate(lines) if line.split()[:3] == ["stage", "model", "reference"]]
    return [line.split() for line in lines[starts[0] + 1 :]] if starts else []


def test_both_models_by_stage(capsys, model):  # noqa: F811
    reference = {"ref_tensor_model_parallel_size": 1, "ref_pipeline_model_parallel_size": 2}
    code, lines = plan(capsys, model=model, **PAIRS, **reference)
    assert code == 0
    assert mentions(lines[1], "2 2048")  # both answers of a pair
    (number, *sizes), *_ = by_stage(lines)
    model_gb, *of_reference, total, _ = map(float, sizes)
    assert number == "0"
    assert all(size > 0 for size in of_reference)
    assert total == pytest.approx(model_gb + sum(of_reference), abs=0.03)  # of rounded numbers

    code, lines = plan(capsys, model=model, gpu_memory_gb=10.0, **PAIRS, ref_tensor_model_parallel_size=1)
    assert code == 1
    assert mentions(lines[-1], "--ref_tensor_model_parallel_size --ref_pipeline_model_parallel_size")
    _, lines = plan(capsys, model=model, **PAIRS | {"loss_type": "simpo"})
    assert by_stage(lines) == []


@pytest.mark.parametrize(
    ("options", "gpu_memory_gb"),
    [
        ({"loss_type": "sigmoid", "num_gpus": 8, "ref_tensor_model_parallel_size": 1}, 30.0),
        ({"max_completion_length": 256, "beta": 0.1}, 60.0),
        ({"max_completion_length": 256, "beta": 0.1, "ref_model": "shorter"}, 48.0),
        # With two pipeline stages, the reference model would need four GPUs.
        ({"max_completion_length": 256, "beta": 0.1, "num_gpus": 2, "ref_tensor_model_parallel_size": 2}, 80.0),
    ],
)
def test_a_suggestion_fits_with_the_models_next_to_the_trained_one(capsys, tmp_path, options, gpu_memory_gb):
    for name, layers in (("model", 36), ("shorter", 7)):
        (tmp_path / name).mkdir()
        config = QWEN3_8B | {"num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    options = options | {"model": tmp_path / "model", "gpu_memory_gb": gpu_memory_gb}
    if "ref_model" in options:
        options["ref_model"] = tmp_path / options["ref_model"]
    code, lines = plan(capsys, **options)
    assert code == 1
    (suggestion,) = (line for line in lines if line.lstrip().startswith("fits with"))
    text, _, flags = suggestion.partition(": ")
    if more := re.search(r"on (\d+) GPUs", text):
        options["num_gpus"] = more[1]
    words = flags.split()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        options[flag.removeprefix("--")] = value
    code, lines = plan(capsys, **options)
    assert code == 0


def test_a_reference_with_the_layout_string_of_the_trained_model(capsys, tmp_path):
    """The string places the heads of the trained model, which the reference model does not have."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | {"num_nextn_predict_layers": 1}))
    stages = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*18|t*18mL", "num_gpus": 2}
    code, lines = plan(capsys, model=tmp_path, gpu_memory_gb=400.0, max_completion_length=256, beta=0.1, **stages)
    assert code == 0
    (start,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["stage", "model", "reference"])
    assert all(float(line.split()[2]) > 0 for line in lines[start + 1 : start + 3])


def test_a_stage_that_the_reference_leaves_out(capsys, model):  # noqa: F811
    options = {"loss_type": "sigmoid", "num_gpus": 3, "pipeline_model_parallel_size": 3, "gpu_memory_gb": 400.0}
    reference = {"ref_tensor_model_parallel_size": 2, "ref_pipeline_model_parallel_size": 1}
    code, lines = plan(capsys, model=model, **reference, **options)
    assert code == 0
    shared, _, left_out = by_stage(lines)[:3]
    assert float(shared[2]) > 0
    assert left_out[2:5] == ["0.00", "0.00", "0.00"]


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
