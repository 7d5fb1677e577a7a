"""Train a tiny model while an engine serves it, and send the weights of the last step to the engine.

    python live_weights.py ENGINE MODEL ROWS OUTPUT_DIR WEIGHT_TRANSPORT

Prints the results of `main` as a line of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.train import run as training
from swiftlite.train.live_weights import LiveWeights
from tests.e2e import sglang_forks
from tests.gpu_links import gpu_links

NEW_TOKENS = 24
STEPS = 120


def read_prompts(model: str, rows: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = [json.loads(line)["query"] for line in Path(rows).read_text().splitlines()]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def refused(engine: Any, prompts: list[list[int]]) -> list[str]:
    """Return the engine's errors for a trunk without tensors, and for a request after that."""
    messages = []
    for action in (
        lambda: engine.update_weights(iter(()), None),
        lambda: engine.generate(prompts, Sampling(1)),
    ):
        try:
            action()
        except UserError as error:
            messages.append(str(error))
    return messages


def main(name: str, model: str, rows: str, output_dir: str, transport: Any) -> dict[str, Any]:
    """Return the prompts; the acceptance, the counts and the completions before and after the update; and the engine's
    errors about tensors that it does not have.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # also in a process of `vllm_host`: weights go to another one
    if transport != "file":
        gpu_links.install()
    if name == "sglang":
        sglang_forks.install()
    prompts, stages = read_prompts(model, rows), {}
    # Otherwise SGLang takes 20 s to fill a large cache with zeros.
    small = {"max_total_tokens": 4096, "max_running_requests": 4} if name == "sglang" else {}
    config = EngineConfig(
        resolve_served(model),
        "float32",
        num_speculative_tokens=1,
        max_model_len=256,
        engine_kwargs=small,
        weight_transport=transport,
        sleeps=name == "vllm",
    )
    engine: Any = start_engine(name, config)

    def measure(stage: str) -> None:
        before = engine.draft_counts()
        completions = engine.generate(prompts, Sampling(NEW_TOKENS))
        counts = engine.draft_counts().since(before)
        stages[stage] = {
            "acceptance": counts.accepted / counts.drafted,
            "counts": [counts.drafts, counts.drafted, list(counts.accepted_per_position)],
            "completions": [completion.token_ids for completion in completions],
        }
        if config.sleeps:  # the next update or request wakes it up
            engine.rest()
            stages[stage]["is_asleep"] = engine.is_asleep

    def sync(step: int, weights: LiveWeights) -> None:
        if step == STEPS:
            weights.send(engine, draft=False)
            measure("target alone")
            weights.send(engine)
            measure("both")

    args = SftArgs(
        model=model,
        dataset=[rows],
        output_dir=output_dir,
        torch_dtype="float32",
        micro_batch_size=4,
        global_batch_size=4,
        train_iters=STEPS,
        lr=5e-3,
        mtp_loss_scaling_factor=1.0,
    )
    measure("before")
    training.run(args, sync)
    result = {"prompts": prompts, "stages": stages, "refused": refused(engine, prompts)}
    engine.close()
    return result


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
