"""Test that a running engine receives the weights of a trainer, by its draft counts before and after."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import live_weights
from tests.e2e.conftest import Commands
from tests.e2e.test_engines import HERE, expected_counts
from tests.e2e.test_serve import ROWS
from tests.engines.reference import Reference, convention, follow
from tests.messages import mentions
from tests.stand_ins import forking_vllm_environment, sglang_environment
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.engine
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
NEW_TOKENS = 24  # of live_weights.py
EXAMPLE = Path(__file__).parents[2] / "examples" / "live_weights.py"


def write_rows(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"query": query, "response": response}) for query, response in ROWS))
    return path


def in_sglang(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", HERE / "live_weights.py", *words]
    done = subprocess.run(command, env=sglang_environment(), capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1])


@pytest.mark.parametrize(
    ("engine", "transport"),
    # Tied, because engines reload an embedding and an output layer that are one in ways of their own.
    [
        pytest.param("vllm", "file", marks=[needs_vllm, pytest.mark.slow]),
        pytest.param("vllm", "nccl", marks=needs_vllm),
        pytest.param("vllm", "ipc", marks=[needs_vllm, pytest.mark.slow]),
        pytest.param("sglang", "file", marks=[needs_sglang, pytest.mark.slow]),
    ],
)
def test_acceptance_rises_in_the_engine_that_runs(commands: Commands, request, tmp_path, engine, transport):
    family = "qwen3"
    model = make_tiny_hf(tmp_path / "model", family, depth=1, tied=True, with_tokenizer=True)
    words = [engine, str(model), str(write_rows(tmp_path)), str(tmp_path / "run"), transport]
    if engine == "sglang":
        result = in_sglang(words)
    else:
        result = request.getfixturevalue("vllm_host").call(live_weights.main, *words)
    stages = result["stages"]
    for stage in ("before", "target alone"):  # whose heads are those of before training
        assert stages["both"]["acceptance"] > stages[stage]["acceptance"] + 0.3

    # What an engine started anew would answer and count (test_engines.py holds it to the same reference).
    commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
    for stage, directory in (("before", model), ("both", tmp_path / "hf")):
        reference = follow(Reference.load(directory, family, depth=1), convention(engine, family).drafting)
        completions, counts = reference.simulate(result["prompts"], NEW_TOKENS, 1)
        assert stages[stage]["completions"] == completions
        assert stages[stage]["counts"] == [counts.drafts, counts.drafted, list(counts.accepted_per_position)]
    assert stages["target alone"]["completions"] == stages["both"]["completions"]  # heads change no token

    if engine == "vllm":  # it woke up for the weights and for the requests above
        assert all(stage["is_asleep"] for stage in stages.values())
    assert mentions(result["refused"][0], "model.embed_tokens.weight")
    assert not mentions(result["refused"][1], "model.embed_tokens.weight")


@needs_vllm
@pytest.mark.parametrize("family", some_of(["qwen3_moe", "mimo", "glm4_moe"]))
def test_an_engine_that_takes_new_weights_in_parts_is_as_if_started_with_them(vllm, trained, tmp_path, family):
    """Without `_forget_packed_experts` of weight_transfer.py, vLLM treats new weights of experts as packed.

    Draft classes reject incomplete heads, unless they are told that the tensors are only a part.
    """
    started = make_tiny_hf(tmp_path / "started", family, depth=1)
    directory, prompts = trained(family, 1, "vllm")
    served = vllm(started, prompts, NEW_TOKENS, 1, weights_of=directory)
    reference = follow(Reference.load(directory, family, depth=1), convention("vllm", family).drafting)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 1)
    assert served.token_ids == expected
    assert expected_counts(served.counts) == expected_counts(counts)


@needs_vllm
@pytest.mark.gloo
@pytest.mark.slow
def test_the_example_over_two_stages(tmp_path):
    """A draft class of vLLM runs the heads. They are trained on two ranks, and the first rank has the engine."""
    model = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    options = {"MODEL": str(model), "DATASET": str(write_rows(tmp_path)), "OUT": str(tmp_path / "run"), "EVERY": "60"}
    launch = "-W ignore -m torch.distributed.run --nproc_per_node 2".split()
    words = (
        "--pipeline_model_parallel_size 2 --train_iters 120 --lr 5e-3 --mtp_loss_scaling_factor 1 --micro_batch_size 4 "
        "--global_batch_size 4"
    ).split()
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLE), *words],
        env=forking_vllm_environment() | options,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shares = [float(share) for share in re.findall(r"\d+: +([\d.]+) %", done.stdout)]
    assert len(shares) == 3, done.stdout
    assert shares[2] > shares[0] + 30
