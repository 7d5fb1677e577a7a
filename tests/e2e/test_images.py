"""Test vLLM on prompts with images: its answers are those of the transformers engine."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftlite.args.commands import InferArgs
from swiftlite.data.dataset import load_prompts
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import PromptEncoder, most_images
from swiftlite.families.resolved import resolve
from tests.data.images import noise
from tests.images import make_vision_hf_with_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    # vLLM's processors of images import it.
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"),
]
ROWS: list[dict[str, Any]] = [
    {"query": "What does this do?"},
    {"query": "What is <image>?", "images": ["a.png"]},
    {"query": "<image> or <image>?", "images": ["a.png", "b.png"]},
]


def make_model(directory: Path, family: str) -> Path:
    """Write a tiny model with the files that processors in engines read."""
    hf_dir = make_vision_hf_with_tokenizer(directory, family, depth=0)
    path = hf_dir / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    path.write_text(json.dumps(settings))
    kind = "Qwen2VLVideoProcessor" if family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    del settings["image_processor_type"]
    (hf_dir / "video_preprocessor_config.json").write_text(json.dumps(settings | {"video_processor_type": kind}))
    return hf_dir


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_equal_transformers(tmp_path, family):
    hf_dir = make_model(tmp_path / "model", family)
    noise(20, 12).save(tmp_path / "a.png")
    noise(8, 24, seed=1).save(tmp_path / "b.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    args, tokenizer = InferArgs(max_pixels=640), AutoTokenizer.from_pretrained(hf_dir)
    encoder = PromptEncoder.open(args, resolve(hf_dir), tokenizer, ENGINES["vllm"])
    prompts = [encoder(chat) for chat in load_prompts([str(rows)], no_images=encoder.no_images)]
    answers = {}
    for name in ("transformers", "vllm"):
        model = resolve(hf_dir)
        config = EngineConfig(model, "float32", max_images=most_images(prompts), max_model_len=256)
        engine = start_engine(name, config)
        try:
            answers[name] = engine.generate(prompts, Sampling(24))
        finally:
            engine.close()
    assert answers["vllm"] == answers["transformers"]
