"""Test `swiftlite adapt` with a real vLLM server: better heads are sent, others are not, and bad ones are taken back.

The log is written by the test, from the server's own answers, because a tiny model ends no answer by itself, and the
server does not log answers that were cut off.
"""

import importlib.util
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Commands
from tests.e2e.servers import get, running, wait_for_health
from tests.messages import mentions
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PORT = 8149
URL = f"http://127.0.0.1:{PORT}"
QUESTIONS = [f"What is {number} plus {number % 7}?" for number in range(64)]
TRAINING = "--torch_dtype float32 --num_train_epochs 20 --lr 3e-3 --min_rows 48 --poll_seconds 1 --rounds 1"


def ask(question: str) -> str:
    request = {
        "model": "model",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 24,
    }
    return json.loads(get(f"{URL}/v1/chat/completions", request))["choices"][0]["message"]["content"]


class Clients:
    """Asks questions again and again in a thread, once there is a file.

    Before, they would take the processor time of the training.
    """

    def __init__(self, file: Path):
        self._file = file

    def __enter__(self) -> "Clients":
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        return self

    def _ask(self) -> None:
        while not self._ended.wait(0.1):
            if self._file.exists():
                for question in QUESTIONS[-8:]:
                    ask(question)

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


def decisions(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]


def test_a_server_gets_better_heads_and_only_those(commands: Commands, tmp_path):
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)
    words = f"deploy --model {model} --torch_dtype float32 --port {PORT} --max_model_len 128 --live_weights"
    command = [sys.executable, "-m", "swiftlite", *words.split()]
    log = tmp_path / "requests.jsonl"
    adapt = ["adapt", "--model", model, "--server", URL, "--request_log", log]
    with running(command, tmp_path / "server.log") as server:
        wait_for_health(server, URL, tmp_path / "server.log")
        answers = [ask(question) for question in QUESTIONS]
        rows = []
        for question, answer in zip(QUESTIONS, answers, strict=True):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append(json.dumps({"messages": messages}))
        log.write_text("\n".join(rows) + "\n")

        with Clients(tmp_path / "better" / "decisions.jsonl"):
            commands.ok(*adapt, *TRAINING.split(), "--output_dir", "better")
        (sent,) = decisions(tmp_path / "better")
        assert (sent["decision"], sent["heads"]) == ("sent", "round-1")
        assert sent["held_out"]["after"] > sent["held_out"]["before"] + 0.03  # a random model is hard to predict
        state = json.loads((tmp_path / "better" / "adapt.json").read_text())
        assert state["sent"]["steps"] > 0
        assert (tmp_path / "better" / "round-1" / "train.jsonl").stat().st_mode & 0o077 == 0
        assert [ask(question) for question in QUESTIONS] == answers  # heads change no answer

        # A learning rate that changes nothing: heads that are not better are not sent.
        version = get(f"{URL}/weight_info")
        unchanged = TRAINING.replace("3e-3", "1e-12")
        commands.ok(*adapt, *unchanged.split(), "--output_dir", "equal")
        assert [each["decision"] for each in decisions(tmp_path / "equal")] == ["kept"]
        assert get(f"{URL}/weight_info") == version

        # Had the heads before been accepted more often, they would be served again.
        state |= {"previous": "model", "before": {"steps": 1000, "drafted": 1000, "accepted": 999}}
        (tmp_path / "better" / "adapt.json").write_text(json.dumps(state))
        with Clients(tmp_path / "better" / "decisions.jsonl"):
            commands.ok(*adapt, *TRAINING.split(), "--output_dir", "better")
        assert [each["decision"] for each in decisions(tmp_path / "better")] == ["sent", "rolled_back"]
        assert json.loads((tmp_path / "better" / "adapt.json").read_text())["heads"] == "model"

    refused = commands.run(*adapt, *TRAINING.split(), "--output_dir", "better")
    assert refused.returncode == 1
    assert mentions(refused.stderr, f"{URL}")

    # A server that starts again has the heads of --model, and gets the ones that it should have.
    state |= {"heads": "round-1", "previous": ""}
    (tmp_path / "better" / "adapt.json").write_text(json.dumps(state))
    with running(command, tmp_path / "server.log") as server:
        wait_for_health(server, URL, tmp_path / "server.log")
        time.sleep(1)
        commands.ok(*adapt, *TRAINING.split(), "--output_dir", "better")
        assert decisions(tmp_path / "better")[-1]["decision"] == "restored"
        assert [ask(question) for question in QUESTIONS[:4]] == answers[:4]
