"""The whole way for a native and for a fresh head: sft, export, and the engine's own counts in real vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Commands
from tests.tiny import VLLM_LATENT_SIZES, make_tiny_hf, mtp_names

pytestmark = pytest.mark.engine

ROWS = [
    ("What does the fox do?", "The quick brown fox jumps over the lazy dog, twice a day and never on Sundays."),
    ("What does the sum do?", "It returns the sum of its arguments, or zero when there are none of them at all."),
    ("Where is the garden?", "Behind the old house, down eleven steps of stone, left of the well and the apple tree."),
    ("Who wrote the letter?", "Nobody knows; it came with the evening post, unsigned, in green ink on thin paper."),
]
# The trunk's tensors that a head of GLM-4.5 or DeepSeek-V3 repeats.
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@pytest.fixture(scope="module", params=["mimo", "qwen3", "glm4_moe", "deepseek_v3"])
def served(request, tmp_path_factory) -> tuple[Commands, str, Path]:
    """A model that knows four answers by heart, exported; qwen3 gets its head from nothing, the others have one."""
    family, directory = request.param, tmp_path_factory.mktemp(request.param)
    commands = Commands(directory)
    sizes: dict[str, Any] = VLLM_LATENT_SIZES if family == "deepseek_v3" else {}
    make_tiny_hf(directory / "model", family, depth=0 if family == "qwen3" else 1, with_tokenizer=True, **sizes)
    rows = [json.dumps({"query": query, "response": response}) for query, response in ROWS]
    (directory / "rows.jsonl").write_text("\n".join(rows))
    fresh = ["--mtp_num_layers", 1, "--mtp_init", "copy_last_layer"] if family == "qwen3" else []
    options = (
        "--dataset rows.jsonl --val_dataset rows.jsonl --output_dir run --torch_dtype float32 --micro_batch_size 4 "
        "--global_batch_size 4 --train_iters 250 --lr 3e-3 --mtp_loss_scaling_factor 1.0 --save_steps 1000 "
        "--acceptance_max_new_tokens 96"
    ).split()
    commands.ok("megatron", "sft", "--model", "model", *options, *fresh)
    commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
    return commands, family, directory


def head_prefix(family: str) -> str:
    """What the names of the head's tensors begin with, and no other's."""
    _, block = mtp_names(family, 0)
    return "mtp." if block.startswith("mtp.") else block


def infer(commands: Commands, model: str, acceptance: str, *options: str) -> str:
    """Let vLLM answer the rows with the head drafting; returns what it logged. The answers must be those learned."""
    fixed = "--infer_backend vllm --val_dataset rows.jsonl --torch_dtype float32 --max_new_tokens 96".split()
    to = ["--result_path", "answers.jsonl", "--acceptance_json", acceptance]
    log = commands.ok("infer", "--model", model, "--speculative", "mtp", *fixed, *to, *options).stderr
    answers = [json.loads(line) for line in (commands.directory / "answers.jsonl").read_text().splitlines()]
    assert [answer["response"] for answer in answers] == [response for _, response in ROWS]
    return log


def test_vllm_accepts_what_the_run_said_it_would(served):
    commands, family, directory = served
    # Each start takes half a minute; `infer` compares the answers with those learned in any case.
    compares = family in ("mimo", "qwen3")
    log = infer(commands, "hf", "run/acceptance.json", *(["--compare"] if compares else []))
    assert ("answers equal: 4 of 4" in log) is compares
    acceptance = json.loads((directory / "run" / "acceptance.json").read_text())
    ours, engine = acceptance["after"]["generated"], acceptance["engines"]["vllm"]
    assert engine["acceptance_per_position"][0] >= 0.9
    assert abs(engine["acceptance_per_position"][0] - ours["acceptance_per_position"][0]) <= 0.05
    assert acceptance["before"]["generated"]["acceptance_per_position"][0] < 0.5


def test_random_heads_are_not_accepted(served):
    """The same trunk with other heads answers the same, and accepts next to nothing."""
    commands, family, directory = served
    if family == "deepseek_v3":
        pytest.skip("glm4_moe has its heads under the same names, and starts faster")
    (directory / "random").mkdir(exist_ok=True)
    for path in (directory / "hf").iterdir():
        if path.suffix != ".safetensors":
            (directory / "random" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "hf" / "model.safetensors")
    torch.manual_seed(0)
    noise = {
        name: torch.randn_like(tensor) * 0.2
        for name, tensor in tensors.items()
        if name.startswith(head_prefix(family)) and tensor.dim() == 2 and not name.endswith(COPIES)
    }
    assert mtp_names(family, 0)[0]["projection"] in noise
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
    assert all(key.startswith(head_prefix(family)) for key in report["unexpected_keys"])
    assert model.config.num_nextn_predict_layers == 1
