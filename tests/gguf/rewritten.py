"""Change GGUF files, as other programs could have written them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from swiftlite.gguf.read import numbers_of
from swiftlite.gguf.write import write_metadata

OF_SWIFTLITE = ("swiftlite.", "tokenizer.huggingface.json")
"""Prefixes of the keys that only swiftlite writes."""


def rewrite(
    file: Path,
    changed: Path,
    values: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    types: Callable[[str], GGMLQuantizationType | None] = lambda name: None,
    keeps_own: bool = False,
) -> Path:
    """Write a copy of a file, as another program could have written it.

    Args:
        values: metadata that are changed.
        without: prefixes of keys and of names of tensors that are left out, in addition to those of swiftlite.
        types: maps the name of a tensor to its new type, if any.
        keeps_own: whether the keys of swiftlite stay.
    """
    reader = GGUFReader(file)
    contents = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    contents |= values or {}
    left_out = without if keeps_own else (*OF_SWIFTLITE, *without)
    writer = GGUFWriter(changed, str(contents.pop("general.architecture")))
    write_metadata(writer, {key: value for key, value in contents.items() if not key.startswith(left_out)})
    for tensor in reader.tensors:
        if tensor.name.startswith(left_out):
            continue
        kind = types(tensor.name)
        if kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            writer.add_tensor(tensor.name, quants.quantize(numbers_of(tensor).float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed
