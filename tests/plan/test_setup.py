"""Test that `doctor --plan` and `--dry_run` print the same memory, with the heads and adapters of training."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.cli.main import main
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.facts import read_facts
from swiftlite.plan.kernels import PLANNED_MACHINE
from swiftlite.plan.run import plan_of
from tests.planned import QWEN3_8B, planned, setup_of

HEADING = "GB (1e9 bytes) on one rank of each pipeline stage"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Return a directory with models without heads, with a head, and with a head with a draft vocabulary."""
    monkeypatch.chdir(tmp_path)
    with_head = QWEN3_8B | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    drafting = Heads(1, draft_vocab=tuple(range(0, 64000, 2))).config_change(with_head)
    configs = {"plain": QWEN3_8B, "mtp": with_head, "draft": with_head | drafting}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    return tmp_path


def table_of(text: str) -> list[str]:
    """Return the lines of the memory table and the tables after it, without verdicts."""
    lines = map(str.strip, text[text.index(HEADING) :].splitlines())
    return [line for line in lines if line and not line.startswith(_OF_A_PLAN)]


_OF_A_PLAN = ("fits", "does not fit", "use ", "increase", "--")
SHARDED = "--tensor_model_parallel_size 2 --sequence_parallel true --use_distributed_optimizer true"


@pytest.mark.parametrize(
    ("command", "processes", "options"),
    [
        ("sft", 1, "--model plain"),
        ("sft", 4, f"--model plain {SHARDED} --micro_batch_size 2"),
        ("sft", 2, "--model mtp --pipeline_model_parallel_size 2 --tuner_type lora"),
        ("sft", 1, "--model draft --mtp_mode heads_only"),
        ("sft", 1, "--model plain --packing true --packing_length 8192"),
        ("dpo", 2, "--model plain --loss_type ipo --use_distributed_optimizer true"),
        ("gkd", 1, "--model plain --teacher_model plain"),
        ("grpo", 1, "--model mtp --max_completion_length 64 --reward_funcs length"),
    ],
)
def test_a_dry_run_prints_the_memory_of_a_plan(here, monkeypatch, capsys, command, processes, options):
    monkeypatch.setenv("NPROC_PER_NODE", str(processes))
    shared = [*options.split(), "--fused_kernels", "none"]  # as on a machine without GPUs
    of_run = ["--dataset", "train.jsonl", "--output_dir", "out"]
    assert main(["megatron", command, *shared, *of_run, "--dry_run"]) == 0
    dry_run = table_of(capsys.readouterr().out)
    main(["doctor", "--plan", "--num_gpus", str(processes), *shared])
    assert table_of(capsys.readouterr().out) == dry_run


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("options", "heads_tuner"),
    [
        ({"model": "mtp", "mtp_num_layers": 1, "tuner_type": "lora"}, "lora"),
        ({"model": "plain", "mtp_num_layers": 1, "mtp_init": "copy_last_layer", "tuner_type": "lora"}, "full"),
        ({"model": "draft", "mtp_mode": "heads_only"}, None),
        ({"model": "draft", "mtp_mode": "heads_only", "draft_vocab": 16}, None),
    ],
)
def test_heads_and_adapters_are_those_of_training(here, options, heads_tuner, processes):
    run = SftArgs(**options)
    plan = plan_of(run, read_facts(run, processes, PLANNED_MACHINE))
    setup = setup_of(planned(num_gpus=processes, **options))
    assert setup == Setup.of(run, plan)
    assert (setup.heads, setup.lora) == (plan.heads, plan.lora)
    assert (setup.lora and setup.lora.heads) == heads_tuner
    if options["model"] == "draft":
        assert len(setup.heads.draft_vocab) == options.get("draft_vocab", 32000)


def test_new_heads_need_no_source_of_weights_in_a_plan(here):
    options: dict[str, Any] = {"model": "plain", "mtp_num_layers": 1, "tuner_type": "lora"}
    assert setup_of(planned(**options)) == setup_of(planned(**options, mtp_init="random"))
