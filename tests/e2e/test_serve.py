"""Test sft, export, and the draft counts of real vLLM, for published heads and for a new head."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.bridge.hf_config import read_config
from tests.e2e.conftest import Commands
from tests.messages import answers_equal
from tests.tiers import some_of
from tests.tiny import HYBRID, LATENT, VLLM_LATENT_SIZES, VLLM_LINEAR_SIZES, make_tiny_hf, mtp_names

pytestmark = pytest.mark.engine

ROWS = [
    ("What does the fox do?", "The quick brown fox jumps over the lazy dog, twice a day and never on Sundays."),
    ("What does the sum do?", "It returns the sum of its arguments, or zero when there are none of them at all."),
    ("Where is the garden?", "Behind the old house, down eleven steps of stone, left of the well and the apple tree."),
    ("Who wrote the letter?", "Nobody knows; it came with the evening post, unsigned, in green ink on thin paper."),
]
ANSWERS = [response for _, response in ROWS]
# The trunk's tensors that a head of GLM-4.5 or DeepSeek-V3 repeats.
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


FAMILIES = ["mimo", "qwen3", "glm4_moe", "deepseek_v3", "qwen3_next"]


@pytest.fixture(scope="module", params=some_of(FAMILIES, "qwen3"))
def served(request, vllm_host, tmp_path_factory) -> tuple[Commands, str, Path]:
    """Return an exported model that has learned four answers. qwen3 gets a new head; the other models have one."""
    family = request.param
    directory = tmp_path_factory.mktemp(family)
    commands = Commands(directory, vllm_host)
    sizes: dict[str, Any] = VLLM_LATENT_SIZES if family in LATENT else {}
    if family in HYBRID:
        sizes = VLLM_LINEAR_SIZES
    make_tiny_hf(directory / "model", family, depth=0 if family == "qwen3" else 1, with_tokenizer=True, **sizes)
    rows = [json.dumps({"query": query, "response": response}) for query, response in ROWS]
    (directory / "rows.jsonl").write_text("\n".join(rows))
    fresh = ["--mtp_num_layers", 1, "--mtp_init", "copy_last_layer"] if family == "qwen3" else []
    options = (
        "--dataset rows.jsonl --val_dataset rows.jsonl --output_dir run --torch_dtype float32 --micro_batch_size 4 "
        "--global_batch_size 4 --lr 3e-3 --mtp_loss_scaling_factor 1.0 --save_steps 2000 "
        "--acceptance_max_new_tokens 96"
    ).split()
    learn(commands, ["megatron", "sft", "--model", "model", *options, *fresh])
    return commands, family, directory


def learn(commands: Commands, sft: list) -> None:
    """Train and export until transformers generates the answers and the head predicts them."""
    for steps in (150, 350, 700, 1400):
        for name in ("run", "hf"):
            shutil.rmtree(commands.directory / name, ignore_errors=True)
        commands.ok(*sft, "--train_iters", steps)
        commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
        answers, _ = infer(commands, "transformers", "hf", "run/acceptance.json")
        acceptance = json.loads((commands.directory / "run" / "acceptance.json").read_text())
        share = acceptance["engines"]["transformers"]["acceptance_per_position"][0]
        if answers == ANSWERS and share >= 0.95:
            return
    raise AssertionError(f"not learned in {steps} steps: {answers}, acceptance {share}")


def head_prefix(family: str) -> str:
    """Return the prefix of the names of the head's tensors."""
    _, block = mtp_names(family, 0)
    return "mtp." if block.startswith("mtp.") else block


def infer(commands: Commands, engine: str, model: str, acceptance: str, *options: str) -> tuple[list[str], str]:
    """Let an engine answer the rows with drafts; return the answers and its log."""
    hf_config = read_config(commands.directory / model)
    is_hybrid = hf_config["model_type"] in HYBRID  # of which vLLM's kernels for a CPU know one precision
    dtype = "bfloat16" if is_hybrid and engine == "vllm" else "float32"
    fixed = f"--val_dataset rows.jsonl --torch_dtype {dtype} --max_new_tokens 96 --speculative mtp".split()
    for name in ("answers.jsonl", "answers.jsonl.args.json"):  # of another engine
        (commands.directory / name).unlink(missing_ok=True)
    to = ["--result_path", "answers.jsonl", "--acceptance_json", acceptance]
    log = commands.ok("infer", "--infer_backend", engine, "--model", model, *fixed, *to, *options).stderr
    lines = (commands.directory / "answers.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines], log


def test_vllm_accepts_what_the_run_said_it_would(served):
    commands, family, directory = served
    # A start takes a while, and the answers are compared with those learned in any case.
    compares = family == "mimo"
    options = ["--compare"] if compares else []
    answers, log = infer(commands, "vllm", "hf", "run/acceptance.json", *options)
    assert answers == ANSWERS
    assert answers_equal(log, 4) is compares
    acceptance = json.loads((directory / "run" / "acceptance.json").read_text())
    ours, engine = acceptance["after"]["generated"], acceptance["engines"]["vllm"]
    assert engine["acceptance_per_position"][0] >= 0.9
    assert abs(engine["acceptance_per_position"][0] - ours["acceptance_per_position"][0]) <= 0.05
    assert acceptance["before"]["generated"]["acceptance_per_position"][0] < 0.5


@pytest.mark.slow
def test_random_heads_are_not_accepted(served):
    """With random heads, the trunk gives the same answers, and almost no drafts are accepted."""
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
    answers, _ = infer(commands, "vllm", "random", "acceptance.json")
    assert answers == ANSWERS
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
