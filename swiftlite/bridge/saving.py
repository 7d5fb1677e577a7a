"""Write weights of Megatron models to Hugging Face directories, or yield them for an engine; see `transfer.py`."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from swiftlite.base.errors import UserError
from swiftlite.bridge import placement
from swiftlite.bridge.binding import Binding
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.encoding.expert_stack import fold, part_of_stack, stack_name
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.rows import HfConfig, HfPart, Row, RowTable, Shape, shapes_of
from swiftlite.bridge.tensors import ShardedFiles, split
from swiftlite.bridge.transfer import bind_all

Dtypes = Mapping[str, str | torch.dtype] | str | torch.dtype | None


@torch.no_grad()
def save_hf(
    model_chunks: Sequence[nn.Module],
    out_dir: str | Path,
    family: RowTable,
    hf_config: HfConfig,
    *,
    dtypes: Dtypes = None,
    transposed: Collection[str] = (),
    encodings: Mapping[str, WritableEncoding] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    carried: Path | None = None,
    layers: Iterable[placement.Piece] = (),
    trunk: Mapping[str, Entry] | None = None,
    part: HfPart | None = None,
) -> list[str]:
    """Write a Megatron model as Hugging Face safetensors. Every rank writes its slices into the files in place.

    Ranks that cannot access the first rank's directory send their slices to the first rank, one slice at a time.

    All MTP heads of the model are written, independent of the number in `hf_config`; the caller writes a matching
    config.json (`hf_config.write_patched`). Files are renamed to their final names after all files are complete on
    disk.

    Args:
        family: the model's family, which defines the rows.
        out_dir: directory without safetensors files, created if missing; preferably on a shared file system.
        dtypes: the source model's dtypes ("bfloat16" or torch.bfloat16) by HF key. A tensor whose key is missing gets
            the most frequent dtype, or float32 if its bridge row is `is_exact`. A single dtype applies to all tensors.
            None: the dtype of the parameters. The keys also list the source model's tensors: a copy such as the
            `lm_head.weight` of a tied model is written if its key is among them. A copy in an MTP head is also written
            if the source had no tensor of that head. Experts are stacked if the key of the stack is among the keys.
        transposed: names of stacks of transposed matrices (`transposed_stacks`).
        encodings: encodings of tensors that are not plain, by HF key; not supported for stacked experts. Each rank must
            hold whole blocks.
        max_shard_bytes: maximum size of one file.
        carried: safetensors file of parts outside of the language model, which are copied unchanged.
        layers: this rank's pieces of the decoder layers, if the trunk is streamed (`DecoderLayers.pieces`).
        trunk: the tensors in files that are already in the directory. Only the heads are written, to other files, and
            the index contains both.
        part: the part that is written; None: both. The files of the heads alone have other names.

    Returns:
        Names of the written files, including the index.

    Raises:
        UserError: the directory contains safetensors, is not writable, or the disk is too small.
    """
    if trunk is not None:
        part = "heads"
    # Nothing else would notice: `others_hold` accepts layers that are read from files.
    if not placement.holds_decoder_layers(model_chunks) and not layers and part != "heads":
        raise ValueError("a model with a streamed trunk has no decoder layers to write")
    rows, bindings = bind_all(model_chunks, family, hf_config)
    source_dtypes: Mapping[str, str | torch.dtype] = {}
    if isinstance(dtypes, Mapping):
        source_dtypes = dtypes
    tensors = _saved_tensors(rows, source_dtypes, _dtype_of(dtypes, rows, bindings), family, hf_config)
    others: dict[str, torch.Tensor] = {}
    if carried is not None:
        others = load_file(carried)
    # Places in the files follow from the names of all tensors, so every rank needs these too, although one writes them.
    tensors |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in others.items()}
    # An iterator: the pieces of a streamed trunk are read from its files one tensor at a time.
    pieces = itertools.chain(_pieces(bindings, tensors), layers)
    # The directory can contain the files of the trunk, whose names start with "model-" as well.
    stem = "model-mtp" if part == "heads" else "model"
    if part is not None:
        tensors = {key: found for key, found in tensors.items() if family.is_mtp(hf_config, key) == (part == "heads")}
        pieces = (piece for piece in pieces if piece[0] in tensors)

    folded = fold(tensors, source_dtypes.keys(), transposed)
    files = ShardedFiles(Path(out_dir), folded, max_shard_bytes, encodings, stem, trunk)
    if placement.is_first_rank():
        _create(files, () if trunk is None else {entry.file for entry in trunk.values()})
    placement.barrier()  # the other ranks write into files that the first one has created in their full size
    try:
        _write(files, pieces, others)
    except BaseException:  # Ctrl-C as well: the temporary files are as large as the model
        files.discard()
        raise
    return files.files


def _saved_tensors(
    rows: Iterable[Row],
    source_dtypes: Mapping[str, str | torch.dtype],
    dtype_of: Callable[[str], torch.dtype],
    family: RowTable,
    hf_config: HfConfig,
) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return the dtype and shape of each tensor that `save_hf` writes, including the copies described there."""
    heads_of_source = {family.head_of(hf_config, key) for key in source_dtypes}
    tensors = {}
    for row in rows:
        for key, shape in row.hf_shapes().items():
            head = family.head_of(hf_config, key)
            # Such a source does not show whether the head has copies. Those in published checkpoints do, and vLLM with
            # pipeline parallelism reads that of the embedding.
            is_of_new_head = head is not None and head not in heads_of_source
            if key in row.hf or key in source_dtypes or is_of_new_head:
                tensors[key] = (dtype_of(key), shape)
    return tensors


