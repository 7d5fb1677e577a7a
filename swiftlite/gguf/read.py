"""Convert a GGUF file to a Hugging Face directory, with MTP heads.

A file of `write.py` contains config.json and the tokenizer. For files of other programs, `foreign.py` derives them from
the metadata.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.base.errors import UserError, clip, reason_of
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.bridge.encoding.expert_stack import fold
from swiftlite.bridge.hf_config import with_architecture_names
from swiftlite.bridge.rows import shapes_of
from swiftlite.bridge.tensors import ShardedFiles
from swiftlite.families.family import Family
from swiftlite.families.index import get
from swiftlite.families.linear_attention import GatedDeltaNet
from swiftlite.gguf.architectures import architecture_named, conversions_of
from swiftlite.gguf.foreign import (
    Metadata,
    config_of,
    not_read_by_transformers,
    pre_tokenizer_of,
    tokenizer_files,
)
from swiftlite.gguf.header import read_keys
from swiftlite.gguf.metadata import COPIES, DTYPES, EXACT, FILES, STACKS
from swiftlite.gguf.tensors import Conversion, is_always_float32
from swiftlite.gguf.tokenizer import PRE_TOKENIZERS

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_SHARD_BYTES = 5_000_000_000
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Copies of embedding and output layer in heads, which other programs also write."""

_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")


