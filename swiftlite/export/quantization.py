"""Quantize the matrices of a Hugging Face model, one tensor at a time, and keep its heads (`export --quant_method`).

The projections of attention and MLP in decoder layers are quantized, including experts. Embeddings, output layer,
norms, routers, indexers, a vision tower and the projections of MTP heads stay plain, and with --quant_heads keep also
the decoder layers of the heads.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.encoding.stored import dtype_name
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.hf_config import write_patched
from swiftlite.bridge.placement import (
    all_ranks_see,
    barrier,
    decoder_layer_of,
    gather_from_all_ranks,
    is_first_rank,
    part_of_this_rank,
)
from swiftlite.bridge.rows import Row
from swiftlite.bridge.tensors import Checkpoint, ShardedFiles
from swiftlite.export.calibrated import Calibrated
from swiftlite.export.fp8_source import Fp8Source
from swiftlite.export.schemes import QuantHeads, Scheme
from swiftlite.families.mlp import MixtureOfExperts
from swiftlite.families.resolved import HfModel
from swiftlite.families.serving.built import merged, needs_whole_blocks
from swiftlite.families.serving.quantized import head_modules, is_selector, with_heads_kept
from swiftlite.train.checkpoint.source import small_files

OUTPUT_LAYER = "lm_head"


def matrices_of(model: HfModel, quant_heads: QuantHeads | None) -> dict[str, Entry]:
    """Return the matrices of a model that are quantized, by HF key.

    Raises:
        UserError: the model is already quantized, the format of its experts is not supported, or a matrix has the
            dtype of codes.
    """
    if format_of(model.config):
        raise UserError(f"{model.name} is already quantized", "use the model before its quantization")
    kinds = [layer.mlp for layer in model.family.architecture(model.config).layers]
    is_stacked = any(
        isinstance(kind, MixtureOfExperts) and (kind.hf_is_transposed or kind.hf_is_stacked) for kind in kinds
    )
    chosen = quantized_weights(model, keeps_heads=quant_heads != "block")
    with Checkpoint(model.directory) as checkpoint:
        matrices = {key: entry for key, entry in checkpoint.entries.items() if key in chosen}
        is_stacked |= not matrices.keys() <= checkpoint.stored.keys()
    if is_stacked:
        raise UserError(
            f"--quant_method is not supported for {model.family.name}, whose files have the matrices of all experts of "
            "a layer in one tensor",
            "remove it",
        )
    _check_plain(model, matrices)
    return matrices


def quantize(
    model: HfModel,
    out_dir: Path,
    scheme: Scheme,
    *,
    quant_heads: QuantHeads | None,
    max_shard_bytes: int,
    fp8_model: HfModel | None = None,
    calibrated: Calibrated | None = None,
) -> None:
    """Write a quantized copy of a model to an existing, empty directory. Collective.

    Ranks share the tensors, and each rank holds one tensor at a time. If other ranks cannot read the files of the first
    rank, it quantizes all tensors.

    Args:
        model: a model that is not quantized.
        quant_heads: whether the decoder layers of MTP heads are quantized; None: as in `fp8_model`, or not without it.
        max_shard_bytes: maximum size of one file.
        fp8_model: the FP8 model whose layout is kept, and the codes of unchanged matrices; `scheme` has its blocks.
        calibrated: the trunk that llm-compressor has quantized. Default: matrices are rounded.

    Raises:
        UserError: the model is already quantized or a matrix cannot be quantized.
    """
    if format_of(model.config):
        raise UserError(f"{model.name} is already quantized", "use the model before its quantization")
    is_shared = all_ranks_see(out_dir)
    num_kept = 0
    if is_shared or is_first_rank():
        with ExitStack() as stack:
            source = fp8_model and stack.enter_context(Fp8Source(fp8_model))
            num_kept = _quantize(model, out_dir, scheme, quant_heads, max_shard_bytes, is_shared, source, calibrated)
    num_kept = sum(gather_from_all_ranks(num_kept))
    if fp8_model:
        logger.info("%d matrices did not change: they have the codes and scales of %s", num_kept, fp8_model.name)


@dataclass(frozen=True)
class _Copy:
    """The tensors of a quantized copy.

    Attributes:
        matrices: number of quantized matrices.
        entries: tensors to write, by HF key; a quantized matrix before its encoding.
        encodings: how each matrix that is quantized here is stored.
        stored_in: the checkpoint from which each tensor is read.
        declared: the quantization that config.json declares.
    """

    matrices: int
    entries: Mapping[str, Entry]
    encodings: Mapping[str, WritableEncoding]
    stored_in: Mapping[str, Checkpoint]
    declared: Quantization


def _quantize(
    model: HfModel,
    out_dir: Path,
    scheme: Scheme,
    quant_heads: QuantHeads | None,
    max_shard_bytes: int,
    is_shared: bool,
    source: Fp8Source | None,
    calibrated: Calibrated | None,
) -> int:
    """Write the model on all ranks, or on the first rank alone if `is_shared` is False.

    Returns:
        The number of matrices whose codes this rank copied from `source`.
    """
    num_kept = 0
    with Checkpoint(model.directory) as checkpoint:
        copy = _copy_of(model, checkpoint, scheme, quant_heads, is_shared, source, calibrated)
        types = {key: (entry.dtype, entry.shape) for key, entry in copy.entries.items()}
        files = ShardedFiles(out_dir, types, max_shard_bytes, copy.encodings)
        if is_first_rank():
            _write_small_files(model, out_dir, copy.declared)
            files.create()
        keys = list(copy.entries)
        if is_shared:
            barrier()
            keys = part_of_this_rank(keys)
        try:
            for key in keys:
                is_encoded = key in copy.encodings
                num_kept += _write(copy.stored_in[key], files, key, copy.entries[key], source, is_encoded=is_encoded)
            files.flush()
            if is_shared:
                barrier()
            if is_first_rank():
                files.publish()
        except BaseException:
            files.discard()
            raise
    before = sum(entry.nbytes for entry in checkpoint.stored.values()) / 1e9
    after = sum(entry.nbytes for entry in files.entries.values()) / 1e9
    logger.info("quantized %d matrices: %s; %.2f GB -> %.2f GB", copy.matrices, scheme.words, before, after)
    return num_kept


def _copy_of(
    model: HfModel,
    checkpoint: Checkpoint,
    scheme: Scheme,
    quant_heads: QuantHeads | None,
    is_shared: bool,
    source: Fp8Source | None,
    calibrated: Calibrated | None,
) -> _Copy:
    """Return what is written. With global scales and `is_shared`, this is collective.

    Raises:
        UserError: a matrix cannot be quantized.
    """
    chosen = quantized_weights(model, keeps_heads=quant_heads != "block")
    if source:
        chosen = source.chosen(model, chosen, quant_heads)
    matrices = {key: entry for key, entry in checkpoint.entries.items() if key in chosen}
    _check_plain(model, matrices)
    largest = dict.fromkeys(matrices, 1.0)
    if scheme.has_global_scales:
        largest = _largest(checkpoint, list(matrices), is_shared)
    encodings = {key: scheme.encoding(entry.shape, entry.dtype, largest[key]) for key, entry in matrices.items()}
    if source:
        encodings = {key: source.encoding(key, encoding) for key, encoding in encodings.items()}
    else:
        _check_merged(matrices, scheme)
    entries = _written(checkpoint, encodings)
    plain_modules = _plain_modules(model, entries, encodings)
    stored_in = dict.fromkeys(entries, checkpoint)
    if calibrated:  # llm-compressor has encoded the trunk; only heads are encoded here
        in_trunk = {key: encodings.pop(key) for key in matrices if not model.family.is_mtp(model.config, key)}
        replaced = calibrated.tensors(model, in_trunk)
        new = {name: entry for parts in replaced.values() for name, entry in parts.items()}
        entries = {key: entry for key, entry in entries.items() if key not in replaced} | new
        stored_in |= dict.fromkeys(new, calibrated.checkpoint)
    if source:
        weights = [key for key in entries if key.endswith(".weight")]
        is_quantized = {key.removesuffix(".weight"): key in encodings for key in weights}
        declared = source.quantization(model, is_quantized)
    else:
        declared = _declared(model, scheme, plain_modules, keeps_heads=quant_heads != "block")
    return _Copy(len(matrices), entries, encodings, stored_in, declared)


def _largest(checkpoint: Checkpoint, keys: list[str], is_shared: bool) -> dict[str, float]:
    """Return the largest absolute value of each matrix and of the matrices that engines merge with it.

    A merged matrix has one global scale. SGLang 0.5.23 refuses matrices with several, and vLLM 0.32 uses the wrong one.

    Args:
        is_shared: whether ranks share the matrices; this function is then collective.
    """
    own = part_of_this_rank(keys) if is_shared else keys
    found = {key: max(float(chunk.abs().max()) for chunk in checkpoint.chunks(key)) for key in own}
    if is_shared:
        for others in gather_from_all_ranks(found):
            found |= others
    by_module: dict[str, float] = {}
    for key, value in found.items():
        module = merged(key.removesuffix(".weight"))
        by_module[module] = max(value, by_module.get(module, 0.0))
    return {key: by_module[merged(key.removesuffix(".weight"))] for key in keys}


def _check_plain(model: HfModel, matrices: Mapping[str, Entry]) -> None:
    """Check that the files contain numbers, and not codes of a quantization that config.json does not declare.

    Raises:
        UserError: a matrix has the dtype of codes.
    """
    for key, entry in matrices.items():
        if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1:
            raise UserError(
                f"{model.directory}: {key} is {dtype_name(entry)}, but config.json has no quantization_config",
                "restore the quantization_config, or use the model before its quantization",
            )


def _check_merged(matrices: Mapping[str, Entry], scheme: Scheme) -> None:
    """Check that matrices which engines merge have whole blocks.

    For example, with 576, 192 and 192 rows of q, k and v and blocks of 128, the files have 5 + 2 + 2 rows of scales,
    but the merged matrix of 960 rows has 8. vLLM 0.32 does not check this.

    Raises:
        UserError: a matrix has no whole blocks.
    """
    if scheme.weights is not None:
        return
    rows = scheme.block[0]
    for key, entry in matrices.items():
        if needs_whole_blocks(key.removesuffix(".weight")) and entry.shape[0] % rows:
            raise UserError(
                f"--quant_block {rows}: {key} has {entry.shape[0]} rows, which are not whole blocks, and engines merge "
                "it with the next matrix",
                "omit --quant_block (one scale per channel), or use a number that divides the rows",
            )


def quantized_weights(model: HfModel, *, keeps_heads: bool) -> set[str]:
    """Return the HF keys of the matrices that are quantized."""
    modules = set(_projections(model.family.trunk_rows(model.config)))
    for head in range(model.heads.layers):
        in_head = head_modules(model.family, model.config, head)
        if not keeps_heads:
            modules |= {in_head.prefix + name for name in in_head.projections}
    return {f"{module}.weight" for module in modules}


def _projections(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the names of the projections in decoder layers. Routers and indexers are not among them."""
    for row in rows:
        if decoder_layer_of(row.mcore) is None:
            continue
        for key, shape in row.hf.items():
            module = key.removesuffix(".weight")
            if module != key and len(shape) == 2 and not is_selector(module):
                yield module


