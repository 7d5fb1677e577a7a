"""Test which runs read rows with images, and what their batches contain."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.data.batch import AXES, ITEM
from swiftlite.data.dataset import Data
from swiftlite.data.image_inputs import GRID, PATCHES
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.train.methods.conversations import image_extras_of, load_data
from swiftlite.train.methods.sft import SFT
from tests.data.images import TOKENS, VISION, make_processor, with_vision, writer
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

ROW = {"query": "What is <image>?", "response": "That.", "images": ["a.png"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a tiny Qwen3.5 with the files of a model that reads images."""
    directory = make_tiny_hf(tmp_path_factory.mktemp("seeing"), "qwen3_5", with_tokenizer=True)
    tokenizer: Any = with_vision(AutoTokenizer.from_pretrained(directory))
    tokenizer.chat_template = VISION
    tokenizer.save_pretrained(directory)
    make_processor().save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    start, end, placeholder = tokenizer.convert_tokens_to_ids(TOKENS)
    config |= {"image_token_id": placeholder, "vision_start_token_id": start, "vision_end_token_id": end}
    config["vision_config"] |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    config["text_config"]["vocab_size"] = len(tokenizer)
    path.write_text(json.dumps(config))
    return directory


@pytest.fixture
def rows(tmp_path) -> Path:
    writer(tmp_path)("a.png", 24, 16)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({"query": "q", "response": "a"}) + "\n")
    return path


def read(hf_model: HfModel, rows: Path, **options: Any) -> Data:
    args = SftArgs(dataset=[str(rows)], split_dataset_ratio=0, **options)
    encoder = SFT.make_encoder(args, AutoTokenizer.from_pretrained(hf_model.directory), hf_model)
    return load_data(args, encoder, hf_model.config["vocab_size"])


def test_rows_are_read_as_the_options_say(model, rows):
    hf_model = resolve(model)
    data = read(hf_model, rows)
    assert [len(sample.extras.get(PATCHES, ())) for sample in data.train] == [6, 0]
    assert data.report.total.images == 1
    assert len(read(hf_model, rows, max_pixels=128).train[0].extras[PATCHES]) == 1
    assert len(read(hf_model, rows, min_pixels=1000).train[0].extras[PATCHES]) == 20
    with pytest.raises(UserError, match=naming("images[0] a.png --media_root")):
        read(hf_model, rows, media_root=str(model))
    with pytest.raises(UserError, match=naming("--max_pixels 3 64")):
        read(hf_model, rows, max_pixels=3)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("image_token_id", "images: qwen3_5"),
        ("preprocessor_config.json", "images: preprocessor_config.json"),
    ],
)
def test_rows_with_images_are_refused_with_the_reason(model, rows, tmp_path, missing, message):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        if path.name != missing:
            (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    config.pop(missing, None)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as raised:
        read(resolve(copy), rows)
    assert mentions(str(raised.value), f"{rows}:1 {message}")
    assert len(read(resolve(copy), rows, max_bad_rows=1).train) == 1


def test_streams_and_models_without_the_token_refuse_images(model, rows):
    hf_model = resolve(model)
    args = SftArgs(dataset=[str(rows)], streaming=True)
    encoder = SFT.make_encoder(args, AutoTokenizer.from_pretrained(model), hf_model)
    with pytest.raises(UserError, match=naming("images: --streaming")):
        encoder.parse(ROW, system=None, source="")
    without = replace(hf_model, config={**hf_model.config, "image_token_id": 99_999})
    with pytest.raises(UserError, match=naming(f"{rows}:1 images: 99999")):
        read(without, rows)


def test_a_bound_below_one_item_is_refused_before_data_is_read(model, rows):
    args = SftArgs(model=str(model), dataset=[str(rows)], output_dir=str(rows.parent / "run"), max_pixels=3)
    with pytest.raises(OptionError, match=naming("--max_pixels 3 64")):
        rules.check(args)


def test_batches_of_images_have_inputs_of_the_tower(model, mesh):
    extras = image_extras_of(resolve(model), mesh)
    assert [extra.name for extra in extras] == [PATCHES, GRID, ITEM, AXES]