class GgufFile:
    """A GGUF file. Opening it reads only metadata.

    Attributes:
        config: content of config.json.
        family: the model's family.
        heads: number of MTP heads.

    Raises:
        UserError: the file is damaged or its model is not supported.
    """

    def __init__(self, file: Path):
        self.file = file
        with readable(file):
            self._reader = open_reader(file)
            texts = {name: self._text(key) for name, key in FILES.items()}
            if texts["config.json"] is None:
                texts |= self._derived_files()
            self._files = {name: text for name, text in texts.items() if text is not None}
            self.config = with_architecture_names(parse_json(self._files["config.json"]), file)
            self.family: Family = get(self.config)
            self.family.check(self.config)
            architecture = self._text("general.architecture")
            self.heads = int(self._text(f"{architecture}.nextn_predict_layers") or 0)
            self._check_sizes()
            self._check_tensors()

    def write_small_files(self, directory: Path) -> None:
        """Write config.json, tokenizer and chat template to a directory."""
        for name, text in self._files.items():
            (directory / name).write_text(text, encoding="utf-8")

    def _derived_files(self) -> dict[str, str]:
        """Return the small files of a file that another program wrote."""
        values = {name: field.contents() for name, field in self._reader.fields.items()}
        metadata = Metadata(values, {tensor.name for tensor in self._reader.tensors})
        return {"config.json": json.dumps(config_of(metadata), indent=2) + "\n", **tokenizer_files(metadata)}

    def write_weights(self, directory: Path) -> None:
        """Write the tensors as safetensors, with the dtypes that the source model had.

        Quantized matrices are dequantized. Only one conversion is in memory at a time.

        Raises:
            UserError: the file is damaged, or the directory cannot be written.
        """
        with readable(self.file):
            copies = self._copies()
            names = [name for conversion in self._plan for name in conversion.hf]
            types = {name: (self._dtype_of(name), self._shapes[name]) for name in (*names, *copies)}
            in_files = fold(types, parse_json(self._text(STACKS) or "[]"))
        files = ShardedFiles(directory, in_files, _MAX_SHARD_BYTES)
        files.create()
        try:
            for name, tensor, _ in self.tensors():
                for target in (name, *(copy for copy, original in copies.items() if original == name)):
                    whole = (slice(None),) * tensor.dim()
                    files.write(target, whole, tensor.to(types[target][0]).contiguous())
            files.flush()
            files.publish()
        except BaseException:
            files.discard()
            raise

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the name and the numbers of each Hugging Face tensor, and whether its type is that of matrices."""
        for conversion in self._plan:
            with readable(self.file):
                found = self._tensors(conversion)
            is_matrix = any(not is_always_float32(name, self._gguf_shapes[name]) for name in conversion.gguf)
            for name, tensor in found.items():
                yield name, tensor, is_matrix

    @cached_property
    def _plan(self) -> list[Conversion]:
        architecture = architecture_named(str(self._text("general.architecture")))
        return conversions_of(self.family, self.config, self.heads, architecture)

    @cached_property
    def _stored(self) -> "dict[str, ReaderTensor]":
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def _tensors(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of a conversion by name."""
        sources = [numbers_of(self._stored[name]).view(self._gguf_shapes[name]) for name in conversion.gguf]
        for name, source, constant in zip(conversion.gguf, sources, _constants(conversion), strict=False):
            if not torch.equal(source.float(), constant):
                raise UserError(f"{self.file}: {name} has other numbers than its architecture", "write it again")
        tensors = dict(zip(conversion.hf, conversion.transform.to_hf(sources), strict=True))
        for name, tensor in tensors.items():
            bits = self._reader.fields.get(EXACT + name)
            if bits is not None:
                dtype = self._dtype_of(name)
                kind = torch.int32 if dtype.itemsize == 4 else torch.int16
                integers = torch.tensor(bits.contents(), dtype=torch.int64).to(kind)
                tensors[name] = integers.view(dtype).view(tensor.shape)
        return tensors

    def _copies(self) -> dict[str, str]:
        """Return the tensors that are copies of another one, with the name of the original. Some engines require the
        copies in heads."""
        stored = self._text(COPIES)
        if stored is not None:
            return parse_json(stored)
        copies: dict[str, str] = {}
        for row in self.family.rows(self.config, self.heads):
            in_heads = [copy for copy in row.hf_copies if self.family.is_mtp(self.config, copy)]
            copies |= {copy: next(iter(row.hf)) for copy in in_heads}
        return copies

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a Hugging Face tensor."""
        return self._dtypes.get(name, self._dtypes["default"])

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor that has another dtype than "default"."""
        stored = self._text(DTYPES)
        if stored is None:
            exact = [name for conversion in self._plan if conversion.is_exact for name in conversion.hf]
            return {"default": torch.bfloat16, **dict.fromkeys(exact, torch.float32)}
        found: dict[str, Any] = parse_json(stored)
        dtypes = {"default": _FLOATS[found.pop("default")]}
        for dtype, names in found.items():
            dtypes |= dict.fromkeys(names, _FLOATS[dtype])
        return dtypes

    def _check_sizes(self) -> None:
        """Check that numbers of heads and channels are not larger than the file, before lists of them are made.

        Raises:
            UserError: a number is too large.
        """
        if self.heads > len(self._stored):
            raise UserError(f"nextn_predict_layers {self.heads} is more than the tensors in the file", "write it again")
        largest = max((int(length) for tensor in self._stored.values() for length in tensor.shape), default=0)
        for layer in self.family.architecture(self.config).layers:
            if isinstance(layer.attention, GatedDeltaNet):
                for name, shape in shapes_of(layer.attention.rows()).items():
                    if max(shape) > 2 * largest:  # two GGUF tensors can be one Hugging Face tensor
                        raise UserError(f"{name} has the shape {list(shape)}, larger than the file", "write it again")

    def _check_tensors(self) -> None:
        """Check that the file contains exactly the tensors of its model, with their shapes.

        Raises:
            UserError: a tensor is missing or unexpected, or has another shape.
        """
        expected = {name for conversion in self._plan for name in conversion.gguf}
        lines = [f"{name} is missing" for name in sorted(expected - self._stored.keys())]
        unexpected = {name for name in self._stored if name not in expected and not name.endswith(_COPIES)}
        lines += [f"{name} is unexpected" for name in sorted(unexpected)]
        if not lines:
            lines = list(self._other_shapes())
        if lines:
            raise UserError(f"{self.file} does not match its config:\n  " + "\n  ".join(lines[:10]), "write it again")

    def _other_shapes(self) -> Iterator[str]:
        """Yield a line for each GGUF tensor that has another shape than the one computed from the model's shapes."""
        for name, shape in self._gguf_shapes.items():
            stored = tuple(int(length) for length in reversed(self._stored[name].shape))
            if _without_leading_ones(stored) != _without_leading_ones(shape):
                yield f"{name} has the shape {list(stored)}, not {list(shape)}"

    @cached_property
    def _gguf_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each GGUF tensor, computed from those of the Hugging Face tensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        for conversion in self._plan:
            with torch.device("meta"):
                sources = [torch.empty(self._shapes[name]) for name in conversion.hf]
                tensors = conversion.transform.to_gguf(sources)
            for name, tensor in zip(conversion.gguf, tensors, strict=True):
                shapes[name] = tuple(tensor.shape)
        return shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each Hugging Face tensor, including copies."""
        shapes: dict[str, tuple[int, ...]] = {}
        for row in self.family.rows(self.config, self.heads):
            shapes |= row.hf_shapes()
        return shapes

    def _text(self, key: str) -> str | None:
        field = self._reader.fields.get(key)
        if field is None:
            return None
        return str(field.contents())


def _constants(conversion: Conversion) -> list[torch.Tensor]:
    """Return the GGUF tensors of a conversion that do not depend on the model; empty for all others."""
    return [] if conversion.hf else conversion.transform.to_gguf([])


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as llama-quantize writes it, for example [32, 576] for the [1, 32, 576] of one expert."""
    return tuple(itertools.dropwhile(lambda length: length == 1, shape))


