"""Keep a server of `swiftlite deploy` busy for ten minutes, while other clients disconnect in the middle of an answer.

    python -m tests.faults.soak_deploy --minutes 10

vLLM's benchmark client sends eight requests at a time in many rounds. The script prints the numbers of complete
answers, of requests and of disconnected clients, and the memory and open files of the server and its subprocesses after
a quarter of the rounds and at the end. The model is tiny and random, with one head; everything is on 127.0.0.1.
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests.tiny import make_tiny_hf

PORT = 18517
REQUESTS_A_ROUND = 100
# `vllm bench serve` asks for the version of a package named vllm, which the CPU build is not.
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def ask_and_hang_up(model: str, chance: random.Random) -> None:
    """Request a long answer as a stream, read its first chunks, and close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    prompt = [chance.randrange(10, 300) for _ in range(32)]
    body = {"model": model, "prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().read(chance.randrange(1, 2000))
    connection.close()


class HangingUp(threading.Thread):
    """A client that calls `ask_and_hang_up` repeatedly.

    Attributes:
        times: number of calls so far.
    """

    def __init__(self, model: str, seed: int):
        super().__init__(daemon=True)
        self.times = 0
        self._model = model
        self._chance = random.Random(seed)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            ask_and_hang_up(self._model, self._chance)
            self.times += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


def held(server: subprocess.Popen) -> tuple[int, int]:
    """Return the bytes and the open files of the server and its subprocesses."""
    process = psutil.Process(server.pid)
    everyone = [process, *process.children(recursive=True)]
    return sum(one.memory_info().rss for one in everyone), sum(one.num_fds() for one in everyone)


def ask(model: str, directory: Path, seed: int) -> int:
    """Run one round of vLLM's client; return the number of complete answers."""
    words = f"""--backend vllm --base-url http://127.0.0.1:{PORT} --model {model} --dataset-name random --seed {seed}
        --random-input-len 64 --random-output-len 48 --num-prompts {REQUESTS_A_ROUND} --max-concurrency 8 --ignore-eos
        --disable-tqdm --save-result --result-dir {directory} --result-filename result.json"""
    client = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLIENT, *words.split()], capture_output=True, text=True
    )
    assert client.returncode == 0, client.stderr
    return json.loads((directory / "result.json").read_text())["completed"]


def wait_until_ready(server: subprocess.Popen, log: Path) -> None:
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = str(make_tiny_hf(directory / "model", "llama", depth=1, with_tokenizer=True))
        words = f"deploy --model {model} --torch_dtype float32 --port {PORT} --max_model_len 512"
        with (directory / "log").open("w") as log:
            command = [sys.executable, "-W", "ignore", "-m", "swiftlite", *words.split()]
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until_ready(server, directory / "log")
            whole, asked, times, rounds = _rounds(server, model, directory, args.minutes * 60)
        finally:
            server.terminate()
            code = server.wait(60)
        print(f"{whole} of {asked} answers came whole, while clients hung up {times} times; it ended with {code}")
        first, last = rounds[len(rounds) // 4], rounds[-1]
        print(
            f"after a quarter and at the end: {first[0]:,} and {last[0]:,} bytes, {first[1]} and {last[1]} open files"
        )
    sys.exit(0 if whole == asked and code == 0 else 1)


def _rounds(
    server: subprocess.Popen, model: str, directory: Path, seconds: float
) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Return the numbers of complete answers, requests and disconnected clients, and the server's resources after each
    round.
    """
    rude = [HangingUp(model, seed) for seed in range(2)]
    for client in rude:
        client.start()
    end = time.monotonic() + seconds
    whole = 0
    rounds = []
    while time.monotonic() < end:
        whole += ask(model, directory, seed=len(rounds))
        rounds.append(held(server))
    for client in rude:
        client.stop()
    return whole, len(rounds) * REQUESTS_A_ROUND, sum(client.times for client in rude), rounds


if __name__ == "__main__":
    main()
