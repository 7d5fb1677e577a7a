"""Test commands on rows with images: answers are those of transformers, and rows keep their images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.args.commands import EvaluateArgs, InferArgs, RegenerateArgs
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_prompts
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import ImagePrompt, PromptEncoder
from swiftlite.families.resolved import resolve
from swiftlite.improve.regenerate import command as regenerate
from swiftlite.serve.evaluate.by_engine import by_engine
from swiftlite.serve.evaluate.evaluation_rows import load_rows
from swiftlite.serve.infer import run
from tests.data.images import TOKENS, make_processor, noise
from tests.images import make_vision_hf_with_tokenizer
from tests.messages import naming

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    return make_vision_hf_with_tokenizer(tmp_path_factory.mktemp("model"), "qwen3_5", depth=2)


ROWS: list[dict[str, Any]] = [
    {"query": "What does this do?", "response": "It returns the sum."},
    {"query": "What is <image>?", "response": "A fox.", "images": ["a.png"]},
    {"query": "<image> or <image>?", "response": "The dog.", "images": ["a.png", "b.png"], "channel": "pairs"},
]


@pytest.fixture
def rows(tmp_path) -> Path:
    """Write rows with 0, 1 and 2 images."""
    noise(20, 12).save(tmp_path / "a.png")
    noise(8, 24, seed=1).save(tmp_path / "b.png")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def args(hf_dir: Path, rows: Path, **options: Any) -> InferArgs:
    usual = {"model": str(hf_dir), "val_dataset": [str(rows)], "torch_dtype": "float32", "max_new_tokens": NEW_TOKENS}
    return InferArgs(**usual | options)


def expected_answers(hf_dir: Path, directory: Path) -> list[str]:
    """Return the greedy answers of transformers, with its image processor and one placeholder per feature."""
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    model: Any = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32).eval()
    start, end, placeholder = TOKENS
    answers = []
    for row in ROWS:
        inputs: dict[str, Any] = {}
        question = row["query"]
        if "images" in row:
            images = [Image.open(directory / name) for name in row["images"]]
            inputs = dict(make_processor()(images, return_tensors="pt"))
            for grid in inputs["image_grid_thw"]:
                question = question.replace("<image>", start + placeholder * int(grid.prod() // 4) + end, 1)
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        inputs["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids(placeholder)).int()
        whole = model.generate(ids, **inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("options", [{}, {"speculative": "mtp"}], ids=["plain", "drafts"])
def test_answers_are_those_of_transformers(hf_dir, rows, tmp_path, options):
    result = tmp_path / "answers.jsonl"
    run(args(hf_dir, rows, result_path=str(result), **options))
    records = [json.loads(line) for line in result.read_text().splitlines()]
    assert [record["response"] for record in records] == expected_answers(hf_dir, tmp_path)


def test_answers_are_rows_with_images(hf_dir, rows, tmp_path):
    """They name the images with absolute paths, so that they can be read from another directory."""
    result = tmp_path / "answers.jsonl"
    run(args(hf_dir, rows, result_path=str(result)))
    other = tmp_path / "other" / "answers.jsonl"
    other.parent.mkdir()
    result.rename(other)
    asked = prompts(hf_dir, other, media_root=str(tmp_path))
    for prompt, expected in zip(asked, prompts(hf_dir, rows), strict=True):
        assert list(prompt) == list(expected)
        assert isinstance(prompt, ImagePrompt) is isinstance(expected, ImagePrompt)
        if isinstance(prompt, ImagePrompt):
            assert prompt.identity == expected.identity
    channels = [json.loads(line).get("channel") for line in other.read_text().splitlines()]
    assert channels == [None, None, "pairs"]


def prompts(hf_dir: Path, rows: Path, **options: Any) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    encoder = PromptEncoder.open(InferArgs(**options), resolve(hf_dir), tokenizer, ENGINES["transformers"])
    chats = load_prompts([str(rows)], no_images=encoder.no_images)
    return [encoder(chat.prompt()) for chat in chats]


def test_other_images_are_other_prompts(hf_dir, rows, tmp_path):
    result = tmp_path / "answers.jsonl"
    run(args(hf_dir, rows, result_path=str(result)))
    noise(20, 12, seed=5).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=naming("--result_path prompts")):
        run(args(hf_dir, rows, result_path=str(result)))


def test_bounds_of_pixels_apply(hf_dir, rows):
    few, many = prompts(hf_dir, rows, max_pixels=64), prompts(hf_dir, rows)
    assert [len(prompt.images) for prompt in few[1:]] == [1, 2]
    assert all(len(one) < len(other) for one, other in zip(few[1:], many[1:], strict=True))


def test_an_engine_without_images_refuses_them(hf_dir, rows):
    with pytest.raises(UserError, match=naming("rows.jsonl:2 images --infer_backend sglang transformers")):
        run(args(hf_dir, rows, infer_backend="sglang"))


def test_an_image_that_is_missing_is_named(hf_dir, rows, tmp_path):
    (tmp_path / "b.png").unlink()
    with pytest.raises(UserError, match=naming("rows.jsonl:3 b.png")):
        run(args(hf_dir, rows))


def test_an_engine_counts_what_a_walk_does(hf_dir, rows, mesh):
    """Teacher forcing over the engine's answers, with the images, simulates the engine's steps exactly."""
    info = ENGINES["transformers"]
    encoder, data = load_rows(resolve(hf_dir), [str(rows)], images=EvaluateArgs(), info=info)
    config = EngineConfig(resolve(hf_dir), "float32", num_speculative_tokens=2)
    served = by_engine(
        "transformers", config, data.val_conversations, encoder, max_new_tokens=40, max_prompts=4, confidences=()
    )
    walks = teacher_forced(resolve(hf_dir), served.answers, torch_dtype="float32", mesh=mesh, num_drafts=2)
    for channel in ("all", "pairs"):
        walk = walks[channel]["replayed"]
        assert {name: served.by_channel[channel][name] for name in walk} == walk
    assert walks["all"]["samples"] == 3


def test_regenerated_rows_keep_their_images(hf_dir, rows, tmp_path):
    output_dir = tmp_path / "regenerated"
    options = {"model": str(hf_dir), "dataset": [str(rows)], "output_dir": str(output_dir), "torch_dtype": "float32"}
    regenerate.run(RegenerateArgs(**options, max_new_tokens=NEW_TOKENS, gold_fraction=0.5))
    written = [json.loads(line) for line in (output_dir / "dataset.jsonl").read_text().splitlines()]
    kinds = {"gold": 0, "regenerated": 0}
    for row in written:
        number = int(row["source"].rpartition(":")[2]) - 1
        names = [str(tmp_path / name) for name in ROWS[number].get("images", ())]
        assert row.get("images", []) == names
        kinds[row["kind"]] += 1
    assert kinds["regenerated"] >= 2
    assert kinds["gold"] >= 1
    asked = prompts(hf_dir, output_dir / "dataset.jsonl", media_root=str(tmp_path))
    assert max(len(prompt.images) for prompt in asked if isinstance(prompt, ImagePrompt)) == 2
