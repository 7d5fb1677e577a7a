"""Make small copies of images for reports.

A copy is decoded and encoded again, so that a page contains no bytes of an untrusted file.
"""

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image

from swiftlite.base.errors import UserError
from swiftlite.data.images import ImageRef, decode, read_bytes

MAX_SIDE = 256
"""Maximum width and height of a copy in pixels."""
MAX_IMAGES = 4
"""Maximum number of copies for a prompt, those of its first images."""


def thumbnails(images: Sequence[ImageRef]) -> list[str | None]:
    """Return small copies of the first images of a prompt as data URIs; None for an image whose file is missing."""
    return [_thumbnail_of(image) for image in images[:MAX_IMAGES]]


def read_thumbnail(stored: Any) -> str | None:
    """Return a copy of a stored result of `thumbnails`; None if the value is not an image."""
    if not isinstance(stored, str) or not stored.startswith("data:"):
        return None
    try:
        return _encode(decode(read_bytes(stored)))
    except UserError:
        return None


def _thumbnail_of(image: ImageRef) -> str | None:
    try:
        return _encode(image.load())
    except UserError:
        return None


def _encode(image: Image.Image) -> str:
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    file = BytesIO()
    Image.frombytes("RGB", image.size, image.tobytes()).save(file, "JPEG", quality=90)  # without metadata
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
