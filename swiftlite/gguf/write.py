"""Write a GGUF file from a Hugging Face directory, one tensor in memory at a time."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from swiftlite.base.errors import UserError
from swiftlite.base.heads import KEYS, MTP
from swiftlite.base.log import logger
from swiftlite.bridge.encoding.expert_stack import stack_name, transposed_stacks
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.families.resolved import HfModel
from swiftlite.gguf.architectures import architecture_of, conversions_of, metadata_of
from swiftlite.gguf.drafters import draft_conversions_of, draft_metadata_of, unused_tensors_of
from swiftlite.gguf.general import add_description
from swiftlite.gguf.metadata import CONFIG, COPIES, DTYPES, EXACT, FILES, STACKS
from swiftlite.gguf.tensors import Conversion, is_always_float32
from swiftlite.gguf.tokenizer import tokenizer_metadata
from swiftlite.gguf.transforms import is_exact
from swiftlite.gguf.types import GgufType

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter


def write_gguf(model: HfModel, file: Path, gguf_type: GgufType) -> None:
    """Write a GGUF file of a model with its MTP heads, or of its trunk if it has another kind of drafter.

    Matrices have the type `gguf_type`, except that a quantized type leaves the decoder layer of the heads at q8_0, and
    matrices whose rows do not consist of whole blocks at bfloat16. Vectors, routers and convolutions are float32.

    Raises:
        UserError: llama.cpp does not support the model, or a tensor has no place in the file.
    """
    kind, heads = model.heads.kind, model.heads.layers
    if kind != MTP:
        heads = 0
    metadata = metadata_of(model.family, model.config, heads, kind)
    plan = conversions_of(model.family, model.config, heads, architecture_of(model.family, kind))
    with Checkpoint(model.directory, format_of(model.config)) as checkpoint:
        _check_all_used(model, checkpoint, plan)
        metadata |= _source(model, checkpoint, plan)
        _write(model, checkpoint, file, gguf_type, metadata, plan)


def write_draft_gguf(model: HfModel, file: Path, gguf_type: GgufType) -> None:
    """Write a GGUF file of a model's drafter, if `has_draft_file`. Matrices have the type `gguf_type`.

    Raises:
        UserError: llama.cpp does not support the drafter.
    """
    metadata, plan = draft_metadata_of(model.family, model.config), draft_conversions_of(model.family, model.config)
    with Checkpoint(model.directory, format_of(model.config)) as checkpoint:
        unused = unused_tensors_of(model.family, model.config)
        if unused:
            logger.info("%s has no %s: llama.cpp drafts from all tokens", file.name.lstrip("."), ", ".join(unused))
        _check_all_used(model, checkpoint, plan, unused, of_drafter=True)
        _write(model, checkpoint, file, gguf_type, metadata, plan)


def has_draft_file(model: HfModel) -> bool:
    """Return whether llama.cpp reads the drafter of a model from a file of its own."""
    return model.heads.kind != MTP and model.heads.layers > 0


def draft_file_of(file: Path) -> Path:
    """Return the file of a drafter, next to that of its trunk."""
    return file.with_name(f"{file.stem}-draft.gguf")


def _write(
    model: HfModel,
    checkpoint: Checkpoint,
    file: Path,
    gguf_type: GgufType,
    metadata: dict[str, Any],
    plan: Sequence[Conversion],
) -> None:
    """Write a file with some tensors of a model, and with its tokenizer."""
    from gguf import GGUFWriter

    values = tokenizer_metadata(model.directory, model.config["vocab_size"]) | metadata
    writer = GGUFWriter(file, values.pop("general.architecture"))
    write_metadata(writer, values)
    parts = [_Part(conversion, checkpoint) for conversion in plan]
    num_layers = model.family.architecture(model.config).outside.num_layers
    for part in parts:
        part.add_infos(writer, gguf_type, num_layers)
    add_description(writer, model.directory, Path(model.name).name, gguf_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part in parts:
        part.write(writer)
    writer.close()


@dataclass
class _Part:
    """The tensors of a conversion while a file is written."""

    conversion: Conversion
    checkpoint: Checkpoint
    types: "Sequence[GGMLQuantizationType]" = ()

    def add_infos(self, writer: "GGUFWriter", gguf_type: GgufType, num_layers: int) -> None:
        """Announce name, shape and type of the GGUF tensors, computed from shapes alone."""
        entries = self.checkpoint.entries
        with torch.device("meta"):
            sources = [torch.empty(entries[name].shape) for name in self.conversion.hf]
            shapes = [tuple(tensor.shape) for tensor in self.conversion.transform.to_gguf(sources)]
        types = []
        for name, shape in zip(self.conversion.gguf, shapes, strict=True):
            kind = type_of(name, shape, gguf_type, num_layers)
            types.append(kind)
            _announce(writer, name, shape, kind)
        self.types = types

    def write(self, writer: "GGUFWriter") -> None:
        sources = [self.checkpoint.read(name) for name in self.conversion.hf]
        for tensor, kind in zip(self.conversion.transform.to_gguf(sources), self.types, strict=True):
            numbers = encode(tensor, kind)
            if kind.name == "F16" and not numpy.isfinite(numbers).all():
                raise UserError(
                    f"{self.conversion.hf[0]} has numbers that are too large for f16", "use --gguf_type bf16 or f32"
                )
            writer.write_tensor_data(numbers)


def type_of(name: str, shape: Sequence[int], gguf_type: GgufType, num_layers: int) -> "GGMLQuantizationType":
    """Return the type of a GGUF tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if is_always_float32(name, shape):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[gguf_type.upper()]
    is_head = name.startswith("blk.") and int(name.split(".")[1]) >= num_layers
    if gguf_type == "q4_0" and is_head:
        kind = GGMLQuantizationType.Q8_0
    block, _ = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        return GGMLQuantizationType.BF16
    return kind


