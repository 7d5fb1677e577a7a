"""Read the images that a row names, and their places in its turns.

A turn with images has a list of parts as its content, as `apply_chat_template` expects it: `{"type": "text", "text":
...}` and `{"type": "image"}`. Other turns have a text.
"""

import base64
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from swiftlite.base.errors import clip
from swiftlite.base.json_file import parse_json
from swiftlite.data.rows.row_error import RowError, shown

TAG = "<image>"
NEAR_TAG = re.compile(r"<\s*/?\s*(?:image|img)\s*/?\s*>", re.IGNORECASE)
"""Spellings that are not the tag, such as <Image> and <img>."""
IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are images: of transformers and of OpenAI."""
Message = dict[str, Any]
Part = dict[str, Any]


class RowImage(NamedTuple):
    """An image as a row names it.

    Attributes:
        source: a path or a data URI; or the content of an image file, from a cell of a table.
        field: the field of the row with this image, for errors.
    """

    source: str | bytes
    field: str

    def to_text(self) -> str:
        """Return the path or data URI, as in a row."""
        if isinstance(self.source, str):
            return self.source
        return f"data:image;base64,{base64.b64encode(self.source).decode()}"


def texts_of(message: Message) -> list[str]:
    """Return the texts of a turn: its content, or the text parts of its content."""
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def num_images(messages: list[Message]) -> int:
    """Return the number of images in these turns."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return sum(part["type"] == "image" for part in itertools.chain(*contents))


def has_image_parts(content: list[Part]) -> bool:
    """Return whether a list of parts contains an image."""
    return any(part["type"] in IMAGE_TYPES for part in content)


def read_parts(content: list[Part], path: str) -> list[Part]:
    """Return the parts of a turn with images, in one form. Image parts have the additional key `image`, a `RowImage`,
    unless the row names the image in its field `images`.

    Args:
        path: the field with the parts.

    Raises:
        RowError: a part is neither a text nor an image.
    """
    parts: list[Part] = []
    for i, part in enumerate(content):
        kind = part["type"]
        if kind in IMAGE_TYPES:
            parts.append(_image_part(part, f"{path}[{i}]"))
        elif kind != "text":
            problem = f"has a part of type {clip(str(kind), 80)}, which is not supported"
            raise RowError(path, problem, f"use the types text, {' and '.join(IMAGE_TYPES)}")
        elif not isinstance(part.get("text"), str):
            raise RowError(f"{path}[{i}].text", f"is {shown(part.get('text'))}, not text")
        else:
            parts += _split_at_tags(part["text"])
    return parts


def place_images(messages: list[Message], images: Any) -> tuple[list[Message], tuple[RowImage, ...]]:
    """Replace the tags in the turns by image parts, and return the turns with all images in the order of the turns.

    If there are fewer tags than images, the missing tags are added in front of the first user turn, as in ms-swift.

    Args:
        messages: turns whose content is a text or the result of `read_parts`.
        images: value of the row's field `images`.

    Raises:
        RowError: there are more tags than images, a tag is misspelled, or an image is neither a path, a data URI nor
            bytes.
    """
    contents = [_parts_of(message) for message in messages]
    sources = _listed(images)
    unnamed = sum(_is_unnamed(part) for part in itertools.chain(*contents))
    if unnamed > len(sources):
        problem = f"has {len(sources)} of the {unnamed} images that the {TAG} tags of the turns require"
        raise RowError("images", problem, f"give one image for each {TAG} tag")
    if len(sources) > unnamed:
        _check_spelling_of_tags(messages)
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        contents[first] = [{"type": "image"}] * (len(sources) - unnamed) + contents[first]

    listed = iter(sources)
    placed, found = [], []
    for message, content in zip(messages, contents, strict=True):
        named = [part.get("image") or next(listed) for part in content if part["type"] == "image"]
        if named:
            message = message | {"content": [_without_image(part) for part in content]}
        placed.append(message)
        found += named
    return placed, tuple(found)


def _check_spelling_of_tags(messages: list[Message]) -> None:
    """Check the texts of a row that has fewer tags than images.

    Raises:
        RowError: a text contains a misspelled tag.
    """
    for i, message in enumerate(messages):
        for text in texts_of(message):
            for found in NEAR_TAG.findall(text):
                if found != TAG:
                    raise RowError(f"messages[{i}]", f"has the text {found}, which is not a tag", f"write {TAG}")


def _image_part(part: Part, path: str) -> Part:
    """Return an image part in the form of `read_parts`."""
    names = [name for name in ("image", "image_url", "url", "path") if part.get(name)]
    if not names:
        return {"type": "image"}
    value = part[names[0]]
    if names[0] == "image_url" and isinstance(value, dict):
        value = value.get("url")
    return {"type": "image", "image": _source(value, path)}


def _split_at_tags(text: str) -> Iterator[Part]:
    for number, piece in enumerate(text.split(TAG)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _parts_of(message: Message) -> list[Part]:
    content = message["content"]
    if isinstance(content, str):
        return list(_split_at_tags(content))
    return content


def _is_unnamed(part: Part) -> bool:
    return part["type"] == "image" and "image" not in part


def _without_image(part: Part) -> Part:
    return {key: value for key, value in part.items() if key != "image"}


def _listed(images: Any) -> list[RowImage]:
    """Return the images of a row's field `images`: a list, or in text tables its JSON or a single path."""
    if isinstance(images, str) and images.startswith("["):
        try:
            images = parse_json(images)
        except ValueError as error:
            raise RowError("images", f"is not JSON: {error}") from None
    if isinstance(images, str):
        images = [images]
    if not isinstance(images, list | tuple | None):
        raise RowError("images", f"is {shown(images)}, not a list of images")
    return [_source(value, f"images[{i}]") for i, value in enumerate(images or ())]


def _source(value: Any, path: str) -> RowImage:
    """Return an image given as a path, a data URI or bytes, or as `{"bytes": ..., "path": ...}` as in `datasets`."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not value or not isinstance(value, str | bytes):
        raise RowError(path, f"is {shown(value)}, not an image", "give the path of an image, or a data URI")
    return RowImage(value, path)
