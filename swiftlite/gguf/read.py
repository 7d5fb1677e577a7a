"""Convert a GGUF file to a Hugging Face directory, with MTP heads.

A file of `write.py` contains config.json and the tokenizer. For files of other programs, `foreign.py` derives them from
the metadata.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.bridge.hf_config import with_architecture_names
from swiftlite.bridge.tensors import ShardedFiles
from swiftlite.errors import UserError, reason_of
from swiftlite.families.family import Family
from swiftlite.families.index import get
from swiftlite.gguf.architectures import conversions_of
from swiftlite.gguf.foreign import Metadata, config_of, tokenizer_files
from swiftlite.gguf.metadata import COPIES, DTYPES, EXACT, FILES
from swiftlite.gguf.tensors import Conversion, is_always_float32

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_MAX_SHARD_BYTES = 5_000_000_000
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Copies of embedding and output layer in heads, which other programs also write."""


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
        self._reader = open_reader(file)
        texts = {name: self._text(key) for name, key in FILES.items()}
        if texts["config.json"] is None:
            texts |= self._derived_files()
        self._files = {name: text for name, text in texts.items() if text is not None}
        self.config = with_architecture_names(json.loads(self._files["config.json"]), file)
        self.family: Family = get(self.config)
        architecture = self._text("general.architecture")
        self.heads = int(self._text(f"{architecture}.nextn_predict_layers") or 0)

    def write_small_files(self, directory: Path) -> None:
        """Write config.json, tokenizer and chat template to a directory."""
        for name, text in self._files.items():
            (directory / name).write_text(text, encoding="utf-8")

    def _derived_files(self) -> dict[str, str]:
        """Return the small files of a file that another program wrote."""
        values = {name: field.contents() for name, field in self._reader.fields.items()}
        metadata = Metadata(values, {tensor.name for tensor in self._reader.tensors})
        try:
            config, tokenizer = config_of(metadata), tokenizer_files(metadata)
        except UserError as error:
            raise UserError(f"{self.file}: {error.problem}", error.hint) from None
        return {"config.json": json.dumps(config, indent=2) + "\n", **tokenizer}

    def write_weights(self, directory: Path) -> None:
        """Write the tensors as safetensors, with the dtypes that the source model had.

        Quantized matrices are de-quantized. Only one conversion is in memory at a time.

        Raises:
            UserError: a tensor is missing, unexpected or has another shape.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for row in self.family.rows(self.config, self.heads):
            shapes |= row.hf_shapes()
        copies = self._copies()
        dtypes = self._dtypes()
        names = [name for conversion in self._plan for name in conversion.hf]
        types = {name: (dtypes.get(name, dtypes["default"]), shapes[name]) for name in (*names, *copies)}
        files = ShardedFiles(directory, types, _MAX_SHARD_BYTES)
        files.create()
        try:
            for name, tensor, _ in self.tensors():
                for target in (name, *(copy for copy, original in copies.items() if original == name)):
                    _write(files, target, tensor.to(types[target][0]), self.file, shapes[target])
            files.flush()
            files.publish()
        except BaseException:
            files.discard()
            raise

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the name and the numbers of each Hugging Face tensor, and whether its type is that of matrices.

        Raises:
            UserError: a tensor is missing or unexpected.
        """
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_names(stored)
        dtypes = self._dtypes()
        for conversion in self._plan:
            is_matrix = any(not is_always_float32(name, tuple(stored[name].shape)) for name in conversion.gguf)
            for name, tensor in self._tensors(conversion, stored, dtypes):
                yield name, tensor, is_matrix

    @property
    def _plan(self) -> list[Conversion]:
        return conversions_of(self.family, self.config, self.heads)

    def _tensors(
        self, conversion: Conversion, stored: Mapping[str, "ReaderTensor"], dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the Hugging Face tensors of a conversion by name."""
        sources = [numbers_of(stored[name]) for name in conversion.gguf]
        if not conversion.hf and any(bool(source.any()) for source in sources):
            raise UserError(f"{self.file}: {conversion.gguf[0]} is not zero", "write it again")
        for name, tensor in zip(conversion.hf, conversion.transform.to_hf(sources), strict=True):
            bits = self._reader.fields.get(EXACT + name)
            if bits is not None:
                dtype = dtypes.get(name, dtypes["default"])
                integers = torch.tensor(bits.contents(), dtype=torch.int64)
                kind = torch.int32 if dtype.itemsize == 4 else torch.int16
                tensor = integers.to(kind).view(dtype).view(tensor.shape)
            yield name, tensor

    def _copies(self) -> dict[str, str]:
        """Return the tensors that are copies of another one, with the name of the original. Some engines require the
        copies in heads."""
        stored = self._text(COPIES)
        if stored is not None:
            return json.loads(stored)
        copies: dict[str, str] = {}
        for row in self.family.rows(self.config, self.heads):
            in_heads = [copy for copy in row.hf_copies if self.family.is_mtp(self.config, copy)]
            copies |= {copy: next(iter(row.hf)) for copy in in_heads}
        return copies

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor that has another dtype than "default"."""
        stored = self._text(DTYPES)
        if stored is None:
            exact = [name for conversion in self._plan if conversion.is_exact for name in conversion.hf]
            return {"default": torch.bfloat16, **dict.fromkeys(exact, torch.float32)}
        found: dict[str, Any] = json.loads(stored)
        dtypes = {"default": getattr(torch, found.pop("default"))}
        for dtype, names in found.items():
            dtypes |= dict.fromkeys(names, getattr(torch, dtype))
        return dtypes

    def _check_names(self, stored: Mapping[str, "ReaderTensor"]) -> None:
        expected = {name for conversion in self._plan for name in conversion.gguf}
        lines = [f"{name} is missing" for name in sorted(expected - stored.keys())]
        unexpected = {name for name in stored if name not in expected and not name.endswith(_COPIES)}
        lines += [f"{name} is unexpected" for name in sorted(unexpected)]
        if lines:
            raise UserError(f"{self.file} does not match its config:\n  " + "\n  ".join(lines[:10]), "write it again")

    def _text(self, key: str) -> str | None:
        field = self._reader.fields.get(key)
        if field is None:
            return None
        return str(field.contents())


def numbers_of(tensor: "ReaderTensor") -> torch.Tensor:
    """Return the numbers of a GGUF tensor; quantized ones are de-quantized to float32."""
    from gguf import GGMLQuantizationType, quants

    shape = tuple(int(length) for length in reversed(tensor.shape))
    if tensor.tensor_type is GGMLQuantizationType.BF16:
        return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).view(shape)
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(tensor.data.copy()).view(shape)
    return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type)).view(shape)


def _write(files: ShardedFiles, name: str, tensor: torch.Tensor, file: Path, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(f"{file}: {name} has the shape {list(tensor.shape)}, not {list(shape)}", "write it again")
    files.write(name, (slice(None),) * len(shape), tensor.contiguous())


def open_reader(file: Path) -> "GGUFReader":
    """Open a GGUF file. Only metadata are read.

    Raises:
        UserError: the file is damaged.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as error:  # a parser of untrusted bytes can raise any exception
        raise UserError(
            f"{file} is not a readable GGUF file: {reason_of(error)}", "copy or download it again"
        ) from None
