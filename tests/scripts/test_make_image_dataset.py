"""Test the pictures and questions of make_image_dataset.py."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from swiftlite.data.images import read_image
from swiftlite.data.rows.conversation import parse_row


@pytest.fixture
def script(load_script):
    return load_script("make_image_dataset")


def pixels(image) -> bytes:
    return np.asarray(image.convert("RGB")).tobytes() + bytes(image.size)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_read_and_differ(script, tmp_path):
    script.write(tmp_path, script.make_pictures(60, seed=0), 20)
    train, val = rows_of(tmp_path / "rows.jsonl"), rows_of(tmp_path / "val.jsonl")
    assert (len(train), len(val)) == (40, 20)
    images = []
    for row in [*train, *val]:
        chat = parse_row(row, no_images=None)
        (image,) = (read_image(each, tmp_path) for each in chat.images)
        assert (image.width, image.height) == (48, 48)
        images.append(image.sha256)
    assert len(set(images)) == 60
    assert Counter(row["channel"] for row in train) == {"count": 20, "read": 20}


def test_pictures_depend_only_on_the_seed(script):
    first, again, other = ([pixels(each.image) for each in script.make_pictures(10, seed)] for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)
    assert [pixels(each.image) for each in script.make_pictures(20, 1)][:10] == first


def count_regions(is_shape: np.ndarray) -> int:
    """Return the number of connected regions of a mask."""
    rest = is_shape.copy()
    regions = 0
    while rest.any():
        regions += 1
        open_pixels = [tuple(np.argwhere(rest)[0])]
        while open_pixels:
            row, column = open_pixels.pop()
            inside = 0 <= row < rest.shape[0] and 0 <= column < rest.shape[1]
            if inside and rest[row, column]:
                rest[row, column] = False
                around = ((row + y, column + x) for y in (-1, 0, 1) for x in (-1, 0, 1))
                open_pixels += around
    return regions


def test_answers_count_the_shapes_of_the_picture(script):
    pictures = [each for each in script.make_pictures(80, seed=3) if each.channel == "count"]
    numbers = set()
    for picture in pictures:
        found = re.fullmatch(r"There (?:is|are) (\d) (\w+) (\w+?)s?\.", picture.answer)
        assert found is not None
        number, color, shape = found.groups()
        assert shape in picture.question
        is_shape = (np.asarray(picture.image) == script.COLORS[color]).all(axis=2)
        assert count_regions(is_shape) == int(number)
        numbers.add(int(number))
    assert numbers == {1, 2, 3, 4, 5}


def test_limits_of_pictures(script):
    limits = script.Limits(side=64, max_shapes=3, digits=2)
    pictures = script.make_pictures(60, seed=5, limits=limits)
    assert {picture.image.size for picture in pictures} == {(64, 64)}
    numbers = {picture.channel: set() for picture in pictures}
    for picture in pictures:
        numbers[picture.channel] |= set(re.findall(r"\d+", picture.answer))
    assert numbers["count"] == set("123")
    assert {len(number) for number in numbers["read"]} == {2}


@pytest.mark.parametrize(("side", "digits"), [(24, 1), (48, 1), (24, 2), (24, 3), (48, 3), (96, 2)])
def test_numbers_are_inside_of_the_picture(script, side, digits):
    limits = script.Limits(side=side, digits=digits)
    pictures = [each for each in script.make_pictures(80, seed=4, limits=limits) if each.channel == "read"]
    for picture in pictures:
        assert re.fullmatch(rf"The number is \d{{{digits}}}\.", picture.answer)
        array = np.asarray(picture.image).astype(int)
        background = array[0, 0]
        is_ink = np.abs(array - background).sum(axis=2) > 30
        assert is_ink.sum() > side
        assert not is_ink[[0, -1]].any()
        assert not is_ink[:, [0, -1]].any()
