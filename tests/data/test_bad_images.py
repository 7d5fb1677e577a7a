"""Test that every kind of bad image is a bad row with its file, line and field, and that its memory is bounded."""

import json
import os
import resource
import struct
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin
from transformers import PreTrainedTokenizerFast

from swiftlite.base.errors import UserError
from swiftlite.data.dataset import Data, load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.images import MAX_PIXELS, read_image
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.rows.image_parts import RowImage
from swiftlite.data.rows.row_error import RowError
from swiftlite.data.template import ChatTemplate
from tests.data.images import VISION, encoded, make_image_encoder, noise, with_vision, writer
from tests.data.templates import train_bytes
from tests.forked import Host
from tests.messages import mentions

GOOD = {"query": "What is <image>?", "response": "A fox.", "images": ["good.png"]}


def png(width: int, height: int, pixels: bytes = b"\0", *, bits: int = 8, color: int = 2) -> bytes:
    """Return a PNG file with a header and compressed pixels that need not fit together."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def bmp(width: int, height: int) -> bytes:
    """Return the header of a BMP file."""
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)


def gif(width: int, height: int) -> bytes:
    """Return the header of a GIF file with one image of this size and no pixels."""
    screen = struct.pack("<HHBBB", width, height, 0, 0, 0)
    return b"GIF89a" + screen + b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x08\x00\x3b"


def with_long_text() -> bytes:
    """Return a small PNG with a comment of 64 MB, compressed to 64 KB."""
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "a" * 2**26, zip=True)
    file = BytesIO()
    noise(9, 7).save(file, "PNG", pnginfo=info)
    return file.getvalue()


FILES: dict[str, tuple[bytes, str]] = {
    "text.png": (b"no image", "PNG"),
    "empty.png": (b"", "PNG"),
    "page.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PNG"),
    "scan.tiff": (encoded(noise(9, 7), "TIFF"), "PNG"),
    "icon.ico": (encoded(noise(32, 32), "ICO"), "PNG"),
    "print.eps": (encoded(noise(9, 7), "EPS"), "PNG"),
    "film.mp4": (b"\0\0\0\x18ftypmp42" + bytes(64), "PNG"),
    "bomb.png": (png(60_000, 60_000), f"{MAX_PIXELS:,}"),
    "bomb.bmp": (bmp(60_000, 60_000), f"{MAX_PIXELS:,}"),
    "bomb.gif": (gif(60_000, 60_000), f"{MAX_PIXELS:,}"),
    "above.png": (png(MAX_PIXELS // 2 + 1, 2), f"{MAX_PIXELS:,}"),
    "narrow.png": (encoded(noise(201, 1)), "201 1 200"),
    "tall.png": (encoded(noise(1, 201)), "1 201 200"),
    "cut.png": (encoded(noise(64, 64))[:-2000], "cannot be decoded"),
    "cut.jpg": (encoded(noise(64, 64), "JPEG")[:-500], "cannot be decoded"),
    "cut.gif": (encoded(noise(64, 64).quantize(64), "GIF")[:-500], "cannot be decoded"),
    "cut.bmp": (encoded(noise(64, 64), "BMP")[:-500], "cannot be decoded"),
    "cut.webp": (encoded(noise(64, 64), "WEBP")[:-500], ""),
    "head.png": (encoded(noise(64, 64))[:20], ""),
    "noise.png": (encoded(noise(64, 64))[:60] + bytes(range(256)) * 9, "cannot be decoded"),
    "zero_wide.png": (png(0, 5), ""),
    "long_text.png": (with_long_text(), "cannot be decoded"),
}
"""Bad files, and a part of the message."""

SOURCES: dict[str, tuple[Any, str]] = {
    "missing": ("missing.png", "images[0] missing.png --media_root"),
    "directory": ("sub", "images[0] sub --media_root"),
    "root itself": (".", "images[0] --media_root"),
    "outside": ("../outside.png", "images[0] ../outside.png --media_root"),
    "outside and back": ("sub/../../outside.png", "images[0] --media_root"),
    "absolute": ("/etc/passwd", "images[0] /etc/passwd --media_root"),
    "link": ("link.png", "images[0] link.png --media_root"),
    "link to a directory": ("folder/outside.png", "images[0] folder/outside.png --media_root"),
    "loop": ("loop.png", "images[0] loop.png"),
    "pipe": ("fifo", "images[0] fifo"),
    "NUL": ("a\0b.png", "images[0]"),
    "long name": ("a" * 5000, "images[0]"),
    "http": ("http://example.com/a.png", "images[0] http://example.com/a.png"),
    "https": ("https://example.com/a.png", "images[0] https://example.com/a.png"),
    "file address": ("file:///etc/passwd", "images[0] file:///etc/passwd"),
    "broken base64": ("data:image/png;base64,%%%", "images[0] base64"),
    "not base64": ("data:image/png,abc", "images[0] base64"),
    "empty data": ("data:image/png;base64,", "images[0] base64"),
    "data of a text": ("data:image/png;base64,bm8gaW1hZ2U=", "images[0] PNG"),
    "null": (None, "images[0] None"),
    "number": (3, "images[0] 3"),
    "empty text": ("", "images[0]"),
    "empty object": ({}, "images[0]"),
    "object without a path": ({"path": ""}, "images[0]"),
    "list": (["good.png"], "images[0]"),
}
"""Bad images of the field `images`, and a part of the message."""


def see(*content: Any, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "A fox."}]
    return {"messages": turns, **fields}


NAMED = {"type": "image", "image": "good.png"}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "two tags, one image": (GOOD | {"query": "<image> and <image>?"}, "images 1 2 <image>"),
    "a tag, no image": ({"query": "<image>?", "response": "A fox."}, "images 0 1 <image>"),
    "images is a number": (GOOD | {"images": 3}, "images 3"),
    "images is a boolean": (GOOD | {"images": True}, "images"),
    "images is an object": (GOOD | {"images": {"path": "good.png"}}, "images"),
    "images is broken JSON": (GOOD | {"images": "[good.png"}, "images JSON"),
    "an empty part": (see({"type": "image"}, {"type": "text", "text": "?"}), "images 0 1"),
    "a part with a number": (see({"type": "image_url", "image_url": {"url": 3}}), "messages[0].content[0] 3"),
    "a part with a missing file": (see({"type": "image", "image": "gone.png"}), "messages[0].content[0] gone.png"),
    "a video": (see(NAMED, {"type": "video", "video": "v.mp4"}), "messages[0].content video"),
    "a text part without a text": (see(NAMED, {"type": "text"}), "messages[0].content[1].text"),
    "videos": (GOOD | {"videos": ["v.mp4"]}, "videos"),
    "a field image": ({"query": "?", "response": "A.", "image": "good.png"}, "image images"),
    "a placeholder in a question": (GOOD | {"query": "<image><|image_pad|>?"}, "messages[0] <|image_pad|>"),
    "a placeholder in an answer": (GOOD | {"response": "A <|image_pad|>."}, "messages[1] <|image_pad|>"),
    "a start of an image": (GOOD | {"query": "<image><|vision_start|>"}, "messages[0] <|vision_start|>"),
    "a placeholder of a video": (GOOD | {"query": "<image><|video_pad|>?"}, "messages[0] <|video_pad|>"),
    "a video with a tag": ({"query": "<video>?", "response": "A.", "videos": ["v.mp4"]}, "videos images"),
    "a tag in capitals": (GOOD | {"query": "<Image>?"}, "messages[0] <Image>"),
    "a tag of HTML": (GOOD | {"query": "What is <img/>?"}, "messages[0] <img/>"),
    "an end of an image": (GOOD | {"query": "<|vision_end|><image>"}, "messages[0] <|vision_end|>"),
}
"""Bad rows, and a part of the message."""

BAD = {name: (GOOD | {"images": [name]}, f"images[0] {name} {part}") for name, (_, part) in FILES.items()}
BAD |= {name: (GOOD | {"images": [source]}, part) for name, (source, part) in SOURCES.items()}
BAD |= ROWS


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a directory of images, next to an image that rows must not read."""
    directory = tmp_path_factory.mktemp("images") / "root"
    (directory / "sub").mkdir(parents=True)
    outside = writer(directory.parent)("outside.png")
    writer(directory)("good.png")
    for name, (content, _) in FILES.items():
        (directory / name).write_bytes(content)
    (directory / "link.png").symlink_to(outside)
    (directory / "folder").symlink_to(directory.parent)
    (directory / "loop.png").symlink_to("loop.png")
    os.mkfifo(directory / "fifo")
    return directory


