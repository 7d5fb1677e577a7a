"""Test how `bench` loads its prompts."""

import json

import pytest

pytest.importorskip("aiohttp")

from transformers import AutoTokenizer

from swiftlite.args.commands import BenchArgs
from swiftlite.bench.command import load
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.served_model import resolve_served
from swiftlite.errors import UserError
from tests.messages import naming
from tests.tiny import make_tiny_hf


def test_prompts_that_cannot_be_sent(tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path / "model", "mimo", 1, with_tokenizer=True))
    template = ChatTemplate(AutoTokenizer.from_pretrained(model.directory))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"What is {n}?"}) + "\n" for n in range(3)))

    def prompts(**options):
        return load(BenchArgs(val_dataset=[str(rows)], **options), model, template)

    assert len(prompts(concurrency=[1, 2], max_prompts=2)) == 2
    with pytest.raises(UserError, match=naming("--concurrency 4 --val_dataset 3")):
        prompts(concurrency=[1, 4])
    for options, name in (
        ({"max_model_len": 30}, "--max_model_len 30"),
        ({"max_new_tokens": 510}, "max_position_embeddings 512"),
    ):
        with pytest.raises(UserError, match=naming(f"rows.jsonl:1 {name}")):
            prompts(concurrency=[1], **options)
