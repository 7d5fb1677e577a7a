"""Test the output of `swiftlite doctor --plan --teacher_model`, the plan of `megatron gkd`."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from swiftlite import rules
from swiftlite.args.commands import GkdArgs
from swiftlite.base.errors import OptionError
from swiftlite.plan.cost.frozen_memory import teacher_weights
from tests.cli.test_doctor_plan import model  # noqa: F401, a fixture
from tests.messages import mentions, naming
from tests.planned import plan, planned, setup_of
from tests.tiny import make_tiny_hf


def test_the_teacher_is_added_to_every_stage(capsys, model):  # noqa: F811
    options = {"model": model, "teacher_model": model, "pipeline_model_parallel_size": 2}
    code, lines = plan(capsys, gpu_memory_gb=400.0, **options)
    assert code == 0
    (start,) = (number for number, line in enumerate(lines) if line.split()[:2] == ["stage", "model"])
    for number in range(2):
        stage, trained, teacher, total = map(float, lines[start + 1 + number].split())
        assert stage == number
        assert 0 < teacher < trained
        assert total == pytest.approx(trained + teacher, abs=0.02)
    code, lines = plan(capsys, gpu_memory_gb=10.0, **options)
    assert code == 1
    assert mentions(lines[-1], "--tensor_model_parallel_size")


@pytest.mark.parametrize(("stages", "of_teacher"), [(1, None), (2, None), (2, 1)])
def test_sizes_are_those_of_the_files(tmp_path, stages, of_teacher):
    """The teacher has another family and more layers than the model, and stages of its own."""
    directory = make_tiny_hf(tmp_path / "hf", "qwen3", depth=1)
    teacher = make_tiny_hf(tmp_path / "teacher", "deepseek_v3", depth=0, num_hidden_layers=4)
    args = planned(
        model=str(directory),
        teacher_model=str(teacher),
        torch_dtype="float32",
        pipeline_model_parallel_size=stages,
        teacher_pipeline_model_parallel_size=of_teacher,
        max_length=64,
    )
    setup, run = setup_of(args), args.run
    assert isinstance(run, GkdArgs)
    weights = teacher_weights(run, setup, json.loads((teacher / "config.json").read_text()))
    assert len(weights) == stages
    size = sum(tensor.nbytes for tensor in load_file(teacher / "model.safetensors").values())
    copies = stages // (of_teacher or stages)
    assert sum(weights) == pytest.approx(copies * size, rel=1e-3)  # without the biases of routers


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss_type": "sigmoid"}, "--loss_type sigmoid"),
        ({"mtp_mode": "heads_only"}, "--mtp_mode heads_only megatron gkd"),
        ({"teacher_model": "."}, "--teacher_model config.json"),
    ],
)
def test_options_that_do_not_fit_are_named(model, options, problem):  # noqa: F811
    usual: dict[str, Any] = {"model": model, "teacher_model": model}
    with pytest.raises(OptionError, match=naming(problem)):
        rules.check(planned(**usual | options))


def test_layers_of_the_teacher_must_fit_the_stages(model, tmp_path):  # noqa: F811
    config = json.loads((Path(model) / "config.json").read_text())
    config["num_hidden_layers"] += 1
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps(config))
    args = planned(model=model, teacher_model=str(teacher), pipeline_model_parallel_size=2)
    with pytest.raises(OptionError, match=naming("--teacher_model --teacher_pipeline_model_parallel_size")):
        rules.check(args)