@pytest.fixture(scope="module")
def encoder(root) -> ConversationEncoder:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bytes(), eos_token="<|endoftext|>", chat_template=VISION)
    images = make_image_encoder(with_vision(tokenizer), root, root)
    template = ChatTemplate(tokenizer, "default", len(tokenizer), images.sizes)
    return ConversationEncoder(template, 2048, "delete", partial(parse_row, no_images=None), images)


def load(encoder: ConversationEncoder, path: Path, *rows: dict[str, Any], **options: Any) -> Data:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_train_val(encoder, [str(path)], **options)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_bad_row(encoder, tmp_path, name):
    """The error names file, line and field. With --max_bad_rows only this row is dropped."""
    row, message = BAD[name]
    path = tmp_path / "rows.jsonl"
    with pytest.raises(UserError) as raised:
        load(encoder, path, GOOD, row)
    assert mentions(str(raised.value), f"{path}:2 {message}")
    data = load(encoder, path, GOOD, row, max_bad_rows=1)
    assert len(data.train) == 1
    assert [bad.startswith(f"{path}:2") for bad in data.report.bad_rows] == [True]


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(noise(9, 7), exif=exif)


def deep(mode: str) -> bytes:
    return encoded(Image.new(mode, (9, 7), 40_000))


FRAMES = [Image.new("RGB", (9, 7), color).quantize(2) for color in ("red", "blue")]
ACCEPTED = {
    "one pixel": encoded(noise(1, 1)),
    "ratio of 200": encoded(noise(200, 1)),
    "animation": encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "16 bits": deep("I;16"),
    "one bit": encoded(Image.new("1", (9, 7))),
    "CMYK": encoded(noise(9, 7, mode="CMYK"), "JPEG"),
    "transparent palette": encoded(noise(9, 7).quantize(8), transparency=2),
    "rotated": rotated(),
    "another suffix": encoded(noise(9, 7), "JPEG"),
    "trailing bytes": encoded(noise(9, 7)) + b"trailing",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_images_are_accepted(encoder, root, tmp_path, name):
    file = f"{name}.png"
    (root / file).write_bytes(ACCEPTED[name])
    (sample,) = load(encoder, tmp_path / "rows.jsonl", GOOD | {"images": [file]}).train
    assert len(sample.extras["patches"]) > 0


BOMBS = ("bomb.png", "bomb.bmp", "bomb.gif", "long_text.png", "pixels.png")
GROWTH_MB = 64
"""Maximum growth of memory; each bomb would need between 64 MB and 10 GB."""


def test_memory_of_bombs_is_bounded(root):
    """The files are read in another process, whose peak memory is compared before and after."""
    # 400,000,000 pixels of one bit: 50 MB of zeros, compressed to 50 KB.
    (root / "pixels.png").write_bytes(png(20_000, 20_000, bytes(20_000 * 2_501), bits=1, color=0))
    assert max((root / name).stat().st_size for name in BOMBS) < 200_000
    host = Host([], {})
    assert host.call(measure, root) < GROWTH_MB
    host.close()


def measure(root: Path) -> int:
    """Return the growth of peak memory in MB while all bombs are refused."""
    read_image(RowImage("good.png", "images[0]"), root)  # Pillow imports its formats
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in BOMBS:
        try:
            read_image(RowImage(name, "images[0]"), root)
        except RowError:
            continue
        raise AssertionError(f"{name} was read")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
