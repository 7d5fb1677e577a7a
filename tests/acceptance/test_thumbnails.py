"""Test small copies of images."""

import numpy as np
from PIL import Image

from swiftlite.acceptance.thumbnails import MAX_IMAGES, read_thumbnail, thumbnails
from swiftlite.data.images import decode, read_bytes, read_image
from swiftlite.data.rows.image_parts import RowImage
from tests.data.images import noise


def test_copies_are_small_and_have_no_metadata(tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "a secret description"
    Image.new("RGB", (512, 1024), "red").save(tmp_path / "large.jpg", exif=exif)
    noise(20, 12).save(tmp_path / "small.png")
    images = [read_image(RowImage(name, "images"), tmp_path) for name in ("large.jpg", "small.png")]
    large, small = thumbnails(images)
    assert large is not None
    assert small is not None
    assert decode(read_bytes(large)).size == (128, 256)
    assert decode(read_bytes(small)).size == (20, 12)
    assert b"secret" not in read_bytes(large)
    assert np.abs(np.asarray(decode(read_bytes(large))).astype(int) - [255, 0, 0]).max() < 4
    assert read_thumbnail(large) is not None


def test_missing_images(tmp_path):
    noise(20, 12).save(tmp_path / "a.png")
    image = read_image(RowImage("a.png", "images"), tmp_path)
    assert len(thumbnails([image] * 9)) == MAX_IMAGES
    (tmp_path / "a.png").unlink()
    assert thumbnails([image]) == [None]
