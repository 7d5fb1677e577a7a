"""Test that images are found, checked and decoded as vLLM decodes them."""

import base64
import os
import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from swiftlite.base.errors import UserError
from swiftlite.data.images import MAX_PIXELS, decode, read_image
from swiftlite.data.rows.image_parts import RowImage
from swiftlite.data.rows.row_error import RowError
from tests.data.images import encoded, noise, writer
from tests.messages import mentions

EXIF_ROTATION = 0x0112


def as_vllm(content: bytes) -> np.ndarray:
    """Decode as vLLM 0.32 does (`ImageMediaIO.load_bytes` with `image_mode` RGB), written with Pillow only."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(content)))
    if image.mode == "RGB":
        return np.asarray(image)
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return np.asarray(image.convert("RGB"))
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.split()[3])
    return np.asarray(white)


def palette(transparency: int | None = None) -> bytes:
    image = noise(9, 7).quantize(8)
    return encoded(image) if transparency is None else encoded(image, transparency=transparency)


@pytest.mark.parametrize(
    "content",
    [
        encoded(noise(9, 7)),
        encoded(noise(9, 7), "JPEG"),
        encoded(noise(9, 7), "WEBP", lossless=True),
        encoded(noise(9, 7), "BMP"),
        encoded(noise(9, 7).quantize(8), "GIF"),
        encoded(noise(9, 7, mode="L")),
        encoded(noise(9, 7, mode="LA")),
        encoded(noise(9, 7, mode="RGBA")),
        encoded(noise(9, 7, mode="RGBA"), "WEBP", lossless=True),
        encoded(noise(9, 7, mode="CMYK"), "JPEG"),
        palette(),
        palette(transparency=2),
        encoded(noise(9, 7), transparency=(1, 2, 3)),
    ],
)
def test_pixels_are_those_of_vllm(content):
    image = decode(content)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), as_vllm(content))


def test_transparent_pixels_are_white_and_half_transparent_ones_mix():
    pixels = np.array([[[200, 0, 0, 255], [200, 0, 0, 0], [0, 0, 0, 128]]], np.uint8)
    assert np.asarray(decode(encoded(Image.fromarray(pixels, "RGBA")))).tolist() == [
        [[200, 0, 0], [255, 255, 255], [127, 127, 127]]
    ]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(tmp_path, orientation):
    image = noise(9, 7)
    exif = Image.Exif()
    exif[EXIF_ROTATION] = orientation
    content = encoded(image, exif=exif)
    (tmp_path / "a.png").write_bytes(content)
    reference = read_image(RowImage("a.png", "images[0]"), tmp_path)
    assert (reference.width, reference.height) == ((7, 9) if orientation > 4 else (9, 7))
    turned = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }[orientation]
    expected = image if turned is None else image.transpose(turned)
    assert np.array_equal(np.asarray(reference.load()), np.asarray(expected))


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (9, 7), color).quantize(2) for color in ("red", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(decode(content))[0, 0].tolist() == [255, 0, 0]


def test_sources_of_an_image(tmp_path):
    """A relative path, an absolute path, a data URI and bytes are the same image."""
    path = writer(tmp_path)("a.png")
    content = path.read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    (tmp_path / "inside").symlink_to(path)
    found = []
    for source in ("a.png", str(path), "inside", uri, content):
        found.append(read_image(RowImage(source, "images[0]"), tmp_path))
    assert len({(each.width, each.height, each.sha256) for each in found}) == 1
    assert [each.source for each in found] == [str(path.resolve())] * 3 + [content] * 2
    for each in found:
        assert np.array_equal(np.asarray(each.load()), np.asarray(noise(20, 12)))


def png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header names a size, with one row of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


BAD_FILES = {
    "text.png": (b"no image", "PNG JPEG WebP GIF BMP"),
    "empty.png": (b"", "PNG"),
    "scan.tiff": (encoded(noise(9, 7), "TIFF"), "PNG"),
    "icon.ico": (encoded(noise(32, 32), "ICO"), "PNG"),
    "print.eps": (encoded(noise(9, 7), "EPS"), "PNG"),
    "bomb.png": (png_header(60_000, 60_000), f"{MAX_PIXELS:,}"),
    "just_too_large.png": (png_header(MAX_PIXELS // 2 + 1, 2), f"{MAX_PIXELS:,}"),
    "narrow.png": (encoded(noise(201, 1)), "201 1 200"),
    "cut.png": (encoded(noise(64, 64))[:-2000], "cannot be decoded"),
    "cut.jpg": (encoded(noise(64, 64), "JPEG")[:-500], "cannot be decoded"),
    "cut.gif": (encoded(noise(64, 64).quantize(64), "GIF")[:-500], "cannot be decoded"),
    "cut.webp": (encoded(noise(64, 64), "WEBP")[:-500], ""),
    "cut.bmp": (encoded(noise(64, 64), "BMP")[:-500], "cannot be decoded"),
    "noise.png": (encoded(noise(64, 64))[:60] + bytes(range(256)) * 9, "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(RowError) as raised:
            read_image(RowImage(name, "images[3]"), tmp_path)
    assert mentions(str(raised.value), f"images[3] {name} {message}")


def test_a_ratio_of_200_is_allowed():
    assert decode(encoded(noise(200, 1))).size == (200, 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.png", "images[0] missing.png --media_root"),
        (".", "images[0] --media_root"),
        ("../outside.png", "images[0] ../outside.png --media_root"),
        ("sub/../../outside.png", "images[0] --media_root"),
        ("ABSOLUTE", "images[0] outside.png --media_root"),
        ("link.png", "images[0] link.png --media_root"),
        ("folder/outside.png", "images[0] folder/outside.png --media_root"),
        ("loop.png", "images[0] loop.png"),
        ("fifo", "images[0] fifo"),
        ("a\0b.png", "images[0]"),
        ("a" * 5000, "images[0]"),
        ("http://example.com/a.png", "images[0] http://example.com/a.png"),
        ("https://example.com/a.png", "images[0] https://example.com/a.png"),
        ("file:///etc/passwd", "images[0] file:///etc/passwd"),
        ("data:image/png;base64,%%%", "images[0] base64"),
        ("data:image/png,abc", "images[0] base64"),
        ("data:", "images[0] base64"),
        ("data:image/png;base64,bm8gaW1hZ2U=", "images[0] PNG"),
        (b"no image", "images[0] PNG"),
    ],
)
def test_bad_sources(tmp_path, source, message):
    """Links are resolved before a path is compared with the directory."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    outside = writer(tmp_path)("outside.png")
    (root / "link.png").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path)
    (root / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "fifo")
    if source == "ABSOLUTE":
        source = str(outside)
    with pytest.raises(RowError) as raised:
        read_image(RowImage(source, "images[0]"), root)
    assert mentions(str(raised.value), message)


def test_a_root_behind_a_link_is_a_root(tmp_path):
    (tmp_path / "real").mkdir()
    writer(tmp_path / "real")("a.png")
    (tmp_path / "root").symlink_to("real")
    assert read_image(RowImage("a.png", "images[0]"), tmp_path / "root").width == 20
    assert read_image(RowImage(str(tmp_path / "real" / "a.png"), "images[0]"), tmp_path / "root").width == 20


def test_an_image_that_changes_after_the_rows_were_read_is_an_error(tmp_path):
    write = writer(tmp_path)
    path: Path = write("a.png")
    reference = read_image(RowImage("a.png", "images[0]"), tmp_path)
    write("a.png", seed=1)
    with pytest.raises(UserError) as raised:
        reference.load()
    assert mentions(raised.value.problem, str(path))
    path.unlink()
    with pytest.raises(UserError) as raised:
        reference.load()
    assert mentions(raised.value.problem, str(path))
