"""Test work that takes longer than --distributed_timeout_minutes. Ranks share it, or synchronize during it."""

import json
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from swiftlite.args.commands import DpoArgs, SftArgs
from swiftlite.bridge.adapters.files import digest_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.train.checkpoint import base_digest
from swiftlite.train.methods import reference
from tests.parallel.launch import launch
from tests.parallel.runs import train
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.pairs import write_pairs

pytestmark = pytest.mark.gloo

TIMEOUT_SECONDS = 8
"""Timeout in seconds. On a busy machine, two ranks can start seconds apart."""


@pytest.fixture
def args(tmp_path) -> DpoArgs:
    return DpoArgs(
        model=str(make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True)),
        dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
        output_dir=str(tmp_path / "run"),
        torch_dtype="float32",
        micro_batch_size=1,
        global_batch_size=6,
        train_iters=1,
        acceptance_samples=0,
        report_to=[],
        distributed_timeout_minutes=TIMEOUT_SECONDS / 60,  # pyright: ignore[reportArgumentType]: whole minutes for users
    )


def train_with_a_slow_disk(args: Any, seconds: float, round_seconds: float) -> int:
    """Train while reading all tensors of the base model in chunks, as for its digest, takes `seconds`."""
    with Checkpoint(args.model) as checkpoint:
        num_tensors = len(checkpoint.entries)
    chunks = Checkpoint.chunks

    def slow(self: Checkpoint, *of_tensor: Any) -> Any:
        time.sleep(seconds / num_tensors)
        return chunks(self, *of_tensor)

    Checkpoint.chunks = slow  # pyright: ignore[reportAttributeAccessIssue]: this process ends with the run
    base_digest.ROUND_SECONDS = round_seconds
    return train(args)


@pytest.mark.parametrize("command", some_of(["sft", "dpo"], "dpo"))
def test_the_base_is_hashed_by_all_ranks(args, tmp_path, command):
    """One rank alone would take 1.5 times the timeout. All ranks together, in rounds, never wait that long."""
    lora: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4}
    chosen = replace(args, **lora)
    if command == "sft":
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"query": f"{n}?", "response": f"{n}."}) + "\n" for n in range(6)))
        options: dict[str, Any] = {field.name: getattr(chosen, field.name) for field in fields(SftArgs)}
        options["dataset"] = [str(rows)]
        chosen = SftArgs(**options)
    assert launch(2, train_with_a_slow_disk, chosen, 1.5 * TIMEOUT_SECONDS, 2.0) == [0, 0]
    state = json.loads((tmp_path / "run/checkpoint-1/trainer_state.json").read_text())
    assert state["base"]["sha256"] == digest_of(args.model)


def train_with_a_slow_reference(args: DpoArgs, seconds: float) -> int:
    """Train while the reference model takes `seconds` per pair. A slice has 4 pairs."""
    log_probabilities_of = reference.log_probabilities_of

    def slow(*of_batch: Any) -> Any:
        time.sleep(seconds)
        return log_probabilities_of(*of_batch)

    reference.log_probabilities_of = slow
    reference.SLICE_PAIRS = 4
    return train(args)


@pytest.mark.slow
def test_ranks_without_the_reference_model_do_not_wait_for_all_of_it(args, tmp_path):
    """Two of three ranks hold the reference model. The third rank would wait 1.5 times the timeout for all pairs."""
    layout = {"ref_pipeline_model_parallel_size": 2, "train_iters": 4}
    seconds = 1.5 * TIMEOUT_SECONDS / 20
    assert launch(3, train_with_a_slow_reference, replace(args, **layout), seconds) == [0, 0, 0]
    assert [path.name for path in Path(args.output_dir, "reference").iterdir()] == ["reference.safetensors"]