def _create(files: ShardedFiles, expected: Collection[str]) -> None:
    """Create the directory, and the files under temporary names.

    Args:
        expected: names of the safetensors files that the directory may contain.
    """
    files.out_dir.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in files.out_dir.glob("*.safetensors*") if path.name not in expected)
    if present:
        raise UserError(f"{files.out_dir} already has {', '.join(present[:3])}", "use a new or empty directory")
    files.create()


def _write(files: ShardedFiles, pieces: Iterator[placement.Piece], others: Mapping[str, torch.Tensor]) -> None:
    """Write the slices of all ranks and the tensors in `others`, and publish the files; collective."""
    # Without a shared file system, the loop below only sends on the other ranks: they get no piece to write.
    if not placement.all_ranks_see(files.out_dir):
        pieces = placement.gather_on_first_rank(pieces)
    for piece in pieces:
        files.write(*piece)
    if placement.is_first_rank():
        for key, tensor in others.items():
            files.write(key, (slice(None),) * tensor.dim(), tensor)
    files.flush()
    placement.barrier()  # a file gets its name when the slices of all ranks are on disk, not only those of this one
    if placement.is_first_rank():
        files.publish()
    placement.barrier()  # callers on other ranks may read the files at once


def streamed_tensors(
    model_chunks: Sequence[nn.Module], family: RowTable, hf_config: HfConfig, part: HfPart, *, dtypes: Dtypes = None
) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return dtype and shape of the tensors that `stream_hf` yields, by HF key and in the same order.

    Not collective.
    """
    if part == "trunk" and not placement.holds_decoder_layers(model_chunks):
        raise ValueError("a model with a streamed trunk has no decoder layers to send")
    rows, bindings = bind_all(model_chunks, family, hf_config)
    dtype_of = _dtype_of(dtypes, rows, bindings)
    wants_heads = part == "heads"
    tensors = {}
    for row in rows:
        for key, shape in row.hf.items():
            if family.is_mtp(hf_config, key) == wants_heads:
                tensors[key] = (dtype_of(key), shape)
    return dict(fold(tensors, ()))


@torch.no_grad()
def stream_hf(
    model_chunks: Sequence[nn.Module],
    family: RowTable,
    hf_config: HfConfig,
    part: HfPart,
    *,
    dtypes: Dtypes = None,
    bucket_bytes: int = 1_000_000_000,
    device: torch.device | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Gather the weights of a Megatron model as whole Hugging Face tensors on the first rank. Collective.

    Every rank must iterate to the end; only the first rank receives tensors. Copies of a tensor (of a tied embedding,
    or in MTP heads) are not sent. Experts are not stacked, except those of gpt-oss and Step-3.5.

    Args:
        family: the model's family, which defines the rows.
        part: the trunk, or all MTP heads of the model.
        dtypes: dtype by HF key, a single dtype, or None for the dtype of the parameters, as for `save_hf`.
        bucket_bytes: maximum size of a bucket on the first rank; a larger tensor is a separate bucket.
        device: device of the whole tensors on the first rank; default: the CPU.

    Yields:
        Buckets, each of which maps HF keys to tensors. The caller may keep the tensors.
    """
    tensors = streamed_tensors(model_chunks, family, hf_config, part, dtypes=dtypes)
    if not tensors:
        return
    _, bindings = bind_all(model_chunks, family, hf_config)
    pieces = defaultdict(list)  # by HF key; views of the parameters, so they take no memory
    for piece in _pieces(bindings, ()):
        pieces[piece[0] if piece[0] in tensors else stack_name(piece[0])].append(piece)
    # Every rank computes the same buckets from the shapes, because each bucket is one round of sends and receives.
    for keys in split(tensors, bucket_bytes):
        bucket: dict[str, torch.Tensor] = {}
        if placement.is_first_rank():
            for key in keys:
                dtype, shape = tensors[key]
                bucket[key] = torch.empty(shape, dtype=dtype, device=device)
        mine = itertools.chain.from_iterable(pieces[key] for key in keys)
        for key, index, tensor in placement.gather_on_first_rank(mine):
            whole = bucket[key] if key in bucket else part_of_stack(bucket[stack_name(key)], key)
            whole[index] = tensor
        if placement.is_first_rank():
            yield bucket