def numbers_of(tensor: "ReaderTensor") -> torch.Tensor:
    """Return the numbers of a GGUF tensor; quantized tensors are dequantized to float32."""
    from gguf import GGMLQuantizationType, quants

    shape = tuple(int(length) for length in reversed(tensor.shape))
    if tensor.tensor_type is GGMLQuantizationType.BF16:
        return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).view(shape)
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(tensor.data.copy()).view(shape)
    return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type)).view(shape)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn every exception into an error that names the file. Its bytes are untrusted, and can make a parser raise any
    exception.

    Raises:
        UserError: an exception was raised.
    """
    try:
        yield
    except UserError as error:
        if str(file) in error.problem:
            raise
        raise UserError(f"{file}: {error.problem}", error.hint) from None
    except Exception as error:
        raise UserError(
            f"{file} is not a readable GGUF file: {reason_of(error)}", "copy or download it again"
        ) from None


def open_reader(file: Path) -> "GGUFReader":
    """Open a GGUF file. Only metadata are read."""
    from gguf import GGUFReader

    read_keys(file)  # checks the lengths
    return GGUFReader(file)


def keys_of(file: Path) -> list[str]:
    """Return the keys of a file's metadata.

    Raises:
        UserError: the file is damaged.
    """
    with readable(file):
        return read_keys(file)


def read_otherwise(file: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return what transformers does not read from a file: values of config.json, and the pre-tokenizer.

    The pre-tokenizer is None if it is not known. A warning then names it, because transformers divides text as the
    first models of the architecture do.

    Raises:
        UserError: the file is damaged, or config.json cannot state how it scales rotary positions.
    """
    with readable(file):
        reader = open_reader(file)
        fields = {name: field for name, field in reader.fields.items() if not name.startswith(_LONG)}
        values = {name: field.contents() for name, field in fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors: list[float] = []
        if "rope_freqs.weight" in tensors:
            factors = numbers_of(tensors["rope_freqs.weight"]).flatten().tolist()
        metadata = Metadata(values, set(tensors))
        pre_tokenizer = pre_tokenizer_of(metadata)
        if pre_tokenizer is None and values.get("tokenizer.ggml.model") == "gpt2":
            logger.warning(
                "%s: tokenizer.ggml.pre %s is unknown: text may be divided into other tokens than by llama.cpp; "
                "known: %s; or use the model's safetensors",
                file,
                clip(repr(values.get("tokenizer.ggml.pre")), 80),
                ", ".join(sorted(PRE_TOKENIZERS.values())),
            )
        return not_read_by_transformers(metadata, factors), pre_tokenizer
