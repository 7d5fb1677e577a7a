"""Describe a GGUF file: its types and size, and what the model's README.md and generation_config.json state.

Keys and values are those of llama.cpp's converter (`gguf.Metadata`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.base.errors import UserError
from swiftlite.gguf.types import GgufType

if TYPE_CHECKING:
    from gguf import GGUFWriter

_INTEGERS = ("sampling_top_k", "sampling_penalty_last_n", "sampling_mirostat")
_LISTS = ("tags", "languages")
_TEXTS = ("name", "license", "license_name", "license_link", "sampling_sequence")
"""Fields of `gguf.Metadata`. Its other fields, such as the version, it guesses from the name of the directory."""


def add_description(writer: "GGUFWriter", directory: Path, name: str, gguf_type: GgufType) -> None:
    """Add metadata that programs show or use as defaults, after all tensors were announced to the writer.

    Args:
        directory: directory of the model.
        name: name of the model.

    Raises:
        UserError: README.md, config.json or generation_config.json cannot be read.
    """
    from gguf import GGML_QUANT_VERSION, Keys, LlamaFileType, Metadata, size_label

    total, shared, of_expert, num_experts = writer.get_total_parameter_count()
    if num_experts == 1:  # of zeros, in files of dense models (`architectures.py`)
        num_experts = 0
    try:
        described = Metadata.load(None, directory, name, total)
    except Exception as error:  # of the YAML of README.md, for example
        problem = f"{directory}: README.md, config.json or generation_config.json cannot be read: {error}"
        raise UserError(problem, "correct or remove the file") from None
    writer.add_type("model")
    writer.add_size_label(size_label(total, shared, of_expert, num_experts))
    writer.add_file_type(LlamaFileType["ALL_F32" if gguf_type == "f32" else f"MOSTLY_{gguf_type.upper()}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for field, value in vars(described).items():
        if field in _TEXTS + _LISTS or field.startswith("sampling_"):
            _add(writer, field, getattr(Keys.General, field.upper()), value)


def _add(writer: "GGUFWriter", field: str, key: str, value: Any) -> None:
    """Add a value, unless its type is not that of the field, because authors of models write these files by hand."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field in _INTEGERS:
        if isinstance(value, int) and is_number:
            writer.add_int32(key, value)
    elif field in _LISTS:
        if texts := _texts(value):
            writer.add_array(key, texts)
    elif field in _TEXTS:
        if texts := _texts(value):
            writer.add_string(key, ",".join(texts))
    elif is_number:
        writer.add_float32(key, value)


def _texts(value: Any) -> Sequence[str]:
    """Return a text, or the texts of a list, as a list; empty if the value is neither."""
    listed = value if isinstance(value, list) else [value]
    return [text for text in listed if isinstance(text, str) and text]
