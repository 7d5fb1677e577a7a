"""Update a running vLLM while training. Every EVERY steps vLLM receives the new weights (trunk and heads in separate
transfers), and the script prints the share of drafts that vLLM accepts. vLLM is not restarted, and nothing is exported.

Hardware: 2 CPU cores, 4 GB of memory; no GPU
Time:     8 minutes
Expect:   a line every 50 steps; the share of drafts accepted rises from about a third, with randomly
          initialized heads after one step, to nearly 0.9
Before:   bash scripts/quickstart.sh --tiny && source .venv/bin/activate
Run:      python examples/live_weights.py [OPTION OF `swiftlite megatron sft` ...]
          On two ranks: torchrun --nproc_per_node 2 examples/live_weights.py --pipeline_model_parallel_size 2
          ENGINE=http://127.0.0.1:8000 sends the weights to this server, which must have been started with
          swiftlite deploy --model out/tiny/hf --live_weights
          On 8 GPUs, 7 for training and 1 for vLLM:
          ENGINE_DEVICES=7 WEIGHT_TRANSPORT=nccl torchrun --nproc_per_node 7 ...
"""

import os
import sys
from typing import Any

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.cli.parse import parse
from swiftlite.data.dataset import load_prompts
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.served import ServedVllm
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.run import run

ENGINE = os.environ.get("ENGINE", "vllm")
MODEL = os.environ.get("MODEL", "out/tiny/hf")
DATASET = os.environ.get("DATASET", "out/tiny/data/train.jsonl")
OUT = os.environ.get("OUT", "out/live_weights")
EVERY = int(os.environ.get("EVERY", "50"))
ENGINE_DEVICES = os.environ.get("ENGINE_DEVICES", "")  # such as 6,7
WEIGHT_TRANSPORT: Any = os.environ.get("WEIGHT_TRANSPORT", "file")
OPTIONS = (
    f"--model {MODEL} --dataset {DATASET} --output_dir {OUT} --torch_dtype float32 --mtp_num_layers 1 "
    "--mtp_init random --micro_batch_size 16 --global_batch_size 16 --max_length 256 --train_iters 200 --lr 1e-3"
).split()


def devices_of(words: str) -> tuple[int, ...]:
    places = words.split(",") if words else []
    if not all(place.isdigit() for place in places):
        raise UserError(f"ENGINE_DEVICES={words} are not GPU indices", "for example ENGINE_DEVICES=6,7")
    return tuple(int(place) for place in places)


class Service:
    """An engine that serves requests while its weights are updated."""

    def __init__(self) -> None:
        template = ChatTemplate(load_tokenizer(MODEL))
        self.stop = stop_token_ids(template, MODEL)
        encode = PromptEncoder(template)
        self.prompts = [encode(chat.prompt()) for chat in load_prompts([DATASET])[:32]]
        config = EngineConfig(
            resolve_served(MODEL),
            "float32",
            num_speculative_tokens=1,
            max_model_len=512,
            devices=devices_of(ENGINE_DEVICES),
            weight_transport=WEIGHT_TRANSPORT,
        )
        self.engine: Any = ServedVllm(ENGINE) if ENGINE.startswith("http") else start_engine(ENGINE, config)

    def report(self, step: int) -> None:
        before = self.engine.draft_counts()
        self.engine.generate(self.prompts, Sampling(max_new_tokens=32, stop_token_ids=self.stop))
        counts = self.engine.draft_counts().since(before)
        print(f"step {step:4}: {100 * counts.accepted / counts.drafted:5.1f} % of drafts accepted", flush=True)


def main() -> None:
    args, _ = parse(SftArgs, OPTIONS + sys.argv[1:])
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        rules.check(args, int(os.environ.get("WORLD_SIZE", "1")))
    service = Service() if is_first else None

    def sync(step: int, weights: LiveWeights) -> None:
        if step == 1 or step % EVERY == 0:
            weights.send(service and service.engine)  # collective; the first rank has the engine
            if service:
                service.report(step)

    run(args, after_step=sync)
    if service:
        service.engine.close()


if __name__ == "__main__":  # engines start subprocesses that import this file
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
