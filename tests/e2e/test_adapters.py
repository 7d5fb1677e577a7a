"""Test that vLLM serves adapters with a model: answers equal those of the merged model, and heads draft for both.

The client of `bench` asks the same server.
"""

import asyncio
import importlib.util
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import DeployArgs
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.files import AdapterBase, digest_of, read_adapter, write_adapter
from swiftlite.bridge.adapters.merge import write_merged
from swiftlite.engines.client import Answer
from swiftlite.engines.engine import Sampling
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.metrics import counts_of
from swiftlite.engines.server.process import serve
from swiftlite.serve import deploy
from swiftlite.serve.bench.measure import connect, generate_all
from tests.engines.reference import Reference
from tests.stand_ins import forking_vllm_environment
from tests.tiny import make_tiny_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,  # test_deploy.py has the options of vLLM, test_lora.py and test_adapters.py the files
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NEW_TOKENS = 24


def write_adapters(base: Path, directory: Path) -> None:
    """Write adapters of the trunk's linear layers that are large enough to change every answer."""
    model = resolve_served(base)
    torch.manual_seed(1)
    tensors = {}
    for row in model.family.trunk_rows(model.config):
        for key, shape in row.hf.items():
            if key.endswith("_proj.weight"):
                module = key.removesuffix(".weight")
                tensors[f"{module}.lora_A.weight"] = 0.2 * torch.randn(4, shape[1])
                tensors[f"{module}.lora_B.weight"] = 0.05 * torch.randn(shape[0], 4)
    directory.mkdir()
    write_adapter(directory, Lora(4, 8.0), AdapterBase(str(base), digest_of(base)), tensors, {})


def merge(base: Path, adapters: Path, directory: Path) -> None:
    model = resolve_served(base)
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    write_merged(base, model.config, model.family, read_adapter(adapters), directory)


def ask(url: str, model: str, prompt: list[int]) -> list[int]:
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(body, timeout=120) as response:
        return json.load(response)["choices"][0]["token_ids"]


def accepted(url: str) -> int:
    """Return the number of accepted draft tokens since the start of the server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        return counts_of(response.read().decode(), "vllm:", 1).accepted


async def measure(url: str, prompts: list[list[int]]) -> tuple[list[Answer], DraftCounts, int]:
    """Ask as `bench` does, one prompt after another.

    Returns:
        The answers, the draft counts, and the number of prompt tokens from the prefix cache.
    """
    async with connect("vllm", url, Sampling(NEW_TOKENS), 1) as client:
        before, cached_before = await client.draft_counts(), await client.cached_tokens()
        measured = await generate_all(client, prompts, 1, "salt")
        counts = (await client.draft_counts()).since(before)
        return measured.answers, counts, await client.cached_tokens() - cached_before


def test_adapters_answer_as_the_merged_model_and_heads_draft(talking, tmp_path, monkeypatch):
    for name, value in forking_vllm_environment().items():
        monkeypatch.setenv(name, value)
    (base, prompts), adapters, merged = talking, tmp_path / "tuned", tmp_path / "merged"
    prompts, tokenizer = prompts[:6], make_tiny_tokenizer()
    write_adapters(base, adapters)
    merge(base, adapters, merged)
    options: dict[str, Any] = {"num_speculative_tokens": 1, "max_model_len": 400, "torch_dtype": "float32"}
    args = DeployArgs(model=str(base), infer_backend="vllm", adapters=str(adapters), **options)
    answers = []
    with serve(deploy.server_command(args, resolve_served(base)), tmp_path / "log") as server:
        url = server.url
        for name, directory in (("tuned", merged), (base.name, base)):
            expected, counts = Reference.load(directory, "qwen3", depth=1).simulate(prompts, NEW_TOKENS, 1)
            before = accepted(url)
            assert [ask(url, name, prompt) for prompt in prompts] == expected
            assert accepted(url) - before == sum(counts.accepted_per_position) > 0
            answers.append(expected)
        measured, found, cached = asyncio.run(measure(url, prompts))
        long = [5 + number % 50 for number in range(2 * 128 + 10)]
        _, _, cached_of_long = asyncio.run(measure(url, [long, long[:-1], long]))
    # vLLM leaves out the bytes of an unfinished character at the end.
    assert [str(answer.text).rstrip("\N{REPLACEMENT CHARACTER}") for answer in measured] == [
        str(tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\N{REPLACEMENT CHARACTER}")
        for tokens in expected
    ]
    assert [answer.num_tokens for answer in measured] == [NEW_TOKENS] * len(prompts)
    assert all(0 < answer.seconds_to_first < answer.seconds for answer in measured)
    assert (found.drafts, found.accepted_per_position) == (counts.drafts, counts.accepted_per_position)
    assert cached == 0
    # vLLM caches blocks of 128 tokens. With drafts, it computes the last whole block again.
    assert cached_of_long >= 128
    assert all(tuned != plain for tuned, plain in zip(*answers, strict=True))
