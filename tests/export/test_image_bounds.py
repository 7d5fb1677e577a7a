"""Test that an export resizes images as in training."""

import json
from typing import Any

import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.image_inputs import ImageProcessing
from swiftlite.data.image_sizes import ImageSizes
from swiftlite.export.image_bounds import PREPROCESSOR, write_image_bounds
from tests.data.images import make_processor
from tests.messages import naming

SIZES = ImageSizes(patch_size=4, temporal_patch_size=2, merge_size=2, channels=3, image_token_id=0)


@pytest.mark.parametrize("form", ["size", "pixels"])
@pytest.mark.parametrize("given", [{"max_pixels": 640}, {"max_pixels": 640, "min_pixels": 128}, {"min_pixels": 128}])
def test_bounds_are_those_of_the_run(tmp_path, form, given):
    run, export = tmp_path / "run", tmp_path / "export"
    run.mkdir()
    make_processor().save_pretrained(export)
    path = export / PREPROCESSOR
    if form == "pixels":  # as in Qwen2.5-VL's file
        content: dict[str, Any] = json.loads(path.read_text())
        size = content.pop("size")
        content |= {"max_pixels": size["longest_edge"], "min_pixels": size["shortest_edge"]}
        path.write_text(json.dumps(content))
    before = ImageProcessing.read(export, SIZES)
    (run / "args.json").write_text(json.dumps({"max_pixels": None, "min_pixels": None, **given}))
    write_image_bounds(run, export)
    expected = before.with_bounds(given.get("max_pixels"), given.get("min_pixels"))
    assert ImageProcessing.read(export, SIZES).settings == expected.settings != before.settings


def test_without_bounds_the_file_is_that_of_the_model(tmp_path):
    make_processor().save_pretrained(tmp_path)
    content = (tmp_path / PREPROCESSOR).read_bytes()
    for args in ("", '{"max_pixels": null}'):
        if args:
            (tmp_path / "args.json").write_text(args)
        write_image_bounds(tmp_path, tmp_path)
        assert (tmp_path / PREPROCESSOR).read_bytes() == content


@pytest.mark.parametrize("content", ["{", "[]"])
@pytest.mark.parametrize("damaged", ["args.json", PREPROCESSOR])
def test_a_damaged_file_is_named(tmp_path, damaged, content):
    make_processor().save_pretrained(tmp_path)
    (tmp_path / "args.json").write_text('{"max_pixels": 640}')
    (tmp_path / damaged).write_text(content)
    with pytest.raises(UserError, match=naming(str(tmp_path / damaged))):
        write_image_bounds(tmp_path, tmp_path)
