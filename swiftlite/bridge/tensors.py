"""Lazy access to safetensors files: read slices of tensors, and write files that several processes fill in place.

A safetensors file has eight bytes with the length of the header, a JSON header, and then the numbers
(huggingface.co/docs/safetensors). The safetensors package is not used, because it cannot write a file slice by slice,
and frees memory only when a file is closed. Files are read and written in blocks of a few megabytes and not
memory-mapped: writing 1 GB through a memory map took 3 times as long (a page fault per 4 KB), and a full disk would
kill the process.
"""

import ctypes
import errno
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, Self

import torch

from swiftlite.base.atomic import atomic_write, sync
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json, read_json
from swiftlite.bridge.encoding.encoding import Format, Found, Stored, WritableEncoding, find_tensors, unquantized
from swiftlite.bridge.encoding.expert_stack import fold, transposed_stacks, unfold
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.entry import Box, Entry, TensorTypes
from swiftlite.bridge.hf_config import HEADS_FILE, own_prefix, read_config

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's configuration file in a directory of adapters."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors package
_CHUNK_BYTES = 1 << 21  # a block of this size fits into the processor's cache

Index = tuple[slice, ...]


def scan(hf_dir: str | Path) -> tuple[dict[str, Entry], list[str]]:
    """Read the index and all file headers of a Hugging Face directory, and of its `HEADS_FILE`.

    Returns:
        The readable tensors, by key in file order, and one line for each problem: a missing or truncated file, or a key
        that is only in the index or only in a file.

    Raises:
        UserError: there is no safetensors file, the index is unreadable, or the directory also contains an adapter.
    """
    hf_dir = Path(hf_dir)
    if (hf_dir / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{hf_dir} has an adapter next to its weights ({ADAPTER_CONFIG}): transformers applies it if PEFT is "
            "installed; other engines and training do not",
            f"merge it into the weights with PEFT; if they are already merged, remove {ADAPTER_CONFIG}",
        )
    index_path = hf_dir / INDEX_NAME
    if index_path.is_file():
        promised = _read_index(index_path)
    elif (hf_dir / SINGLE_NAME).is_file():
        promised = {SINGLE_NAME: None}
    else:
        hint = "use the directory of a Hugging Face model"
        if any(hf_dir.glob("pytorch_model*.bin")):
            hint = "save the model as safetensors first"
        others = [path.name for path in hf_dir.glob("*.safetensors")]
        if len(others) == 1:  # AutoGPTQ writes gptq_model-4bit-128g.safetensors
            hint = f"if {others[0]} has the whole model, rename it to {SINGLE_NAME}"
        raise UserError(f"{hf_dir}: no {SINGLE_NAME} and no {INDEX_NAME}", hint)
    if (hf_dir / HEADS_FILE).is_file():
        # No index names it, so that engines do not load the tensors of heads with the trunk.
        promised[HEADS_FILE] = None

    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for file, keys in promised.items():
        try:
            found = _read_header(hf_dir, file)
        except UserError as error:
            # Collected, because `doctor` and errors list the problems of all files at once.
            problems.append(error.problem)
            continue
        if keys is not None:
            for key in sorted(keys - found.keys()):
                problems.append(f"{index_path.name} places {key} in {file}, which lacks it")
            # Readers that follow the index would not see this tensor, such as heads that a tool appended to a file.
            for key in sorted(found.keys() - keys):
                problems.append(f"{file} has {key}, but {index_path.name} does not place it there")
            found = {key: entry for key, entry in found.items() if key in keys}
        entries.update(found)
    return entries, problems


def as_read(hf_dir: Path, stored: Mapping[str, Entry], format: Format | None) -> Found:
    """Return the tensors of files after decoding: single experts instead of stacks, and decoded tensors instead of
    codes and scales.
    """
    # Files of a model that is not quantized have no qweight.
    if format is not None:
        unused = _added_biases(hf_dir, stored)
        stored = {key: entry for key, entry in stored.items() if key not in unused}
    return find_tensors(unfold(stored), format)


