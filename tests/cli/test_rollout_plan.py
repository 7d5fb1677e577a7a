"""Test the output of `swiftlite doctor --plan --max_completion_length`, the plan of `megatron grpo`."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swiftlite import rules
from swiftlite.args.commands import GrpoArgs
from swiftlite.base.errors import OptionError
from swiftlite.base.heads import Heads
from swiftlite.families.index import architecture_of
from swiftlite.families.reward_model import as_reward_model
from swiftlite.plan.cost.frozen_memory import reward_configs, reward_weights
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.rollout_memory import estimate_rollouts, rollout_flops
from swiftlite.plan.cost.setup import Setup
from tests.cli.test_doctor_plan import model  # noqa: F401, a fixture
from tests.messages import mentions, naming
from tests.planned import plan, planned, setup_of
from tests.tiny import make_tiny_hf

ROLLOUTS: dict[str, Any] = {"max_completion_length": 256, "max_length": 1024}


def test_the_engine_is_added_to_the_trainer(capsys, model):  # noqa: F811
    code, lines = plan(capsys, model=model, gpu_memory_gb=400.0, **ROLLOUTS)
    assert code == 0
    (start,) = (number for number, line in enumerate(lines) if line.split()[:1] == ["trainer"])
    trainer, reference, teacher, reward, engine, cache, total = map(float, lines[start + 1].split())
    assert reference == teacher == reward == 0 < engine < trainer
    assert total == pytest.approx(trainer + engine + cache, abs=0.03)
    _, with_reference = plan(capsys, model=model, gpu_memory_gb=400.0, beta=0.1, **ROLLOUTS)
    assert float(with_reference[start + 1].split()[1]) > 0
    _, lines = plan(capsys, model=model, gpu_memory_gb=400.0, beta=0.1, tuner_type="lora", **ROLLOUTS)
    (start,) = (number for number, line in enumerate(lines) if line.split()[:1] == ["trainer"])
    assert float(lines[start + 1].split()[1]) == 0
    _, lines = plan(capsys, model=model, gpu_memory_gb=400.0, teacher_model=model, **ROLLOUTS)
    (start,) = (number for number, line in enumerate(lines) if line.split()[:1] == ["trainer"])
    sizes = [float(size) for size in lines[start + 1].split()]
    assert 0 < sizes[2] <= engine
    assert sizes[-1] == pytest.approx(total + sizes[2], abs=0.02)
    (stage,) = (number for number, line in enumerate(lines) if line.split()[:2] == ["stage", "model"])
    assert float(lines[stage + 1].split()[2]) == sizes[2]
    code, lines = plan(capsys, model=model, gpu_memory_gb=400.0, max_batch_size=5000, **ROLLOUTS)
    assert code == 1
    assert mentions(lines[-1], "--max_batch_size --max_length")


def test_an_engine_that_fits_in_no_layout(capsys, model):  # noqa: F811
    """The training step would fit, so the options that make it smaller are not the ones to change."""
    code, lines = plan(capsys, model=model, gpu_memory_gb=20.0, **ROLLOUTS)
    assert code == 1
    (line,) = (line for line in lines if "1024 GPUs" in line)
    assert "--" not in line
    assert mentions(lines[-1], "--max_batch_size --max_length")


def test_an_engine_that_sleeps_is_counted_while_it_draws(capsys, model):  # noqa: F811
    """Then the trainer has no activations, and the engine has no memory while the trainer trains."""

    def phases(**options: Any) -> list[list[float]]:
        _, lines = plan(capsys, model=model, gpu_memory_gb=400.0, **ROLLOUTS, **options)
        (start,) = (number for number, line in enumerate(lines) if line.split()[:1] == ["trainer"])
        rows = itertools.takewhile(lambda line: not line.strip().startswith("("), lines[start + 1 :])
        return [list(map(float, row.split())) for row in rows]

    (both,) = phases()
    training, drawing = phases(infer_backend="vllm")
    assert training == [both[0], 0, 0, 0, 0, 0, both[0]]
    assert drawing[4:6] == both[4:6]
    assert drawing[0] < training[0]
    assert drawing[-1] == pytest.approx(drawing[0] + sum(both[4:6]), abs=0.03)
    for options in ({"async_rollouts": 1}, {"vllm_engine_kwargs": {"enable_sleep_mode": False}}):
        assert phases(infer_backend="vllm", **options) == [both]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_next"])
def test_sizes_are_those_of_the_files(tmp_path, family):
    """The engine holds all tensors of the model, and the cache all keys and values, or latents."""
    directory = make_tiny_hf(tmp_path / "hf", family, depth=1)
    config = json.loads((directory / "config.json").read_text())
    args = planned(model=str(directory), max_batch_size=3, torch_dtype="float32", beta=0.1, **ROLLOUTS)
    setup, run = setup_of(args), args.run
    assert isinstance(run, GrpoArgs)
    memory = estimate_rollouts(run, setup, estimate(config, setup), config, {})
    # Heads share embedding and output layer with the trunk; some files have copies.
    tensors = {tensor.tobytes() for tensor in load_file(directory / "model.safetensors").values()}
    assert memory.engine == pytest.approx(sum(map(len, tensors)), rel=1e-3)  # without the biases of routers
    assert memory.cache == 4 * 3 * 1024 * numbers_per_token(config)


def test_the_reference_beside_a_server_of_rollouts_is_counted(capsys, model):  # noqa: F811
    options = {"model": model, "gpu_memory_gb": 400.0, "beta": 0.1, "rollout_server": ["http://a:1"]}
    code, lines = plan(capsys, **options)
    assert code == 0
    (start,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["stage", "model", "reference"])
    _, trained, reference, total = map(float, lines[start + 1].split())
    assert 0 < reference < trained
    assert total == pytest.approx(trained + reference, abs=0.02)


def test_reward_models_without_a_layout_are_on_the_first_gpu(capsys, tmp_path, model):  # noqa: F811
    """The process of the reward functions loads them."""
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "model.safetensors").write_bytes(b"\0" * 50_000_000)
    options = {"reward_model": [str(tmp_path / "judge")], "num_gpus": 2, "pipeline_model_parallel_size": 2}
    _, lines = plan(capsys, model=model, gpu_memory_gb=400.0, **ROLLOUTS, **options)
    (stage,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["stage", "model", "reward"])
    assert [line.split()[2] for line in lines[stage + 1 : stage + 3]] == ["0.05", "0.00"]
    (trainer,) = (number for number, line in enumerate(lines) if line.split()[:1] == ["trainer"])
    assert lines[trainer + 1].split()[3] == "0.05"


@pytest.mark.parametrize(("stages", "of_reward"), [(1, 1), (2, None), (2, 1)])
def test_reward_models_with_a_layout_are_added_to_every_stage(capsys, tmp_path, stages, of_reward):
    policy, judge = (str(make_tiny_hf(tmp_path / name, "qwen3", depth=0)) for name in ("policy", "judge"))
    declare_classifier(Path(judge))
    options = {"model": policy, "pipeline_model_parallel_size": stages, "torch_dtype": "float32", **ROLLOUTS}
    options |= {"reward_model": [judge, judge], "reward_pipeline_model_parallel_size": of_reward}
    options |= {"reward_tensor_model_parallel_size": 1}
    args = planned(**options)
    run = args.run
    assert isinstance(run, GrpoArgs)
    weights = reward_weights(run, setup_of(args), reward_configs(run))
    size = sum(tensor.nbytes for tensor in load_file(Path(judge) / "model.safetensors").values())
    assert len(weights) == stages
    assert sum(weights) == pytest.approx(2 * size * stages / (of_reward or stages), rel=1e-3)
    _, lines = plan(capsys, gpu_memory_gb=400.0, **options)
    (start,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["stage", "model", "reward"])
    assert len(lines[start + stages].split()) == 4
    with pytest.raises(OptionError, match=naming("--reward_model megatron rm")):
        rules.check(planned(**{**options, "reward_model": [policy]}))


def declare_classifier(directory: Path) -> None:
    """Turn a model into the files of a reward model."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(as_reward_model({**config, "tie_word_embeddings": False})))
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(
        tensors | {"score.weight": np.zeros((1, config["hidden_size"]), np.float32)}, directory / "model.safetensors"
    )


