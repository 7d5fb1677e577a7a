"""Test `--reward_server` with a vLLM server that serves a reward model."""

import sys

import pytest

from swiftlite.methods.reward_names import name_of_server
from swiftlite.rewards.process import RewardProcess
from swiftlite.rewards.settings import RewardSettings
from tests.e2e.servers import running, wait_for_health
from tests.train.reward_models import hf_scores, make_reward_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PORT = 8151
PROMPTS = [[{"role": "user", "content": f"Say {n}."}] for n in range(5)]
COMPLETIONS = ["yes", "no, " * 9, "", "It is 4.", "perhaps"]


def test_scores_of_vllm_are_those_of_transformers(tmp_path):
    pytest.importorskip("vllm")
    directory, log = make_reward_model(tmp_path / "judge"), tmp_path / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += [
        "--dtype",
        "float32",
        "--port",
        str(PORT),
        "--max-model-len",
        "256",
        "--max-num-batched-tokens",
        "256",
        "--enforce-eager",
    ]
    url = f"http://127.0.0.1:{PORT}"
    with running(command, log) as server:
        wait_for_health(server, url, log)
        settings = RewardSettings(reward_servers=(url,), reward_models=(str(directory),))
        with RewardProcess(["judge", name_of_server(url)], (), settings) as rewards:
            scored = rewards.score(PROMPTS, COMPLETIONS, [[1]] * 5, {}, 1)
            served = rewards.identity["models"][1]
    assert scored.failures == []
    assert str(directory) in served
    pairs = zip(PROMPTS, COMPLETIONS, strict=True)
    turns = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in pairs]
    expected = hf_scores(directory, turns).tolist()
    assert max(expected) - min(expected) > 0.1
    local, remote = scored.rewards
    assert local == pytest.approx(expected, abs=1e-5)
    assert remote == pytest.approx(expected, abs=1e-4)  # vLLM's kernels
