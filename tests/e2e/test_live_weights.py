"""A vLLM that runs takes the weights of a trainer that goes on: the engine's own counts, before and after."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Commands
from tests.e2e.test_engines import HERE, expected_counts, run_python
from tests.e2e.test_serve import ROWS
from tests.engines.reference import Reference
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NEW_TOKENS = 24  # of live_weights.py
EXAMPLE = Path(__file__).parents[2] / "examples" / "live_weights.py"


def write_rows(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"query": query, "response": response}) for query, response in ROWS))
    return path


def test_acceptance_rises_in_the_engine_that_runs(commands: Commands, tmp_path):
    """Tied, because vLLM reloads an embedding and an output layer that are one in a way of its own."""
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, tied=True, with_tokenizer=True)
    done = run_python("-W", "ignore", HERE / "live_weights.py", model, write_rows(tmp_path), tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    stages = result["stages"]
    for stage in ("before", "target alone"):  # whose heads are those of before training
        assert stages["both"]["acceptance"] > stages[stage]["acceptance"] + 0.3

    # What an engine started anew would answer and count (test_engines.py holds it to the same reference).
    commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
    for stage, directory in (("before", model), ("both", tmp_path / "hf")):
        reference = Reference.load(directory, "qwen3", depth=1)
        completions, counts = reference.simulate(result["prompts"], NEW_TOKENS, 1)
        assert stages[stage]["completions"] == completions
        assert stages[stage]["counts"] == [counts.drafts, counts.drafted, list(counts.accepted_per_position)]
    assert stages["target alone"]["completions"] == stages["both"]["completions"]  # heads change no token

    assert "missing: model.embed_tokens.weight" in result["refused"][0]
    assert "left this engine with half of them" in result["refused"][1]


def test_experts_that_were_packed_are_packed_anew(vllm, trained, tmp_path):
    """Without `_forget_packed_experts` of weight_transfer.py vLLM reads the new experts as if they were packed."""
    started = make_tiny_hf(tmp_path / "started", "qwen3_moe", depth=1)
    directory, prompts = trained("qwen3_moe", 1, "vllm")
    served = vllm(started, prompts, NEW_TOKENS, 1, weights_of=directory)
    expected, counts = Reference.load(directory, "qwen3_moe", depth=1).simulate(prompts, NEW_TOKENS, 1)
    assert served.token_ids == expected
    assert expected_counts(served.counts) == expected_counts(counts)


@pytest.mark.gloo
def test_the_example_over_two_stages(tmp_path):
    """The heads of a class of vLLM's own, trained on two ranks of which the first one has the engine."""
    model = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    options = {"MODEL": str(model), "DATASET": str(write_rows(tmp_path)), "OUT": str(tmp_path / "run"), "EVERY": "60"}
    launch = "-W ignore -m torch.distributed.run --nproc_per_node 2".split()
    words = (
        "--pipeline_model_parallel_size 2 --train_iters 120 --lr 5e-3 --mtp_loss_scaling_factor 1 --micro_batch_size 4 "
        "--global_batch_size 4"
    ).split()
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLE), *words],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shares = [float(share) for share in re.findall(r"step +\d+: +([\d.]+) % of drafts accepted", done.stdout)]
    assert len(shares) == 3, done.stdout
    assert shares[2] > shares[0] + 30