def numbers_per_token(config: dict[str, Any]) -> int:
    """Return how many numbers a token has in the cache of trunk and head."""
    layers = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    number = layers.count("full_attention") + 1
    if "kv_lora_rank" in config:
        return number * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return number * 2 * config["num_key_value_heads"] * config["head_dim"]


def test_flops_of_drawing_are_those_of_a_forward_pass(tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", "qwen3", depth=0)
    config = json.loads((directory / "config.json").read_text())
    drawn, trained = rollout_flops(config, Setup(max_length=100, heads=Heads()), 20)
    architecture = architecture_of(config)
    per_token = sum(layer.macs_per_token() for layer in architecture.layers)
    pairs = 100 * 101 / 2 * sum(layer.attention.macs_per_pair() for layer in architecture.layers)
    output = 20 * architecture.outside.vocab * architecture.outside.hidden
    assert drawn == pytest.approx(2 * (100 * per_token + pairs + output))
    assert trained == pytest.approx(3 * drawn)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss_type": "sigmoid"}, "--loss_type sigmoid"),
        ({"gpu_type": "H100", "num_gpus": 8}, "--gpu_type H100 megatron grpo"),
        ({"mtp_mode": "heads_only"}, "--mtp_mode heads_only"),
        ({"max_length": 256}, "--max_length 512"),
    ],
)
def test_options_that_do_not_fit_are_named(model, options, problem):  # noqa: F811
    with pytest.raises(OptionError, match=naming(problem)):
        rules.check(planned(**{"model": model, **ROLLOUTS, **options}))
