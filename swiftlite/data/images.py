"""Find, check and decode the images of rows.

Images are decoded as in vLLM: rotated as their EXIF data specifies, transparent pixels on white, in RGB. Libraries
differ in these points, so a model that is trained in another way would see other pixels in the engine.
"""

import base64
import contextlib
import hashlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from swiftlite.base.errors import UserError, clip
from swiftlite.data.rows.image_parts import RowImage
from swiftlite.data.rows.row_error import RowError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, by Pillow's names; of an animation only the first frame."""
MAX_PIXELS = 178_956_970
"""Maximum number of pixels of a file, which is Pillow's limit and vLLM's. The header of a file contains the number, so
a small file with a huge image is refused before it is decoded.
"""
MAX_RATIO = 200
"""Maximum ratio of the sides of an image, as in transformers."""
MAX_BYTES = 2**30
"""Maximum size of a file in bytes, above that of an uncompressed image with `MAX_PIXELS`."""


@dataclass(frozen=True)
class ImageRef:
    """An image of a row without its pixels, which are decoded when they are needed.

    Attributes:
        source: absolute path of the file, or the content of an image file.
        width, height: size in pixels, after the rotation that the EXIF data specifies.
        sha256: of the file's content.
        is_clipped: whether the image has gray levels of 16 bits, of which those above 255 become white.
    """

    source: str | bytes
    width: int
    height: int
    sha256: str
    is_clipped: bool = False

    def load(self) -> Image.Image:
        """Decode the image, in RGB. Errors are those of `content`."""
        return decode(self.content())

    def data_uri(self) -> str:
        """Return the image as a data URI, as OpenAI-compatible servers accept it. Errors are those of `content`."""
        content = self.content()
        kind = str(Image.open(BytesIO(content), formats=FORMATS).format).lower()
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"

    def content(self) -> bytes:
        """Return the content of the image file.

        Raises:
            UserError: the file is missing, or has changed since the row was read.
        """
        if isinstance(self.source, bytes):
            return self.source
        try:
            content = _content_of(Path(self.source))
        except UserError as error:
            raise UserError(f"{self.source} {error.problem}", error.hint) from None
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(f"{self.source} has changed since the rows were read", "restore the image")
        return content


def read_image(image: RowImage, media_root: Path) -> ImageRef:
    """Read and decode an image once, so that a damaged file is an error before training. The pixels are not kept.

    Args:
        media_root: directory of relative paths. Files outside of it are refused, also behind links.

    Raises:
        RowError: the image is missing, is outside of the directory, or cannot be decoded.
    """
    source, field = image.source, image.field
    try:
        if isinstance(source, str) and not source.startswith("data:"):
            field += f" {clip(source, 200)}"
            path = _path_in(media_root, source)
            source, content = str(path), _content_of(path)
        else:
            source = content = read_bytes(source)
        decoded, is_clipped = _decode(content)
    except UserError as error:
        raise RowError(field, error.problem, error.hint) from None
    return ImageRef(source, decoded.width, decoded.height, hashlib.sha256(content).hexdigest(), is_clipped)


def decode(content: bytes) -> Image.Image:
    """Decode the content of an image file as vLLM does (its `ImageMediaIO`), in RGB.

    Raises:
        UserError: the format is not supported, the image is too large or too narrow, or the content is damaged.
    """
    return _decode(content)[0]


def _decode(content: bytes) -> tuple[Image.Image, bool]:
    """Return the result of `decode`, and whether gray levels are clipped (`ImageRef.is_clipped`)."""
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
        _check_size(*image.size)
        image.load()  # outside of the following block, which suppresses all errors
        with contextlib.suppress(Exception):  # invalid EXIF data is ignored
            ImageOps.exif_transpose(image, in_place=True)
        extrema: Any = image.getextrema() if image.mode.startswith("I") else (0, 0)
        return _in_rgb(image), extrema[1] > 255
    except UserError:
        raise
    except Image.DecompressionBombError:
        raise _too_large() from None
    except UnidentifiedImageError:
        raise UserError("is not an image in a supported format", "convert it to PNG, JPEG, WebP, GIF or BMP") from None
    except Exception as error:  # damaged files raise many kinds of errors
        raise UserError(f"cannot be decoded: {clip(str(error), 200)}", "replace the image, or remove the row") from None


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _too_large()
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UserError(f"has {width} x {height} pixels, a ratio above {MAX_RATIO}", "crop the image")


def _too_large() -> UserError:
    return UserError(f"has more than {MAX_PIXELS:,} pixels", "resize the image")


def _in_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, with white behind transparent pixels.

    An image that already is in RGB is unchanged, even if one color is declared as transparent; as in vLLM.
    """
    if image.mode == "RGB":
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    on_white = Image.new("RGB", image.size, (255, 255, 255))
    on_white.paste(image, mask=image.getchannel("A"))
    return on_white


def read_bytes(source: str | bytes) -> bytes:
    """Return the bytes of a data URI, and bytes unchanged.

    Raises:
        UserError: the data URI is not in base64.
    """
    if isinstance(source, bytes):
        return source
    head, _, data = source.partition(",")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:
        content = b""
    if not content or not head.endswith(";base64"):
        raise UserError("is not a data URI in base64", "write data:image/png;base64,...")
    return content


def _path_in(media_root: Path, name: str) -> Path:
    """Return the path of a file in the directory, with links resolved.

    Raises:
        UserError: the name is an address, or the file is not in the directory.
    """
    if name.startswith("file://"):
        raise UserError("is an address", "give the path without file://")
    if "://" in name:
        raise UserError("is an address; images are read from files", "download the image, and give its path")
    try:
        root = media_root.resolve()
        path = (root / name).resolve()
        is_inside = path.is_relative_to(root)
        is_file = is_inside and path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL character, or a loop of links
        raise UserError("is not a path of a file") from None
    if not is_inside:
        hint = "move the image, or use --media_root with a directory that contains it"
        raise UserError(f"is outside of --media_root {media_root}", hint)
    if not is_file:
        raise UserError(f"is not a file in --media_root {media_root}", "correct the path, or --media_root")
    return path


def _content_of(path: Path) -> bytes:
    """Return the content of an image file.

    Raises:
        UserError: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", "restore the image") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"has more than {MAX_BYTES:,} bytes", "resize the image")
    return content