def _declared(model: HfModel, scheme: Scheme, plain: Iterable[str], *, keeps_heads: bool) -> Quantization:
    """Return the quantization of the result.

    Args:
        plain: modules of the trunk with a matrix that is not quantized.
    """
    key = "ignore"
    if scheme.weights is None:  # DeepSeek's format
        key = "modules_to_not_convert"
    quantization = Quantization({**scheme.config, key: list(plain)})
    if not model.heads.layers:
        return quantization
    return with_heads_kept(quantization, model.family, model.config, keeps_block=keeps_heads)


def _plain_modules(model: HfModel, entries: Mapping[str, Entry], quantized: Iterable[str]) -> list[str]:
    """Return the modules of the trunk, and of a vision tower, with a matrix that is not quantized.

    Embeddings are not linear layers, so engines do not quantize them. The output layer is always listed, because
    transformers has this module also if the embeddings are tied and the files have no tensor for it.
    """
    matrices = [key for key, entry in entries.items() if key.endswith(".weight") and len(entry.shape) == 2]
    plain = [key.removesuffix(".weight") for key in matrices if key not in quantized]
    heads = {key.removesuffix(".weight") for key in matrices if model.family.is_mtp(model.config, key)}
    listed = [module for module in plain if module not in heads and not module.endswith("embed_tokens")]
    return list(dict.fromkeys([*listed, OUTPUT_LAYER]))


