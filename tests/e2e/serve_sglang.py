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

import numpy as np
from transformers import AutoTokenizer

from swiftlite.base.errors import UserError
from swiftlite.cli.main import main
from swiftlite.data.rows.prompt import TURNS
from swiftlite.data.sample import make_sample
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.rollouts.conversations import Conversations, EpisodeProcess
from swiftlite.rollouts.turns import Turns
from tests.e2e import sglang_forks
from tests.weights_of import trunk_and_heads


def config_of(job: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        resolve_served(job["model"]),
        "float32",
        num_speculative_tokens=job["num_tokens"],
        max_model_len=256,
        max_batch_size=4,
        engine_kwargs={"max_total_tokens": 4096, **job.get("engine_kwargs", {})},
    )


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Complete the prompts, then the first prompt again up to its sixth token, and send requests that must be rejected.
    With "temperature" and drafts, drafts are verified as on a GPU.

    With "weights_of", a checkpoint of the same shapes, its weights are sent to the engine first, in buckets of one
    tensor, so that tensors which a loader fuses are in different buckets.
    """
    if job.get("temperature") and job["num_tokens"]:
        sglang_forks.sample_verified_tokens()
    try:
        engine: Any = start_engine("sglang", config_of(job))
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


def converse(job: dict[str, Any]) -> dict[str, Any]:
    """Let a rollout function ask for two answers to each of two questions, and return their tokens."""
    path = Path(job["rollout_func"])
    template = ChatTemplate(AutoTokenizer.from_pretrained(job["model"]))
    end = template.end_token_id
    assert end is not None
    prompts = []
    for text in ("first?", "the second?"):
        messages = [{"role": "user", "content": text}]
        ids = template.encode_prompt(messages)
        prompts.append(make_sample(ids, np.zeros(len(ids))).with_extras(**{TURNS: json.dumps(messages)}))
    sampling = Sampling(job["max_new_tokens"], temperature=job["temperature"], log_p=True, stop_token_ids=(end,))
    if job["num_tokens"]:
        sglang_forks.sample_verified_tokens()
    engine: Any = start_engine("sglang", config_of(job))
    try:
        with EpisodeProcess(path.stem, None, [str(path)], 60.0) as process:
            drawing = Conversations(process, Turns(template, (), (end,)), max_turns=2)
            drawn = drawing.draw(engine, sampling, prompts, {}, 0)
    finally:
        engine.close()
    return {
        "prompts": [prompt.input_ids.tolist() for prompt in prompts],
        "tokens": [completion.token_ids for completion in drawn.completions],
        "log_p": [completion.log_p for completion in drawn.completions],
        "is_generated": [list(map(bool, mask)) for mask in drawn.is_generated],
        "figures": dict(drawn.figures),
    }


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
    result = command(job["argv"]) if "argv" in job else converse(job) if "rollout_func" in job else serve(job)
    print(json.dumps(result), flush=True)
    for process in multiprocessing.active_children():  # what a start that failed has left, and would be waited for
        process.kill()


if __name__ == "__main__":
    sglang_forks.install()
    for asked in json.loads(sys.argv[1]):
        process = multiprocessing.Process(target=do, args=(asked,))
        process.start()
        process.join()
