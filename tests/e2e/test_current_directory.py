"""Test that no command executes Python files of the current directory, in any of its processes.

The directory is that of a model with the names of modules that swiftlite, engines and Python's own modules import.
Ranks and servers in such a directory: test_launched.py, test_sampling_options.py.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.llamacpp_here import needs_llamacpp
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.engine
NAMES = ("colorsys", "json", "numpy", "sitecustomize", "torch", "vllm")
# The script `swiftlite`, which does not have the current directory on sys.path. Without -P, which Python would pass on.
SCRIPT = "import sys; del sys.path[0]; from swiftlite.cli.main import main; sys.exit(main())"
ROWS = "--dataset rows.jsonl --torch_dtype float32 --max_new_tokens 2"
TRAINING = (
    "--model . --dataset rows.jsonl --split_dataset_ratio 0 --torch_dtype float32 --micro_batch_size 2 "
    "--global_batch_size 4 --train_iters 1 --acceptance_samples 0 --report_to none"
)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
# vLLM refuses this when its processes have imported what they need.
UNKNOWN = '--vllm_engine_kwargs {"quantization":"unknown"}'
BENCH = "--num_speculative_tokens 0,1 --concurrency 1 --rounds 1 --max_prompts 1"
PROMPTS = "--val_dataset rows.jsonl --torch_dtype float32 --max_new_tokens 2"
slow = pytest.mark.slow
# Words, and what is printed if the command has come as far as its child processes; "" means that it succeeds.
COMMANDS = [
    pytest.param(
        f"megatron grpo {TRAINING} --reward_funcs one --external_plugins ../rewards.py --num_generations 2 "
        "--output_dir ../grpo",
        "ZeroDivisionError",
        id="grpo",
    ),
    pytest.param(
        f"bench --model . --infer_backend llamacpp {PROMPTS} {BENCH} --output_dir ../bench",
        "",
        id="bench",
        marks=[needs_llamacpp, slow],
    ),
    pytest.param("doctor --model . --engine vllm", "", id="doctor", marks=[needs_vllm, slow]),
    pytest.param(f"deploy --model . --port 8148 {UNKNOWN}", "quantization", id="deploy", marks=[needs_vllm, slow]),
    pytest.param(f"infer --model . --infer_backend vllm {PROMPTS}", "", id="infer, vllm", marks=[needs_vllm, slow]),
    pytest.param(
        f"infer --model . --infer_backend llamacpp {PROMPTS}", "", id="infer, llamacpp", marks=[needs_llamacpp, slow]
    ),
    pytest.param(f"infer --model . --infer_backend transformers {PROMPTS}", "", id="infer, transformers", marks=slow),
    pytest.param(
        f"regenerate --model . --infer_backend llamacpp {ROWS} --output_dir ../answers",
        "",
        id="regenerate",
        marks=[needs_llamacpp, slow],
    ),
    pytest.param(
        f"evaluate --model . --infer_backend llamacpp {ROWS} --max_prompts 2 --output_dir ../evaluation",
        "",
        id="evaluate",
        marks=[needs_llamacpp, slow],
    ),
    pytest.param(
        f"speedup --model . --budget 5m --self_prompts_share 0 {ROWS.replace('rows', 'long')} --output_dir ../speedup",
        "no answer was kept",
        id="speedup",
        marks=[needs_vllm, slow],
    ),
]


def write_hostile_model(directory: Path) -> Path:
    """Write a model with Python files that write their names to ../executed; return its directory."""
    make_tiny_hf(directory, "qwen3", depth=1, with_tokenizer=True)
    rows = [{"query": f"What is {number}?", "response": "A number."} for number in range(8)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"query": f"What is {number}? " * 200} for number in range(48)]
    (directory / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory.parent / "rewards.py").write_text("1 / 0\n")
    return write_hostile_files(directory)


def write_hostile_files(directory: Path) -> Path:
    """Add Python files that write their names to ../executed to a directory, and return it."""
    for name in NAMES:
        marker = str(directory.parent / "executed")
        (directory / f"{name}.py").write_text(f"with open({marker!r}, 'a') as file: file.write('{name} ')\n")
    return directory


def executed_in(directory: Path) -> str:
    """Return the names of the hostile files that were executed."""
    marker = directory.parent / "executed"
    return marker.read_text() if marker.exists() else ""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_hostile_model(tmp_path_factory.mktemp("files") / "model")


def run(model: Path, *start: str, words: str = "--help") -> tuple[int, str, str]:
    """Run a command in the model's directory; return its exit code, its output, and the names of executed files."""
    (model.parent / "executed").unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # A command that an earlier test called in this process has set it for its children.
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *start, *words.split()],
        cwd=model,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, executed_in(model)


def test_the_files_would_be_found(model):
    """Otherwise the other tests could not fail."""
    _, _, executed = run(model, "-c", "import colorsys")
    assert executed == "colorsys "


def test_the_module_imports_nothing_either(model):
    code, _, executed = run(model, "-m", "swiftlite")
    assert (code, executed) == (0, "")


@pytest.mark.parametrize(("words", "printed"), COMMANDS)
def test_nothing_in_the_current_directory_is_executed(model, words, printed):
    code, output, executed = run(model, "-c", SCRIPT, words=words)
    assert executed == ""
    assert (code == 0) is (printed == ""), output[-2000:]
    assert printed in output


@pytest.mark.slow
def test_the_check_of_an_export_executes_nothing_in_the_current_directory(model):
    sft = f"megatron sft {TRAINING} --output_dir ../trained"
    export = (
        "export --to_hf --model ../trained --quant_method fp8 --infer_backend transformers --val_dataset rows.jsonl"
    )
    for words in (sft, f"{export} --output_dir ../hf"):
        code, output, executed = run(model, "-c", SCRIPT, words=words)
        assert (code, executed) == (0, ""), output[-2000:]
