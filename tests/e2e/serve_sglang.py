"""Run jobs with SGLang one after another. Jobs are given as JSON, and one line of JSON is printed for each.

    python tests/e2e/serve_sglang.py '[{"model": DIR, "num_tokens": 3, "prompts": [[1, 2]], "max_new_tokens": 24},
                                       {"argv": ["infer", "--infer_backend", "sglang"]}]'

Each job runs in a separate forked process, because SGLang kills the process that started it.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.cli.main import main
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from tests.e2e import sglang_forks
from tests.weights_of import trunk_and_heads


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Complete the prompts, then the first prompt again up to its sixth token, and send requests that must be rejected.
    With "temperature" and drafts, drafts are verified as on a GPU.

    With "weights_of", a checkpoint of the same shapes, its weights are sent to the engine first, in buckets of one
    tensor, so that tensors which a loader fuses are in different buckets.
    """
    config = EngineConfig(
        resolve_served(job["model"]),
        "float32",
        num_speculative_tokens=job["num_tokens"],
        max_model_len=256,
        max_batch_size=4,
        engine_kwargs={"max_total_tokens": 4096, **job.get("engine_kwargs", {})},
    )
    if job.get("temperature") and job["num_tokens"]:
        sglang_forks.sample_verified_tokens()
    try:
        engine: Any = start_engine("sglang", config)
    except UserError as error:
        return {"refused": [str(error)]}
    try:
        if "weights_of" in job:
            engine.generate(job["prompts"], Sampling(job["max_new_tokens"]))  # what it keeps of the old must not stay
            trunk, heads = trunk_and_heads(Path(job["weights_of"]))
            single = [{name: tensor} for bucket in trunk for name, tensor in bucket.items()]
            engine.update_weights(single, heads)
        before = engine.draft_counts()
        sampling = Sampling(job["max_new_tokens"], temperature=job.get("temperature", 0.0), log_p=True)
        completions = engine.generate(job["prompts"], sampling)
        counts = engine.draft_counts().since(before)
        stop = completions[0].token_ids[5]
        (stopped,) = engine.generate(job["prompts"][:1], Sampling(job["max_new_tokens"], stop_token_ids=(stop,)))
        refused = []
        for prompt, temperature in (([1] * 256, 0.0), ([1], 0.5)):
            try:
                engine.generate([prompt], Sampling(1, temperature=temperature))
            except UserError as error:
                refused.append(str(error))
        return {
            "tokens": [completion.token_ids for completion in completions],
            "log_p": [completion.log_p for completion in completions],
            "reasons": sorted({completion.finish_reason for completion in completions}),
            "counts": [counts.drafts, counts.drafted, list(counts.accepted_per_position)],
            "stopped": [stopped.token_ids, stopped.finish_reason],
            "refused": refused,
        }
    finally:
        engine.close()


def command(argv: list[str]) -> dict[str, Any]:
    """Run `swiftlite ...` with SGLang."""
    # Files, because SGLang's processes ask for the descriptor of stderr.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
        for stream in (out, err):
            stream.seek(0)
        return {"code": code, "stdout": out.read(), "stderr": err.read()}


def stop_at(file: str, number: int) -> None:
    """Send SIGTERM to this process when the file has `number` lines."""
    path = Path(file)
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def do(job: dict[str, Any]) -> None:
    if "stop_at" in job:
        threading.Thread(target=stop_at, args=job["stop_at"], daemon=True).start()
    print(json.dumps(command(job["argv"]) if "argv" in job else serve(job)), flush=True)
    for process in multiprocessing.active_children():  # what a start that failed has left, and would be waited for
        process.kill()


if __name__ == "__main__":
    sglang_forks.install()
    for asked in json.loads(sys.argv[1]):
        process = multiprocessing.Process(target=do, args=(asked,))
        process.start()
        process.join()
