"""Test `megatron grpo --rollout_server` with two ranks, of which only the first one communicates with the servers."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import Commands
from tests.messages import mentions
from tests.parallel.parity import SIZES
from tests.rollouts.small_vllm import SmallVllm, started
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo
REWARDS = """
def even(completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def start_run(commands: Commands, model: Path, urls: list[str]):
    directory = commands.directory
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "rows.jsonl").write_text("".join(json.dumps({"query": f"{n}?"}) + "\n" for n in range(8)))
    words = (
        f"megatron grpo --model {model} --dataset rows.jsonl --split_dataset_ratio 0 --torch_dtype float32 "
        "--reward_funcs even --external_plugins rewards.py --num_generations 4 --global_batch_size 8 --train_iters 2 "
        "--micro_batch_size 2 --max_length 64 --max_completion_length 6 --acceptance_samples 0 --report_to none "
        "--tensor_model_parallel_size 2 --output_dir run --rollout_server"
    )
    return commands.start(*words.split(), *urls, processes=2)


@pytest.mark.parametrize("num_left", some_of([1, 0], 1))
def test_servers_die_in_the_middle_of_a_transfer(tmp_path, num_left):
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True, **SIZES)
    servers = [SmallVllm(model), SmallVllm(model)]
    commands = Commands(tmp_path)  # holds the store at which the ranks meet

    def dies(server: SmallVllm):
        def before(path: str) -> None:
            if path == "/update_weights" and server.num_updates == 2:  # trunk and heads of the first generation
                server.is_dead = True

        return before

    for server in servers[num_left:]:
        server.before = dies(server)
    with ExitStack() as stack:
        urls = [stack.enter_context(started(server)) for server in servers]
        run = start_run(commands, model, urls)
        _, errors = run.communicate(timeout=300)
    if num_left:
        assert run.returncode == 0, errors
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["rollout/servers"] for line in lines] == [2, 1]
        assert mentions(errors, urls[1])
    else:
        assert run.returncode == 1, errors
        assert mentions(errors, f"--rollout_server {urls[0]} {urls[1]} --resume")
        assert "Traceback" not in errors
