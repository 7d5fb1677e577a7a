"""Test the guarantees of SECURITY.md. `GUARANTEES` lists all tests; the ones that fit nowhere else are in this file."""

import json
import os
import pickle
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from swiftlite.args.commands import BenchArgs, deploy_args
from swiftlite.args.config import read_file
from swiftlite.base.errors import UserError
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.transformers.engine import TransformersEngine
from tests.evil import Evil
from tests.messages import naming
from tests.tiny import make_tiny_hf

ROOT = Path(__file__).parents[1]
# The first words of each guarantee -> its tests.
GUARANTEES = {
    "Python files that come": [
        "tests/test_security.py::test_python_files_of_a_model_do_not_run",
        "tests/e2e/test_current_directory.py::test_nothing_in_the_current_directory_is_executed",
        "tests/e2e/test_launched.py::test_ranks_execute_nothing_in_the_current_directory",
        "tests/e2e/test_sampling_options.py::test_a_server_executes_nothing_in_the_current_directory",
    ],
    "Weights are read only from": ["tests/test_security.py::test_pickled_weights_are_not_opened"],
    "A checkpoint cannot execute code:": [
        "tests/train/test_checkpoint.py::test_code_in_the_metadata_does_not_run",
        "tests/train/test_checkpoint.py::test_code_in_what_is_no_tensor_does_not_run",
        "tests/train/test_checkpoint.py::test_code_in_the_common_file_does_not_run",
    ],
    "A chat template cannot access": [
        "tests/data/test_sandbox.py::test_a_template_reaches_nothing_of_python",
        "tests/data/test_sandbox.py::test_a_template_does_not_take_all_memory",
    ],
    "YAML files produce plain values": ["tests/test_security.py::test_a_yaml_file_makes_plain_values"],
    "Shards, checkpoints and digests are": [
        "tests/bridge/test_tensors.py::test_index_may_not_point_elsewhere",
        "tests/train/test_checkpoint.py::test_code_in_what_is_no_tensor_does_not_run",
        "tests/train/test_checkpoint.py::test_a_manifest_that_is_damaged_or_names_what_is_gone",
        "tests/train/test_source.py::test_links_out_of_a_model_are_not_followed",
        "tests/train/test_source.py::test_links_out_of_a_run_are_not_followed",
    ],
    "Damaged or malicious files cause": [
        "tests/faults/test_rows.py::test_any_row",
        "tests/faults/test_chat_templates.py::test_any_template",
        "tests/faults/test_model_files.py::test_any_header",
        "tests/faults/test_model_files.py::test_any_index",
        "tests/faults/test_model_files.py::test_any_value_in_a_config",
        "tests/faults/test_gguf_files.py::test_any_bytes",
        "tests/faults/test_gguf_files.py::test_any_metadata",
        "tests/faults/test_options.py::test_any_yaml",
        "tests/faults/test_options.py::test_any_args_json_of_a_run",
        "tests/data/test_sources.py::test_bad_rows_are_named_and_the_others_read",
    ],
    "A conversation of more than": [
        "tests/data/test_sandbox.py::test_a_conversation_of_more_than_ten_million_characters_is_a_bad_row"
    ],
    "Commands use the network only": [
        "tests/test_security.py::test_no_command_asks_the_network",
        "tests/hub/test_name.py::test_names_of_models",
        "tests/hub/test_name.py::test_names_of_datasets",
        "tests/hub/test_model.py::test_a_directory_stays_what_it_is",
    ],
    "Ranks on one machine": ["tests/e2e/test_launched.py::test_ranks_on_one_machine_listen_to_it_alone"],
    "The servers of": [
        "tests/serve/test_deploy.py::test_sglang_is_told_all_three_numbers",
        "tests/e2e/test_sampling_options.py::test_deploy_becomes_the_server",
        "tests/test_security.py::test_the_servers_of_bench_listen_to_this_machine_alone",
    ],
    "Keys and tokens in options,": [
        "tests/base/test_redact.py::test_options",
        "tests/base/test_redact.py::test_lines",
        "tests/base/test_redact.py::test_remembered_values_are_hidden_in_any_text",
        "tests/engines/test_server_command.py::test_a_redacted_command_has_no_keys",
        "tests/cli/test_main.py::test_how_a_command_ends_is_how_the_process_ends",
        "tests/serve/test_deploy.py::test_a_key_is_not_logged_and_not_in_the_process_list",
        "tests/serve/test_answers.py::test_what_answers_are_made_with",
    ],
    "API keys for the servers": [
        "tests/serve/test_deploy.py::test_a_key_is_not_logged_and_not_in_the_process_list",
        "tests/serve/test_deploy.py::test_a_key_of_llamacpp_is_not_on_the_command_line",
    ],
    "Environment variables such as": [
        "tests/test_security.py::test_a_token_in_the_environment_stays_there",
        "tests/hub/test_push.py::test_an_export_is_pushed_with_its_card",
    ],
    "Rows, prompts and answers": ["tests/test_security.py::test_rows_and_answers_are_not_logged"],
}


