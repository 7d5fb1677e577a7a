"""Test vLLM's server on requests with images: answers, logged rows, and the bounds of pixels."""

import asyncio
import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftlite.args.commands import DeployArgs
from swiftlite.args.data_fields import ImageArgs
from swiftlite.data.dataset import load_prompts
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import ChatPrompt, ImagePrompt, PromptEncoder, most_images
from swiftlite.engines.server.process import serve
from swiftlite.families.resolved import resolve
from swiftlite.serve import deploy
from swiftlite.serve.bench.measure import connect, generate_all
from tests import torchvision_here
from tests.data.images import data_uri, noise
from tests.images import add_processors_of_engines, make_vision_hf_with_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
]
ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [
    {"query": "What does this do?"},
    {"query": "What is <image>?", "images": ["a.png"]},
    {"query": "<image> or <image>?", "images": ["a.png", "b.png"]},
]
HALF_A_CHARACTER = "\ufffd"
"""The end of an answer whose last token is the first half of a character. vLLM does not stream it."""


@pytest.fixture
def torchvision(tmp_path, monkeypatch):
    """Make torchvision importable in this process and in those that the test starts."""
    if missing := torchvision_here.missing():
        pytest.skip(missing)
    directory = tmp_path / "site"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text("from tests import torchvision_here\n\ntorchvision_here.install()\n")
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(sys, "path", [*sys.path, str(torchvision_here.SITE)])


def request(url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response to a chat request; with an error, its status."""
    body = json.dumps({"messages": messages, "max_tokens": 8, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": error.read().decode()}


def turn(url: str) -> list[dict[str, Any]]:
    """Return the turns of a request with an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


def limit_pixels(hf_dir: Path, max_pixels: int) -> None:
    """Write bounds of pixels as an export of a run with --max_pixels does."""
    path = hf_dir / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["size"]["longest_edge"] = max_pixels
    path.write_text(json.dumps(settings))


@pytest.mark.usefixtures("torchvision")
def test_answers_equal_transformers(tmp_path, monkeypatch):
    """The client checks that the server counts as many tokens of each prompt as swiftlite."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    hf_dir = make_vision_hf_with_tokenizer(tmp_path / "model", "qwen3_vl", depth=0)
    add_processors_of_engines(hf_dir, "qwen3_vl")
    limit_pixels(hf_dir, 640)
    noise(60, 40).save(tmp_path / "a.png")
    noise(8, 24, seed=1).save(tmp_path / "b.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model, tokenizer = resolve(hf_dir), AutoTokenizer.from_pretrained(hf_dir)
    encoder = PromptEncoder.open(ImageArgs(), model, tokenizer, ENGINES["vllm"])
    chats = load_prompts([str(rows)], no_images=encoder.no_images)
    prompts = [encoder(chat) for chat in chats]
    sent = [
        ChatPrompt.of(prompt, chat) if isinstance(prompt, ImagePrompt) else prompt
        for prompt, chat in zip(prompts, chats, strict=True)
    ]
    engine = start_engine("transformers", EngineConfig(model, "float32", max_images=most_images(prompts)))
    answers = engine.generate(prompts, Sampling(24))
    texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
    expected = [text.rstrip(HALF_A_CHARACTER) for text in texts]
    engine.close()

    log = tmp_path / "requests.jsonl"
    args = DeployArgs(
        model=str(hf_dir),
        infer_backend="vllm",
        torch_dtype="float32",
        max_model_len=256,
        log_requests=str(log),
    )
    command = deploy.server_command(args, model)

    async def ask(url: str) -> list[str]:
        async with connect("vllm", url, Sampling(24), 0) as client:
            done = await generate_all(client, sent, 3, "x")
        return [answer.text.rstrip(HALF_A_CHARACTER) for answer in done.answers]

    with serve(command, tmp_path / "server.log") as server:
        url = server.url
        assert asyncio.run(ask(url)) == expected
        small = request(url, turn(data_uri(noise(16, 16))))
        large = request(url, turn(data_uri(noise(200, 200))))
        refused = request(url, turn("http://localhost/a.png"))
        local = request(url, turn(f"file://{tmp_path}/a.png"))
    group = encoder.images.sizes.group_size if encoder.images else 0
    more_tokens = large["usage"]["prompt_tokens"] - small["usage"]["prompt_tokens"]
    assert 0 < more_tokens <= 640 // group**2
    for response in (refused, local):
        assert response["status"] >= 400
        assert "choices" not in response
    assert ".invalid" in refused["text"]