def _written(checkpoint: Checkpoint, encodings: Mapping[str, WritableEncoding]) -> dict[str, Entry]:
    """Return the tensors of the result. Stacked experts that are not quantized stay stacked."""
    if any(".experts." in key for key in encodings):
        return checkpoint.entries
    return checkpoint.stored


def _write(
    checkpoint: Checkpoint, files: ShardedFiles, key: str, entry: Entry, source: Fp8Source | None, *, is_encoded: bool
) -> bool:
    """Write a tensor. A plain tensor is copied in chunks.

    Returns:
        Whether the codes of a matrix were copied from `source`.
    """
    if key in checkpoint.stored and not is_encoded:
        for place, chunk in checkpoint.stored_chunks(key):
            files.write(key, place, chunk)
        return False
    whole = (slice(None),) * len(entry.shape)
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    checkpoint.read_into(tensor, key, whole)
    if source and is_encoded and source.copy_unchanged(key, tensor, files):
        return True
    files.write(key, whole, tensor)
    return False


def _write_small_files(model: HfModel, out_dir: Path, quantization: Quantization) -> None:
    """Copy all files except weights, and declare the quantization in config.json."""
    for path in small_files(model.directory):
        if path.name != "config.json":
            shutil.copy2(path, out_dir / path.name)
    write_patched(model.directory, out_dir, {"quantization_config": quantization.content})