def test_every_guarantee_names_its_tests():
    section = (ROOT / "SECURITY.md").read_text(encoding="utf-8").split("## Guarantees")[1].split("\n## ")[0]
    guarantees = re.findall(r"^- (.*)", section, re.MULTILINE)
    assert len(guarantees) == len(GUARANTEES)
    for guarantee, start in zip(guarantees, GUARANTEES, strict=True):
        assert guarantee.startswith(start)


@pytest.mark.parametrize("test", sorted({test for tests in GUARANTEES.values() for test in tests}))
def test_the_tests_that_are_named_exist(test):
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_python_files_of_a_model_do_not_run(tmp_path, file):
    directory = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True)
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    content = json.loads((directory / file).read_text())
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (directory / file).write_text(json.dumps(content | {"auto_map": names, "tokenizer_class": "Evil"}))
    load_tokenizer(directory)
    TransformersEngine(EngineConfig(resolve_served(directory), "float32")).close()
    assert not (tmp_path / "ran").exists()
    with suppress(UserError):  # there is nothing in it
        load_tokenizer(directory, trust_remote_code=True)
    assert (tmp_path / "ran").exists()  # so it would have been found


def test_pickled_weights_are_not_opened(tmp_path):
    directory = make_tiny_hf(tmp_path / "model", "qwen3")
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    TransformersEngine(EngineConfig(resolve_served(directory), "float32")).close()
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=naming("model.safetensors safetensors")):
        TransformersEngine(EngineConfig(resolve_served(directory), "float32"))
    with pytest.raises(UserError, match=naming("model.safetensors safetensors")):
        Checkpoint(directory)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.mkdir [ran]", "!!python/name:os.system", "!!python/object/new:os.mkdir [ran]"]
)
def test_a_yaml_file_makes_plain_values(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    Path("options.yaml").write_text(f"model: {value}\n")
    with pytest.raises(UserError, match=naming("options.yaml:1 YAML")):
        read_file("options.yaml")
    assert not Path("ran").exists()


def test_the_servers_of_bench_listen_to_this_machine_alone():
    assert deploy_args(BenchArgs(model="model"), 1).host == "127.0.0.1"


WORD = "zebra"  # in every row
TOKEN = "hf_TOKENOFTHEENVIRONMENT"
COMMANDS = """
megatron sft --model model --dataset rows.jsonl --val_dataset rows.jsonl --torch_dtype float32 --train_iters 2
    --micro_batch_size 2 --global_batch_size 2 --acceptance_samples 1 --acceptance_max_new_tokens 4 --output_dir run
export --to_hf --model run --output_dir hf
infer --model hf --infer_backend transformers --torch_dtype float32 --val_dataset rows.jsonl --max_new_tokens 4
    --result_path answers.jsonl
evaluate --model hf --dataset rows.jsonl --torch_dtype float32 --max_prompts 2 --max_new_tokens 4 --output_dir figures
doctor --model hf
infer --model nowhere --infer_backend transformers --val_dataset rows.jsonl
"""
# Runs commands in one process. What Python connects to, or looks up, beyond this machine is refused and printed.
WATCHED = """
import sys

def watch(event, args):
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        print("ASKED THE NETWORK:", host)
        raise OSError(event)

sys.addaudithook(watch)
from swiftlite.cli.main import main
codes = [main(line.split()) for line in sys.stdin]
print("EXIT CODES:", codes)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """Return a directory in which every command except servers was run, and the output of the commands."""
    directory = tmp_path_factory.mktemp("ran")
    make_tiny_hf(directory / "model", "qwen3", depth=1, with_tokenizer=True)
    rows = [{"query": f"{WORD} {number}", "response": f"A {WORD}."} for number in range(8)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Without the variables by which this machine's Python is told to stay offline.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    secrets = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY"), TOKEN)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        input=COMMANDS.strip().replace("\n    ", " "),
        cwd=directory,
        env=environment | secrets,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert "EXIT CODES: [0, 0, 0, 0, 0, " in done.stdout, done.stdout
    return directory, done.stdout


def test_no_command_asks_the_network(ran):
    _, printed = ran
    assert "ASKED THE NETWORK" not in printed


def test_a_token_in_the_environment_stays_there(ran):
    directory, printed = ran
    assert TOKEN not in printed
    written = [path for path in directory.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []


def test_rows_and_answers_are_not_logged(ran):
    directory, printed = ran
    assert WORD in (directory / "answers.jsonl").read_text()
    assert WORD not in printed
