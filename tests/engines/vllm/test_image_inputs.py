"""Test what vLLM is given for a prompt with images. tests/e2e/test_images.py starts vLLM."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftlite.args.commands import InferArgs
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_prompts
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.engines.vllm.image_inputs import check_same_length, image_options, vllm_prompt
from swiftlite.families.resolved import resolve
from tests.data.images import TOKENS, noise
from tests.images import make_vision_hf_with_tokenizer
from tests.messages import naming
from tests.tiny import make_tiny_hf


@pytest.fixture
def prompts(tmp_path) -> list[Any]:
    """Return a prompt without images and one with two images, encoded with bounds of pixels."""
    hf_dir = make_vision_hf_with_tokenizer(tmp_path / "model", "qwen3_5", depth=0)
    noise(20, 12).save(tmp_path / "a.png")
    noise(8, 24, seed=1).save(tmp_path / "b.png")
    rows = [{"query": "What?"}, {"query": "<image> or <image>?", "images": ["b.png", "a.png"]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = PromptEncoder.open(
        InferArgs(max_pixels=640), resolve(hf_dir), AutoTokenizer.from_pretrained(hf_dir), ENGINES["transformers"]
    )
    return [encoder(chat) for chat in load_prompts([str(path)], no_images=None)]


def test_vllm_is_given_one_placeholder_per_image(prompts, tmp_path):
    text, seen = prompts
    assert vllm_prompt(text) == {"prompt_token_ids": text}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    start, end, placeholder = TOKENS
    image = f"{start}{placeholder}{end}"
    rendered = f"<|im_start|>user\n{image} or {image}?<|im_end|>\n<|im_start|>assistant\n"
    given = vllm_prompt(seen)
    assert given["prompt_token_ids"] == tokenizer(rendered)["input_ids"]
    assert [image.size for image in given["multi_modal_data"]["image"]] == [(8, 24), (20, 12)]
    assert given["mm_processor_kwargs"] == {"size": {"shortest_edge": 64, "longest_edge": 640}}


def test_other_lengths_are_an_error(prompts):
    check_same_length(prompts[1], len(prompts[1]))
    with pytest.raises(UserError, match=naming(f"{len(prompts[1]) + 1} {len(prompts[1])}")):
        check_same_length(prompts[1], len(prompts[1]) + 1)


def test_the_tower_is_loaded_for_images_only(prompts, tmp_path):
    model = resolve(tmp_path / "model")
    none = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    assert image_options(EngineConfig(model)) == none
    assert image_options(EngineConfig(resolve(make_tiny_hf(tmp_path / "copied", "gemma3")))) == none
    options = image_options(EngineConfig(model, max_images=3))
    assert options == {"limit_mm_per_prompt": {"image": 3, "video": 0}, "skip_tokenizer_init": False}
    given = {"limit_mm_per_prompt": {"image": 4}}
    options = image_options(EngineConfig(model, max_images=3, engine_kwargs=given))
    assert options == {"limit_mm_per_prompt": {"image": 4, "video": 0}, "skip_tokenizer_init": False}
    given = {"limit_mm_per_prompt": {"image": 2}}
    with pytest.raises(UserError, match=naming("--vllm_limit_mm_per_prompt 2 3")):
        image_options(EngineConfig(model, max_images=3, engine_kwargs=given))
    assert image_options(EngineConfig(resolve(make_tiny_hf(tmp_path / "text", "qwen3")))) == {}