def encode(tensor: torch.Tensor, kind: "GGMLQuantizationType") -> Any:
    """Return the numbers of a tensor in a type, as an array of numpy."""
    from gguf import GGMLQuantizationType, quants

    if kind is GGMLQuantizationType.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind is GGMLQuantizationType.F16:
        return tensor.to(torch.float16).contiguous().numpy()
    values = tensor.float().contiguous().numpy()
    if kind is GGMLQuantizationType.F32:
        return values
    return quants.quantize(values, kind)


def _announce(writer: "GGUFWriter", name: str, shape: Sequence[int], kind: "GGMLQuantizationType") -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape

    block, size = GGML_QUANT_SIZES[kind]
    num_bytes = prod(shape) // block * size
    if kind is GGMLQuantizationType.F32:
        writer.add_tensor_info(name, shape, numpy.dtype(numpy.float32), num_bytes)
    elif kind is GGMLQuantizationType.F16:
        writer.add_tensor_info(name, shape, numpy.dtype(numpy.float16), num_bytes)
    else:
        stored = quant_shape_to_byte_shape(tuple(shape), kind)
        writer.add_tensor_info(name, stored, numpy.dtype(numpy.uint8), num_bytes, raw_dtype=kind)


def _check_all_used(
    model: HfModel,
    checkpoint: Checkpoint,
    plan: Sequence[Conversion],
    unused: Sequence[str] = (),
    *,
    of_drafter: bool = False,
) -> None:
    """Check that every tensor of the checkpoint, or of its drafter in another file, has a place in the file, except for
    those in `unused`."""
    used = {name for conversion in plan for name in conversion.hf}
    copies = {name for row in model.family.rows(model.config) for name in row.hf_copies}
    left = [
        name
        for name in checkpoint.entries
        if name not in used
        and name not in unused
        and (not has_draft_file(model) or model.family.is_mtp(model.config, name) == of_drafter)
        and name not in copies
        and not model.family.is_carried(model.config, name)
        and not model.family.is_derived(name)
    ]
    missing = sorted(used - checkpoint.entries.keys())
    if left or missing:
        lines = [f"{name} has no place in the GGUF file" for name in left] + [f"{name} is missing" for name in missing]
        raise UserError(f"{model.directory}:\n  " + "\n  ".join(lines[:10]), "copy or download the model again")


def _source(model: HfModel, checkpoint: Checkpoint, plan: Sequence[Conversion]) -> dict[str, Any]:
    """Return the metadata with which `read.py` restores the Hugging Face directory."""
    metadata: dict[str, Any] = {}
    for name, key in FILES.items():
        if (model.directory / name).is_file():
            metadata[key] = (model.directory / name).read_text(encoding="utf-8")
    metadata[CONFIG] = _config_text(model)
    names = [name for conversion in plan for name in conversion.hf]
    copies: dict[str, str] = {}
    for row in model.family.rows(model.config):
        copies |= {copy: next(iter(row.hf)) for copy in row.hf_copies if copy in checkpoint.entries}
    dtypes = {name: str(checkpoint.dtype_of(name, torch.bfloat16)).removeprefix("torch.") for name in (*names, *copies)}
    default, _ = Counter(dtypes.values()).most_common(1)[0]
    others: dict[str, Any] = {"default": default}
    for name, dtype in dtypes.items():
        if dtype != default:
            others.setdefault(dtype, []).append(name)
    metadata |= {DTYPES: json.dumps(others), COPIES: json.dumps(copies)}
    stacks = {stack_name(name) for name in names} & checkpoint.stored.keys() - set(names)
    stacks -= transposed_stacks({name: entry.shape for name, entry in checkpoint.stored.items()})
    if stacks:
        metadata[STACKS] = json.dumps(sorted(stacks))
    for conversion in plan:
        metadata |= _lost_bits(conversion, checkpoint)
    return metadata


def _config_text(model: HfModel) -> str:
    """Return the text of config.json, without a quantization, because quantized tensors are decoded, and without a
    drafter that is in another file."""
    text = (model.directory / "config.json").read_text(encoding="utf-8")
    content = json.loads(text)
    kept = dict(content)
    kept.pop("quantization_config", None)
    if model.heads.kind != MTP:
        kept = {name: value for name, value in kept.items() if name not in KEYS}
        if isinstance(text_config := kept.get("text_config"), dict):  # of a model with a tower
            kept["text_config"] = {name: value for name, value in text_config.items() if name not in KEYS}
    if kept == content:
        return text
    return json.dumps(kept, indent=2) + "\n"


def _lost_bits(conversion: Conversion, checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Return the bits of the tensors of a conversion that cannot be computed back exactly. Only norms and decays can be
    among them."""
    if is_exact(conversion.transform):
        return {}
    lost = {}
    sources = [checkpoint.read(name) for name in conversion.hf]
    back = conversion.transform.to_hf(conversion.transform.to_gguf(sources))
    for name, source, computed in zip(conversion.hf, sources, back, strict=True):
        if not torch.equal(computed.to(source.dtype), source):
            kind = torch.int32 if source.dtype.itemsize == 4 else torch.int16
            lost[EXACT + name] = source.contiguous().view(kind).flatten().tolist()
    return lost


def write_metadata(writer: "GGUFWriter", metadata: Mapping[str, Any]) -> None:
    """Add metadata to a writer. The type of a number is uint32 or float32."""
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
