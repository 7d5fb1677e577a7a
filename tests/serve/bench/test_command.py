"""Test how `bench` loads its prompts."""

import json

import pytest
from transformers import AutoTokenizer

from swiftlite.args.commands import BenchArgs
from swiftlite.args.data_fields import ImageArgs
from swiftlite.base.errors import UserError
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import ChatPrompt, PromptEncoder
from swiftlite.engines.served_model import resolve_served
from swiftlite.serve.bench.command import load
from tests.data.images import noise
from tests.images import make_vision_hf_with_tokenizer
from tests.messages import naming
from tests.tiny import make_tiny_hf


def test_prompts_that_cannot_be_sent(tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path / "model", "mimo", 1, with_tokenizer=True))
    encoder = PromptEncoder(ChatTemplate(AutoTokenizer.from_pretrained(model.directory)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"What is {n}?"}) + "\n" for n in range(3)))

    def prompts(**options):
        return load(BenchArgs(val_dataset=[str(rows)], **options), model, encoder)[1]

    assert len(prompts(concurrency=[1, 2], max_prompts=2)) == 2
    with pytest.raises(UserError, match=naming("--concurrency 4 --val_dataset 3")):
        prompts(concurrency=[1, 4])
    for options, name in (
        ({"max_model_len": 30}, "--max_model_len 30"),
        ({"max_new_tokens": 510}, "max_position_embeddings 512"),
    ):
        with pytest.raises(UserError, match=naming(f"rows.jsonl:1 {name}")):
            prompts(concurrency=[1], **options)


def test_prompts_with_images(tmp_path):
    model = resolve_served(make_vision_hf_with_tokenizer(tmp_path / "model", "qwen3_5", 1))
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    images = tmp_path / "images"
    images.mkdir()
    noise(16, 16).save(images / "a.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "What is it?"}\n{"query": "What is <image>?", "images": ["a.png"]}\n')

    def prompts(backend: str):
        encoder = PromptEncoder.open(ImageArgs(str(images)), model, tokenizer, ENGINES[backend])
        return load(BenchArgs(val_dataset=[str(rows)], concurrency=[1]), model, encoder)[1]

    text, image = prompts("vllm")
    assert isinstance(text, list)
    assert isinstance(image, ChatPrompt)
    assert len(image) > len(text)
    with pytest.raises(UserError, match=naming("rows.jsonl:2 images --infer_backend sglang")):
        prompts("sglang")
