"""The whole way for a native and for a fresh head: sft, export, and the engine's own counts in real vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Commands
from tests.tiny import make_tiny_hf, mtp_names

pytestmark = pytest.mark.engine

ROWS = [
    ("What does the fox do?", "The quick brown fox jumps over the lazy dog, twice a day and never on Sundays."),
    ("What does the sum do?", "It returns the sum of its arguments, or zero when there are none of them at all."),
    ("Where is the garden?", "Behind the old house, down eleven steps of stone, left of the well and the apple tree."),
    ("Who wrote the letter?", "Nobody knows; it came with the evening post, unsigned, in green ink on thin paper."),
]


@pytest.fixture(scope="module", params=["mimo", "qwen3"])
def served(request, tmp_path_factory) -> tuple[Commands, str, Path]:
    """A model that knows four answers by heart, exported; mimo has its own head, qwen3 gets one from nothing."""
    family, directory = request.param, tmp_path_factory.mktemp(request.param)
    commands = Commands(directory)
    make_tiny_hf(directory / "model", family, depth=1 if family == "mimo" else 0, with_tokenizer=True)
    rows = [json.dumps({"query": query, "response": response}) for query, response in ROWS]
    (directory / "rows.jsonl").write_text("\n".join(rows))
    fresh = [] if family == "mimo" else ["--mtp_num_layers", 1, "--mtp_init", "copy_last_layer"]
    options = (
        "--dataset rows.jsonl --val_dataset rows.jsonl --output_dir run --torch_dtype float32 --micro_batch_size 4 "
        "--global_batch_size 4 --train_iters 250 --lr 3e-3 --mtp_loss_scaling_factor 1.0 --save_steps 1000 "
        "--acceptance_max_new_tokens 96"
    ).split()
    commands.ok("megatron", "sft", "--model", "model", *options, *fresh)
    commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
    return commands, family, directory


def infer(commands: Commands, model: str, acceptance: str, *options: str) -> str:
    """Let vLLM answer the rows with the head drafting; returns what it logged. The answers must be those learned."""
    fixed = "--infer_backend vllm --val_dataset rows.jsonl --torch_dtype float32 --max_new_tokens 96".split()
    to = ["--result_path", "answers.jsonl", "--acceptance_json", acceptance]
    log = commands.ok("infer", "--model", model, "--speculative", "mtp", *fixed, *to, *options).stderr
    answers = [json.loads(line) for line in (commands.directory / "answers.jsonl").read_text().splitlines()]
    assert [answer["response"] for answer in answers] == [response for _, response in ROWS]
    return log


def test_vllm_accepts_what_the_run_said_it_would(served):
    commands, _, directory = served
    log = infer(commands, "hf", "run/acceptance.json", "--compare")
    assert "answers equal: 4 of 4" in log
    acceptance = json.loads((directory / "run" / "acceptance.json").read_text())
    ours, engine = acceptance["after"]["generated"], acceptance["engines"]["vllm"]
    assert engine["acceptance_per_position"][0] >= 0.9
    assert abs(engine["acceptance_per_position"][0] - ours["acceptance_per_position"][0]) <= 0.05
    assert acceptance["before"]["generated"]["acceptance_per_position"][0] < 0.5


def test_random_heads_are_not_accepted(served):
    """The same trunk with other heads answers the same, and accepts next to nothing."""
    commands, family, directory = served
    (directory / "random").mkdir(exist_ok=True)
    for path in (directory / "hf").iterdir():
        if path.suffix != ".safetensors":
            (directory / "random" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "hf" / "model.safetensors")
    projection = mtp_names(family, 0)[0]["projection"]
    heads = projection.split(".")[0] if family != "mimo" else "model.mtp_layers"
    torch.manual_seed(0)
    noise = {name: torch.randn_like(t) * 0.2 for name, t in tensors.items() if name.startswith(heads) and t.dim() == 2}
    assert projection in noise
    save_file({**tensors, **noise}, directory / "random" / "model.safetensors", metadata={"format": "pt"})
    (directory / "acceptance.json").write_bytes((directory / "run" / "acceptance.json").read_bytes())
    infer(commands, "random", "acceptance.json")
    engine = json.loads((directory / "acceptance.json").read_text())["engines"]["vllm"]
    assert engine["drafted"] > 0
    assert engine["acceptance_per_position"][0] < 0.2


def test_the_export_opens_in_plain_transformers(served):
    _, family, directory = served
    if family == "mimo":
        pytest.skip("transformers has no MiMo class")
    # Annotated as the model alone upstream.
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory / "hf", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert all(key.startswith("mtp.") for key in report["unexpected_keys"])
    assert model.config.num_nextn_predict_layers == 1