def _added_biases(hf_dir: Path, stored: Mapping[str, Entry]) -> set[str]:
    """Return the biases that AutoGPTQ added to a model without biases: all values are 0.

    AutoGPTQ 0.7 writes a bias for every matrix (`make_quant` in modeling/_utils.py), and engines ignore those that the
    model does not have. If a matrix has no bias, another program wrote the file, and zeros are the model's own.
    """
    biases = [key.removesuffix("qweight") + "bias" for key in stored if key.endswith(".qweight")]
    if not all(bias in stored for bias in biases):
        return set()
    return {bias for bias in biases if _is_zero(hf_dir, stored[bias])}


def _is_zero(hf_dir: Path, entry: Entry) -> bool:
    with (hf_dir / entry.file).open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.nbytes) == bytes(entry.nbytes)


class Checkpoint:
    """The tensors of a Hugging Face directory, as a context manager. Opening it reads only headers.

    In the directory of a drafter, names of tensors get a prefix (`OWN_PREFIXES`).

    Args:
        format: the format that config.json declares (`format_of`); encoded tensors are decoded while reading. None:
            all tensors are plain.

    Attributes:
        stored: dtype, shape and location of every tensor in the files, by key.
        entries: the same after decoding: single experts instead of stacks, and decoded tensors instead of codes and
            scales.
        encoded: how each encoded tensor is stored, by key.

    Raises:
        UserError: a file is missing or damaged (see `scan`); the error lists every problem of every file.
    """

    def __init__(self, hf_dir: str | Path, format: Format | None = None):
        self.hf_dir = Path(hf_dir)
        stored, problems = scan(hf_dir)
        prefix = own_prefix(self.hf_dir)
        self.stored = {prefix + key: entry for key, entry in stored.items()}
        found = as_read(self.hf_dir, self.stored, format)
        self.entries, self.encoded = found.tensors, found.encoded
        # Reported together with missing files: a damaged download often has several problems.
        problems += found.problems
        if problems:
            raise UserError(
                f"{hf_dir} cannot be read:\n  " + "\n  ".join(some(problems)), "copy or download the model again"
            )
        self._files = _OpenFiles("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def read_into(self, target: torch.Tensor, key: str, index: Index) -> None:
        """Copy a slice of a tensor into `target`. Only the slice is read, and no other copy of it is held in memory.

        Args:
            target: tensor of the slice's shape, on any device; values are cast to its dtype.
            index: one slice per axis, step 1.
        """
        entry = self.entries[key]
        buffers = _Buffers()
        axis = self._storage(key).encoding.axis
        for place, box in _chunks(_box(index, entry.shape), entry.dtype.itemsize, axis=axis):
            there = target[place]
            is_as_stored = there.dtype == entry.dtype and key not in self.encoded and not entry.is_transposed
            if is_as_stored and there.device.type == "cpu" and there.is_contiguous():
                self._read_box(entry, box, there)
            else:
                there.copy_(self._decode(key, box, buffers))

    def fold(self, tensors: TensorTypes) -> TensorTypes:
        """Return dtypes and shapes of tensors after single experts are replaced by the stacks of these files."""
        transposed = transposed_stacks({key: entry.shape for key, entry in self.stored.items()})
        return fold(tensors, self.stored, transposed)

    def dtype_of(self, key: str, decoded: torch.dtype) -> torch.dtype:
        """Return the dtype of a tensor in the files; `decoded` if the tensor is encoded."""
        if key in self.encoded:
            return decoded
        return self.entries[key].dtype

    def read(self, key: str, decoded: torch.dtype = torch.float32) -> torch.Tensor:
        """Read a whole tensor, with dtype `decoded` if it is encoded."""
        entry = self.entries[key]
        result = torch.empty(entry.shape, dtype=self.dtype_of(key, decoded))
        self.read_into(result, key, (slice(None),) * len(entry.shape))
        return result

    def chunks(self, key: str, index: Index | None = None) -> Iterator[torch.Tensor]:
        """Yield a slice of a tensor (None: the whole tensor) in chunks of a few MB. Each chunk overwrites the previous
        chunk."""
        entry = self.entries[key]
        buffers = _Buffers()
        if index is None:
            index = (slice(None),) * len(entry.shape)
        whole = _box(index, entry.shape)
        for _, box in _chunks(whole, entry.dtype.itemsize, axis=self._storage(key).encoding.axis):
            yield self._decode(key, box, buffers)

    def stored_chunks(self, key: str) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield a tensor of the files, without decoding it, in chunks of a few MB, each with its place in the tensor.

        Each chunk overwrites the previous chunk.
        """
        entry = self.stored[key]
        buffers = _Buffers()
        for place, box in _chunks(tuple(map(range, entry.shape)), entry.dtype.itemsize):
            chunk = buffers.like(0, entry.dtype, [len(one) for one in box])
            self._read_box(entry, box, chunk)
            yield place, chunk

    def is_equal(self, key: str, other: str, index: Index | None = None) -> bool:
        """Return whether two tensors of the same shape have the same bits in a slice.

        NaNs with the same bits are equal.
        """
        if self.entries[key].dtype != self.entries[other].dtype:
            return False
        chunks = zip(self.chunks(key, index), self.chunks(other, index), strict=True)
        return all(torch.equal(one.view(torch.uint8), another.view(torch.uint8)) for one, another in chunks)

    def _decode(self, key: str, box: Box, buffers: "_Buffers") -> torch.Tensor:
        storage = self._storage(key)
        parts = []
        for number, (entry, part_box) in enumerate(zip(storage.entries, storage.encoding.boxes(box), strict=True)):
            part = buffers.like(number, entry.dtype, [len(one) for one in part_box])
            self._read_box(entry, part_box, part)
            parts.append(part)
        return storage.encoding.read(parts, box)

    def _storage(self, key: str) -> Stored:
        """Return how a tensor is stored."""
        if key in self.encoded:
            return self.encoded[key]
        entry = self.entries[key]
        return Stored(unquantized(entry), (entry.in_file,))

    def _read_box(self, entry: Entry, box: Box, contiguous: torch.Tensor) -> None:
        descriptor = self._files.descriptor(self.hf_dir / entry.file)
        memory = _bytes_of(contiguous)
        for offset, length in entry.contiguous_ranges(box):
            # preadv reads into the tensor's own memory and needs no position in the file, which all slices would share.
            if os.preadv(descriptor, [memory[:length]], offset) != length:
                raise UserError(f"{self.hf_dir / entry.file}: was truncated while it was read")
            memory = memory[length:]


def describe(hf_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Return the content of a directory for JSON: `{key: {"dtype": "bfloat16", "shape": [..]}}`.

    Keys are those of the files, so experts may be stacked. For encoded tensors, the dtype is bfloat16, in which an
    export writes them; their scales are omitted.
    """
    with Checkpoint(hf_dir, format_of(read_config(hf_dir))) as checkpoint:
        types = {
            key: (checkpoint.dtype_of(key, torch.bfloat16), entry.shape) for key, entry in checkpoint.entries.items()
        }
    described = {}
    for key, (dtype, shape) in checkpoint.fold(types).items():
        described[key] = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
    return described


class ShardedFiles:
    """Safetensors files of a known set of tensors, filled in place by one or several processes.

    The position of each tensor in the files depends only on names, shapes and dtypes. Every process computes the same
    positions, so no tensor is gathered. One process calls `create`, then all call `write` and `flush`, then one calls
    `publish`; callers synchronize between these calls. Before `publish`, the files have hidden temporary names.

    Args:
        out_dir: existing directory.
        tensors: dtype and shape by key, in the order of the files.
        max_shard_bytes: maximum size of one file's tensors; a larger tensor gets a separate file.
        encodings: encodings of the tensors that are not plain, by key; the dtypes of these tensors are ignored.
        stem: beginning of the names of the files.
        others: tensors in other files of the directory, which the index also contains.
    """

    def __init__(
        self,
        out_dir: str | Path,
        tensors: TensorTypes,
        max_shard_bytes: int,
        encodings: Mapping[str, WritableEncoding] | None = None,
        stem: str = "model",
        others: Mapping[str, Entry] | None = None,
    ):
        self.out_dir = Path(out_dir)
        self._others = others or {}
        self.entries: dict[str, Entry] = {}
        self._tensors, self._encodings = tensors, encodings or {}
        self._headers: dict[str, bytes] = {}
        # Not "wb", which would truncate a file that other ranks have written to.
        self._files = _OpenFiles("r+b")
        stored = _stored_types(tensors, self._encodings)
        shards = split(stored, max_shard_bytes)
        for number, keys in enumerate(shards, start=1):
            file = f"{stem}.safetensors"
            if len(shards) > 1:
                file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            # Wide dtypes first, so that every tensor is aligned to its element size, as in the safetensors package.
            keys = sorted(keys, key=lambda key: -stored[key][0].itemsize)
            self._headers[file], entries = _make_header(file, {key: stored[key] for key in keys})
            self.entries.update(entries)
        # Ranks hold single experts, so `write` gets their names also if the files have stacks.
        self._places = self.entries | unfold(self.entries)

    @property
    def files(self) -> list[str]:
        """Names of the finished files, including the index."""
        files = list(self._headers)
        if self._has_index:
            files.append(INDEX_NAME)
        return files

    @property
    def _has_index(self) -> bool:
        return len(self._headers) > 1 or bool(self._others)

    def create(self) -> None:
        """Create the files under temporary names.

        Headers are written and disk space is reserved, so that a full disk is detected early.
        """
        size_of = {file: len(header) for file, header in self._headers.items()}
        for entry in self.entries.values():
            size_of[entry.file] = max(size_of[entry.file], entry.offset + entry.nbytes)
        for file, header in self._headers.items():
            try:
                with self._temporary(file).open("wb") as out:
                    # For all files before the first slice, because ranks fill all files at the same time.
                    _reserve(out.fileno(), size_of[file])
                    out.write(header)
            except OSError as error:
                self.discard()
                raise UserError(
                    f"cannot write {self.out_dir / file} ({size_of[file] / 1e9:.2f} GB): {error.strerror}"
                ) from error

    def write(self, key: str, index: Index, source: torch.Tensor) -> None:
        """Write a slice of a tensor in place.

        Args:
            key: key of a tensor, or of a single expert of a stacked tensor.
            index: one slice per axis, step 1; whole blocks of the tensor's encoding.
            source: values of the slice, on any device; they are cast to the dtype in the file, or encoded.
        """
        encoding, shape = self._storage(key)
        entries = [self._places[name].in_file for name in encoding.entries(key)]
        align = partial(encoding.aligned, shape=shape)
        whole = _box(index, shape)
        if align(whole) != whole:
            raise ValueError(f"{key}: {whole} is not made of whole blocks of its encoding")
        for place, box in _chunks(whole, entries[0].dtype.itemsize, align, encoding.axis):
            parts = encoding.write(source[place])
            for entry, part_box, part in zip(entries, encoding.boxes(box), parts, strict=True):
                self._write_box(entry, part_box, part)

    def write_stored(self, key: str, index: Index, source: torch.Tensor) -> None:
        """Write a slice of a tensor of the files in place, such as codes or scales, without encoding it.

        Args:
            key: key of a tensor in the files.
            index: one slice per axis, step 1.
            source: values of the slice, in the dtype of the tensor.
        """
        entry = self.entries[key]
        if source.dtype is not entry.dtype:
            raise ValueError(f"{key}: {source.dtype} is not {entry.dtype}")
        self._write_box(entry, _box(index, entry.shape), source)

    def _storage(self, key: str) -> tuple[WritableEncoding, tuple[int, ...]]:
        """Return the encoding and the shape of a tensor."""
        if key in self._encodings:
            return self._encodings[key], self._tensors[key][1]
        return unquantized(self._places[key]), self._places[key].shape

    def _write_box(self, entry: Entry, box: Box, part: torch.Tensor) -> None:
        descriptor = self._files.descriptor(self._temporary(entry.file))
        # Stacks of transposed matrices are written from transposed views.
        memory = _bytes_of(part.cpu().contiguous())
        for offset, length in entry.contiguous_ranges(box):
            _write_fully(descriptor, memory[:length], offset)
            memory = memory[length:]

    def flush(self) -> None:
        """Flush the data that this process has written to disk."""
        self._files.sync()
        self._files.close()

    def publish(self) -> None:
        """Rename the files to their final names, and write the index."""
        for file in self._headers:
            # `flush` covers only files to which a process wrote slices, and not the headers, which `create` wrote.
            with self._temporary(file).open("rb") as out:
                os.fsync(out.fileno())
            self._temporary(file).replace(self.out_dir / file)
        # The index last: readers of several files start with it, so a directory without it counts as incomplete.
        if self._has_index:
            entries = self.entries | dict(self._others)
            index = {
                "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
                "weight_map": {key: entry.file for key, entry in sorted(entries.items())},
            }
            atomic_write(self.out_dir / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
        # A renamed file can have its old name after a power failure, until the directory itself is on disk.
        sync(self.out_dir)

    def discard(self) -> None:
        """Remove the temporary files after a failure."""
        self._files.close()
        for file in self._headers:
            self._temporary(file).unlink(missing_ok=True)

    def _temporary(self, file: str) -> Path:
        return self.out_dir / f".{file}.incomplete"


def some(lines: Iterable[str], limit: int = 20) -> list[str]:
    """Return the first lines of a list for an error message, followed by "... and N more" if lines are omitted."""
    lines = list(lines)
    if len(lines) <= limit:
        return lines
    return [*lines[:limit], f"... and {len(lines) - limit} more"]


def _read_index(path: Path) -> dict[str, set[str] | None]:
    """Read the index: for each file, by name, the keys of its tensors."""
    try:
        weight_map = read_json(path)["weight_map"]
        files: dict[str, set[str] | None] = {}
        for key, file in weight_map.items():
            if not file or Path(file).name != file:  # an index must not refer to other directories
                raise ValueError(f"{file!r} is not a plain file name")
            keys = files.setdefault(file, set())
            assert keys is not None
            keys.add(key)
        return files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a safetensors index ({error})", "copy or download the model again") from error


def _read_header(hf_dir: Path, file: str) -> dict[str, Entry]:
    """Read the locations of tensors from the header of one file.

    Every offset is checked against the size of the file.
    """
    path = hf_dir / file
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise UserError(f"{path}: not a regular file")
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            header_size = int.from_bytes(opened.read(8), "little")
            if not 2 <= header_size <= min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
            header = parse_json(opened.read(header_size).decode("utf-8"))
        entries = {}
        for key, fields in header.items():
            if key == "__metadata__":
                continue
            if not key.isprintable():  # names are printed, and must not contain control characters
                raise ValueError(f"invalid tensor name {key!r}")
            begin, end = fields["data_offsets"]
            shape = tuple(fields["shape"])
            if fields["dtype"] not in _DTYPES:
                raise UserError(f"{path}: {key} has dtype {fields['dtype']}, which is not supported")
            entry = Entry(_DTYPES[fields["dtype"]], shape, file, 8 + header_size + begin)
            if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)) or end - begin != entry.nbytes:
                raise ValueError(f"{key}: bytes {begin} to {end} do not hold a {fields['dtype']} tensor of {shape}")
            if 8 + header_size + end > size:
                raise UserError(f"{path}: cut short: {key} ends at byte {8 + header_size + end}, the file at {size}")
            entries[key] = entry
        # An empty tensor has the offset of the next one. It comes first, so that offsets stay contiguous.
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        _check_contiguous(path, entries, 8 + header_size, size)
        return entries
    except FileNotFoundError:
        raise UserError(f"{path}: missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from error


def _check_contiguous(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Check that tensors are contiguous up to the end of the file, as the safetensors package requires."""
    place = start
    for key, entry in entries.items():
        if entry.offset != place:
            offsets = f"offset {entry.offset - start}, expected {place - start}"
            raise UserError(f"{path}: not a safetensors file ({key}: {offsets})")
        place += entry.nbytes
    if place != size:
        raise UserError(f"{path}: not a safetensors file ({size - place} bytes follow the last tensor)")


def _make_header(file: str, tensors: TensorTypes) -> tuple[bytes, dict[str, Entry]]:
    """Return the header of a file with these tensors, and the location of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for key, (dtype, shape) in tensors.items():
        end = begin + prod(shape) * dtype.itemsize
        header[key] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # As in the safetensors package: data start at a multiple of 8 bytes, the size of the widest dtype.
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    entries = {
        key: Entry(dtype, tuple(shape), file, start + header[key]["data_offsets"][0])
        for key, (dtype, shape) in tensors.items()
    }
    return len(encoded).to_bytes(8, "little") + encoded, entries


def split(tensors: TensorTypes, max_bytes: int) -> list[list[str]]:
    """Divide keys, in order, into files of at most max_bytes each. A larger tensor gets a separate file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * dtype.itemsize
        if shards[-1] and filled + nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += nbytes
    return shards


def _stored_types(tensors: TensorTypes, encodings: Mapping[str, WritableEncoding]) -> TensorTypes:
    """Return the dtypes and shapes of the parts that store these tensors in a file."""
    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for key, (dtype, shape) in tensors.items():
        if key not in encodings:
            stored[key] = (dtype, shape)
            continue
        # On the meta device, writing computes shapes and dtypes without numbers.
        parts = encodings[key].write(torch.empty(shape, device="meta"))
        for name, part in zip(encodings[key].entries(key), parts, strict=True):
            stored[name] = (part.dtype, tuple(part.shape))
    return stored


def _box(index: Index, shape: tuple[int, ...]) -> Box:
    return tuple(range(*part.indices(length)) for part, length in zip(index, shape, strict=True))


def _chunks(
    whole: Box, itemsize: int, align: Callable[[Box], Box] = lambda box: box, axis: int = 0
) -> Iterator[tuple[Index, Box]]:
    """Divide a box along one axis into boxes of about _CHUNK_BYTES, each with its index in the whole box.

    Args:
        align: extends a box to whole blocks; `whole` must consist of whole blocks.
        axis: the axis along which the box is divided.
    """
    # A tensor without axes, such as the scale of a whole matrix.
    if not whole:
        yield (), ()
        return
    if not all(whole):  # an empty box
        return
    before, divided, after = whole[:axis], whole[axis], whole[axis + 1 :]
    step = max(1, _CHUNK_BYTES // (prod(map(len, (*before, *after))) * itemsize))
    everything = slice(None)
    first = divided.start
    while first < divided.stop:
        # Blocks of 128 rows and a step of 100 give rows 0 to 127, 128 to 255, ...: no block is divided.
        box = align((*before, range(first, min(first + step, divided.stop)), *after))
        end = box[axis].stop
        part = slice(first - divided.start, end - divided.start)
        yield (*(everything for _ in before), part, *(everything for _ in after)), box
        first = end


class _Buffers:
    """Buffers for the stored tensors (such as codes and scales) of one tensor, allocated once for all chunks."""

    def __init__(self):
        self._bytes: defaultdict[int, torch.Tensor] = defaultdict(lambda: torch.empty(0, dtype=torch.uint8))

    def like(self, number: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if len(self._bytes[number]) < nbytes:
            self._bytes[number] = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[number][:nbytes].view(dtype).view(shape)


class _OpenFiles:
    """Files that remain open while their tensors are read or written."""

    def __init__(self, mode: str):
        self._mode = mode
        self._files: dict[Path, IO[bytes]] = {}
        self._stack = ExitStack()

    def descriptor(self, path: Path) -> int:
        if path not in self._files:
            # Without a buffer, which would copy slices of megabytes for nothing.
            self._files[path] = self._stack.enter_context(path.open(self._mode, buffering=0))
        return self._files[path].fileno()

    def sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())

    def close(self) -> None:
        self._stack.close()
        self._files.clear()


def _bytes_of(contiguous: torch.Tensor) -> memoryview:
    return contiguous.view(-1).view(torch.uint8).numpy().data


def _write_fully(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        written = os.pwrite(descriptor, memory, offset)
        memory = memory[written:]
        offset += written


def _reserve(descriptor: int, size: int) -> None:
    """Set a file's size and allocate its blocks, so that a full disk is detected before hours of writing.

    Some file systems, such as NFS before 4.2, cannot allocate blocks. There, only the size is set. `os.posix_fallocate`
    is not used, because there it would write a byte into each block, on one rank while the others wait.
    """
    if sys.platform != "linux":
        os.truncate(descriptor, size)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.truncate(descriptor, size)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