def gather_hf(bindings: Sequence[Binding], rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return, on the first rank, the whole HF tensors of bridge rows. Collective.

    The result is empty on all other ranks.

    Args:
        bindings: bindings of the rows on this rank.
        rows: the rows, the same on all ranks.
    """
    shapes = shapes_of(rows)
    tensors: dict[str, torch.Tensor] = {}
    for key, index, tensor in placement.gather_on_first_rank(_pieces(bindings, ())):
        if key not in tensors:
            tensors[key] = torch.empty(shapes[key], dtype=tensor.dtype)
        tensors[key][index] = tensor
    return tensors


def _pieces(bindings: Sequence[Binding], keys: Container[str]) -> Iterator[placement.Piece]:
    """Yield the pieces that this rank writes.

    Args:
        keys: HF keys of the output; a copy is written only if its key is among them.
    """
    for binding in bindings:
        # Another rank writes the same values: that of a replica, or the stage that holds the original of a copy.
        if not binding.shard.writes or binding.is_copy:
            continue
        copy_keys = [key for key in binding.row.hf_copies if key in keys]
        for shard, local_index, hf_key, hf_index in binding.slices():
            if hf_key is not None:
                for key in (hf_key, *copy_keys):
                    yield key, hf_index, shard.tensor[local_index]


def _dtype_of(dtypes: Dtypes, rows: Iterable[Row], bindings: Sequence[Binding]) -> Callable[[str], torch.dtype]:
    """Return a function that returns the dtype in which an HF key is written; see `save_hf`."""
    # bfloat16 cannot represent all ids of tokens: 257 would be written as 256.
    integers = shapes_of(row for row in rows if row.is_integer)
    if isinstance(dtypes, str | torch.dtype):
        one = _dtype(dtypes)
        return lambda key: torch.int64 if key in integers else one
    exact = shapes_of(row for row in rows if row.is_exact)
    stated = dtypes or {}
    usual: str | torch.dtype = bindings[0].shard.tensor.dtype
    if stated:
        [(usual, _)] = Counter(stated.values()).most_common(1)
    # For a new head, the dtype of the trunk's tensor with the same last two components: "gate.e_score_correction_bias".
    usual_exact = {_leaf(key): dtype for key, dtype in stated.items() if key in exact}

    def dtype_of(key: str) -> torch.dtype:
        # A source with stacked experts lists only the name of the stack.
        found = stated.get(stack_name(key)) or stated.get(key)
        if found is None and key in exact:
            found = usual_exact.get(_leaf(key), torch.float32)
        if found is None and key in integers:
            found = torch.int64
        return _dtype(found or usual)

    return dtype_of


def _leaf(key: str) -> str:
    return ".".join(key.split(".")[-2:])


def _dtype(name: str | torch.dtype) -> torch.dtype:
    dtype = getattr(torch, name) if isinstance(name, str) else name
    assert isinstance(dtype, torch.dtype), name
    return dtype
