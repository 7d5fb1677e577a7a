"""Run `swiftlite export`: convert a run or checkpoint to an audited Hugging Face model, or back."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.args.commands import ExportArgs
from swiftlite.args.fields import MtpInit
from swiftlite.base.atomic import fsync_tree, sync
from swiftlite.base.draft_vocab import TOKEN_MAP_FILE
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads, depth_key
from swiftlite.base.log import logger
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.files import AdapterBase
from swiftlite.bridge.audit import audit_hf, mtp_keys
from swiftlite.bridge.carry import copy_trunk
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.hf_config import dtype_change, read_config, write_patched
from swiftlite.bridge.layers import DecoderLayers
from swiftlite.bridge.placement import Piece
from swiftlite.bridge.rows import shapes_of
from swiftlite.bridge.tensors import describe, some
from swiftlite.bridge.transfer import WeightsReport, graft_heads, save_hf
from swiftlite.engines.quantized_heads import quantized_head_problems
from swiftlite.export import adapter
from swiftlite.export.calibrated import Calibrated, calibrated
from swiftlite.export.card import model_card, read_quality
from swiftlite.export.draft_vocab import restrict_heads
from swiftlite.export.fp8_source import fp8_model_of
from swiftlite.export.gate import check_quality
from swiftlite.export.gguf import export_gguf
from swiftlite.export.image_bounds import write_image_bounds
from swiftlite.export.provenance import provenance_of
from swiftlite.export.quantization import matrices_of, quantize
from swiftlite.export.schemes import Scheme, scheme_of
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.families.serving.quantized import with_heads_kept
from swiftlite.hub.name import model_name
from swiftlite.hub.push import push
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.lora import add_adapters, merge
from swiftlite.model.open import build_hf_model, open_model
from swiftlite.plan.facts import reads_run, run_checkpoints
from swiftlite.plan.layout import layout_of
from swiftlite.plan.quantization import CALIBRATED_METHODS
from swiftlite.runtime.agreement import check_agreement
from swiftlite.runtime.distributed import session
from swiftlite.runtime.lock import only_run_in
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from swiftlite.train.checkpoint.checkpointer import Checkpointer, load_checkpoint, read_state, resolve_checkpoint
from swiftlite.train.checkpoint.source import (
    CARRIED_FILE,
    TENSORS_FILE,
    carried_file,
    check_source,
    dtypes_of,
    source_tensors,
    with_heads_of,
    write_source,
)


def run(args: ExportArgs) -> None:
    """Convert in the direction that the options select.

    The result is either complete or absent, even if the process is killed.
    """
    with session(layout_of(args), timeout_minutes=args.distributed_timeout_minutes) as mesh:
        if args.to_gguf:
            to_gguf(args, mesh)
        elif args.to_hf:
            logger.info("%s", to_hf(args, mesh))
        elif args.to_mcore:
            to_mcore(args, mesh)
        else:
            quantize_model(args, mesh)
        is_first_rank = dist.get_rank() == 0
    name = model_name(f"{args.push_to_hub}@main")
    if is_first_rank and args.push_to_hub and name:  # checked by rules
        push(Path(args.output_dir), name.at(""), is_private=args.hub_private_repo)


def to_hf(args: ExportArgs, mesh: Mesh) -> str:
    """Write the checkpoint's weights with the configuration and tokenizer of the model that the run started from.

    Returns:
        A description of the result.

    Raises:
        UserError: there is no checkpoint, --output_dir cannot be created, the audit of the result found a problem, or
            it does not meet a limit of its quality; nothing is written.
    """
    checkpoint = resolve_checkpoint(Path(args.model))
    check_source(checkpoint.parent)
    provenance = None
    if args.push_to_hub:
        provenance = provenance_of(checkpoint)
    hf_model = resolve(checkpoint.parent / "source")
    graft_from = _resolve_graft(args)
    state = read_state(checkpoint)
    if state.get("images"):
        hf_model = hf_model.with_images()
    heads = _heads_of_result(args, replace(hf_model.heads, layers=state["mtp_num_layers"]), graft_from)
    heads = restrict_heads(args, checkpoint.parent, hf_model, heads)
    lora = _lora_of(args, state)
    if not args.merge_lora:
        adapter.check_can_be_written(checkpoint, lora, hf_model, heads)
    trunk = frozen_trunk_of(args, state)
    quantized_trunk = quantized_trunk_of(args, state, trunk)
    fp8_model = fp8_model_of(args)
    tensors = source_tensors(hf_model.directory)
    if graft_from:
        tensors = with_heads_of(hf_model, tensors, graft_from)
    dtypes = dtypes_of(tensors)
    written_dtypes = dtypes
    if args.torch_dtype:
        written_dtypes = _cast(dtypes, hf_model, heads, args.torch_dtype)
    output_dir = Path(args.output_dir)
    with _whole_or_absent(output_dir) as result, _unquantized(args, result) as writing:
        dtype = getattr(torch, state["torch_dtype"])
        streams_trunk = trunk is not None and state.get("streams_trunk", True)
        chunks = _open_checkpoint(mesh, checkpoint, hf_model, heads, lora, graft_from, dtype, streams_trunk)
        if lora and not args.merge_lora:
            adapter.write(chunks, writing, lora, AdapterBase(**state["base"]), hf_model, heads)
            return f"wrote {output_dir}: adapters of {state['base']['model']}, from {checkpoint}"
        merge(chunks)
        copied: dict[str, Entry] | None = None
        if dist.get_rank() == 0:
            _copy_small_files(args, hf_model, heads, writing, quantized_trunk)
            write_image_bounds(checkpoint.parent, writing)
        if quantized_trunk:
            copied = _copy_quantized_trunk(quantized_trunk, writing)
        dist.barrier()
        layers_of = trunk if streams_trunk and quantized_trunk is None else None
        with _streamed_layers(layers_of, dtype) as layers:
            save_hf(
                chunks,
                writing,
                hf_model.family,
                hf_model.config,
                dtypes=written_dtypes,
                max_shard_bytes=int(args.max_shard_size_gb * 1e9),
                carried=None if quantized_trunk else carried_file(hf_model.directory),
                layers=layers,
                trunk=copied,
            )
        if dist.get_rank() == 0:
            _audit(writing, hf_model, dtypes)
        if args.quant_method:
            _quantize(args, resolve(writing), result, fp8_model)
        if dist.get_rank() == 0:
            unquantized = resolve(writing) if args.quant_method else None
            check_quality(args, result, args.torch_dtype or state["torch_dtype"], mesh, unquantized)
            if args.push_to_hub and provenance:
                measured = _measured_run(args, checkpoint)
                quality = read_quality(resolve(result), args.quant_method)
                card = model_card(args.push_to_hub, provenance, heads, measured, quality)
                (result / "README.md").write_text(card, encoding="utf-8")
    family = hf_model.family.name
    return f"wrote {output_dir}: {family} with {heads.layers} MTP layers, from {checkpoint}"


def to_gguf(args: ExportArgs, mesh: Mesh) -> None:
    """Write a GGUF file of a run or of a Hugging Face model.

    Raises:
        UserError: the model cannot be read, llama.cpp does not support it, or a check of the result failed; nothing is
            written.
    """
    output_dir = Path(args.output_dir)
    with _whole_or_absent(output_dir) as result, _unquantized(args, result) as plain:
        model = args.model
        if reads_run(args):
            # The limits apply to the GGUF file.
            unlimited = {"val_dataset": [], "min_acceptance": None, "force": False, "push_to_hub": None}
            to_hf(replace(args, to_gguf=False, to_hf=True, output_dir=str(plain), gguf_type=None, **unlimited), mesh)
            model = str(plain)
        if dist.get_rank() == 0:
            exported = resolve(model)
            file = export_gguf(args, exported, result)
            if args.push_to_hub:
                checkpoint = resolve_checkpoint(Path(args.model))
                provenance, measured = provenance_of(checkpoint), _measured_run(args, checkpoint)
                card = model_card(args.push_to_hub, provenance, exported.heads, measured, gguf_file=file.name)
                (result / "README.md").write_text(card, encoding="utf-8")
            logger.info("wrote %s: %.2f GB, from %s", output_dir / file.name, file.stat().st_size / 1e9, args.model)


def quantize_model(args: ExportArgs, mesh: Mesh) -> None:
    """Write a quantized copy of a Hugging Face model.

    Raises:
        UserError: the model cannot be read or quantized, --output_dir cannot be created, or the result does not
            meet a limit of its quality; nothing is written.
    """
    hf_model = resolve(args.model)
    check_agreement({"commit of --model": hf_model.identity})
    output_dir = Path(args.output_dir)
    with _whole_or_absent(output_dir) as writing:
        _quantize(args, hf_model, writing)
        if dist.get_rank() == 0:
            dtype = hf_model.config.get("dtype") or hf_model.config.get("torch_dtype") or "bfloat16"
            check_quality(args, writing, dtype, mesh, hf_model)
    logger.info("wrote %s: %s, from %s", output_dir, hf_model.family.name, hf_model.directory)


def _quantize(args: ExportArgs, hf_model: HfModel, writing: Path, fp8_model: HfModel | None = None) -> None:
    """Write a quantized copy of a model to a directory, and audit it. Collective.

    Args:
        fp8_model: the FP8 model whose layout is kept, if any.

    Raises:
        UserError: the model cannot be quantized, or the audit found a problem.
    """
    matrices = matrices_of(hf_model, args.quant_heads)
    scheme = scheme_of(args, {key: entry.shape for key, entry in matrices.items()})
    with _calibrated(args, hf_model, matrices, scheme, writing) as calibrated_trunk:
        quantize(
            hf_model,
            writing,
            scheme,
            quant_heads=args.quant_heads,
            max_shard_bytes=int(args.max_shard_size_gb * 1e9),
            fp8_model=fp8_model,
            calibrated=calibrated_trunk,
        )
    if dist.get_rank() == 0:
        _audit(writing, hf_model, describe(hf_model.directory))


@contextmanager
def _calibrated(
    args: ExportArgs, hf_model: HfModel, matrices: Mapping[str, Entry], scheme: Scheme, writing: Path
) -> Iterator[Calibrated | None]:
    """Yield the trunk that llm-compressor quantizes, in a temporary directory next to `writing`; None if the method
    does not require calibration rows."""
    if args.quant_method not in CALIBRATED_METHODS:
        yield None
        return
    in_trunk = {key: entry for key, entry in matrices.items() if not hf_model.family.is_mtp(hf_model.config, key)}
    directory = writing.with_name(f"{writing.name}.calibrated")
    shutil.rmtree(directory, ignore_errors=True)  # files of a killed export
    try:
        with calibrated(args, hf_model, in_trunk, scheme, directory) as result:
            yield result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _unquantized(args: ExportArgs, result: Path) -> Iterator[Path]:
    """Yield the directory for the model before its quantization: `result`, or a temporary directory next to it if the
    model is quantized."""
    if not (args.quant_method or args.to_gguf):
        yield result
        return
    plain = result.with_name(f"{result.name}.unquantized")
    if dist.get_rank() == 0:
        shutil.rmtree(plain, ignore_errors=True)  # files of a killed export
        plain.mkdir()
    try:
        yield plain
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(plain, ignore_errors=True)


def quantization_with_heads(trunk: HfModel, heads: Heads) -> dict[str, Any]:
    """Return the change of config.json that excludes new heads from the quantization of their trunk."""
    if not heads.layers:
        return {}
    config = {**trunk.config, **trunk.family.config_with(trunk.config, heads)}
    quantization = with_heads_kept(config["quantization_config"], trunk.family, config, keeps_block=True)
    return {"quantization_config": quantization}


@contextmanager
def _streamed_layers(trunk: HfModel | None, dtype: torch.dtype) -> Iterator[Iterable[Piece]]:
    """Yield this rank's pieces of the decoder layers that the chunks do not have; none without a streamed trunk."""
    if trunk is None:
        yield ()
        return
    with DecoderLayers(trunk.directory, trunk.family, trunk.config) as layers:
        yield layers.pieces(dtype)


def to_mcore(args: ExportArgs, mesh: Mesh) -> None:
    """Write `checkpoint-0` and `source/`, in the format of a run, from a Hugging Face model.

    Raises:
        UserError: the model cannot be read, has heads that its config.json does not declare, or --output_dir cannot be
            written; nothing is written.
    """
    hf_model = resolve(args.model)
    check_agreement({"commit of --model": hf_model.identity})
    graft_from = _resolve_graft(args)
    heads = _heads_of_result(args, hf_model.heads, graft_from)
    declared = hf_model.config.get("dtype") or hf_model.config.get("torch_dtype")
    dtype = args.torch_dtype or declared or "bfloat16"
    state = {"mtp_num_layers": heads.layers, "torch_dtype": dtype}
    mtp_init: MtpInit = "checkpoint"
    if graft_from:
        mtp_init = "graft"
    output_dir = Path(args.output_dir)
    with _whole_or_absent(output_dir) as writing:
        chunks, report = open_model(
            hf_model,
            mesh,
            dtype=getattr(torch, dtype),
            heads=heads,
            mtp_init=mtp_init,
            graft_from=graft_from,
        )
        _check_no_head_is_forgotten(args, hf_model, heads, report)
        logger.info("%s", report.over_all_ranks())
        if dist.get_rank() == 0:
            write_source(hf_model, writing, heads, graft_from)
        hint = "free disk space or fix the disk, then run the same command again"
        Checkpointer(writing, mesh, chunks, None, state, hint=hint).save(0)
    family = hf_model.family.name
    logger.info("wrote %s: %s with %d MTP layers, from %s", output_dir, family, heads.layers, hf_model.directory)


def _measured_run(args: ExportArgs, checkpoint: Path) -> Path | None:
    """Return the run if the acceptance.json at its end describes the heads of this export; otherwise None."""
    is_last = checkpoint.name == run_checkpoints(checkpoint.parent)[-1].name
    if not is_last or args.mtp != "keep" or args.mtp_graft_from or args.draft_vocab is not None:
        return None
    return checkpoint.parent


def _check_no_head_is_forgotten(args: ExportArgs, hf_model: HfModel, heads: Heads, report: WeightsReport) -> None:
    """Check that no heads of the model are lost, unless --mtp strip removes them.

    Raises:
        UserError: the files contain heads that config.json does not declare.
    """
    if heads.layers or args.mtp == "strip":
        return
    if forgotten := mtp_keys(report.dropped, hf_model.family, hf_model.config):
        raise UserError(
            f"--model {args.model} has {len(forgotten)} MTP tensors, but its config.json declares no MTP layer",
            f"set {depth_key(hf_model.config)} in config.json to keep them, or add --mtp strip to remove them",
        )


def _resolve_graft(args: ExportArgs) -> HfModel | None:
    """Return the model whose heads are grafted; None without --mtp_graft_from."""
    if not args.mtp_graft_from:
        return None
    return resolve(args.mtp_graft_from)


def _heads_of_result(args: ExportArgs, own: Heads, graft_from: HfModel | None) -> Heads:
    """Return the MTP heads of the result: the heads of the run (`own`), of another model, or none."""
    if args.mtp == "strip":
        return Heads()
    if graft_from:
        return graft_from.heads
    return own


def _lora_of(args: ExportArgs, state: Mapping[str, Any]) -> Lora | None:
    """Return the checkpoint's adapters; None without adapters.

    If heads are grafted, adapters of heads are not included.
    """
    if state.get("lora") is None:
        return None
    lora = Lora.from_json(state["lora"])
    if args.mtp_graft_from:
        return replace(lora, heads="frozen")
    return lora


def frozen_trunk_of(args: ExportArgs, state: Mapping[str, Any]) -> HfModel | None:
    """Return the model from which an export reads the frozen trunk of a run; None if it reads the checkpoint only.
    Collective.

    The model is required if the trunk was streamed (--stream_trunk), or if the export keeps a quantized trunk.

    Args:
        state: the checkpoint's state.

    Raises:
        UserError: the model is not found, or its weights are not those of the run.
    """
    if state.get("base") is None or state.get("lora") is not None:
        return None
    if args.dequantize and not state.get("streams_trunk", True):
        return None
    base = AdapterBase(**state["base"])
    try:
        model = resolve(base.model)
    except UserError as error:
        hint = "restore the directory: a run with --stream_trunk does not store decoder layers"
        if state.get("quantized_trunk"):
            hint = "restore the directory: the export keeps the files of the quantized trunk"
        raise UserError(error.problem, hint) from None
    if shared_digest_of(model.directory) != base.sha256:
        run_words = "the run"
        if state.get("streams_trunk", True):
            run_words = "the run with --stream_trunk"
        raise UserError(
            f"{base.model} has other weights than when {run_words} started",
            "restore the weights: the heads were trained for them",
        )
    return model


def quantized_trunk_of(args: ExportArgs, state: Mapping[str, Any], trunk: HfModel | None) -> HfModel | None:
    """Return the model whose quantized trunk the export keeps; None if it writes the trunk itself.

    Args:
        state: the checkpoint's state.
        trunk: result of `frozen_trunk_of`.

    Raises:
        UserError: an option does not apply to the trunk of the run.
    """
    if not state.get("quantized_trunk", False):
        if args.dequantize:
            raise UserError("--dequantize does not apply: the trunk of the run is not quantized", "remove it")
        return None
    if args.dequantize:
        return None
    if args.quant_method:
        raise UserError(
            f"--quant_method {args.quant_method} does not apply to the quantized trunk, whose files are kept",
            "remove it, or add --dequantize true",
        )
    if args.torch_dtype:
        raise UserError(
            f"--torch_dtype {args.torch_dtype} does not apply to the quantized trunk, whose files are kept",
            "remove it, or add --dequantize true",
        )
    return trunk


def _copy_quantized_trunk(trunk: HfModel, writing: Path) -> dict[str, Entry]:
    """Copy the files of a quantized trunk on the first rank, and return the copied tensors on all ranks. Collective."""
    copied: list[Any] = [None]
    if dist.get_rank() == 0:
        copied = [copy_trunk(trunk.directory, writing, trunk.family, trunk.config)]
    dist.broadcast_object_list(copied)
    return copied[0]


def _open_checkpoint(
    mesh: Mesh,
    checkpoint: Path,
    hf_model: HfModel,
    heads: Heads,
    lora: Lora | None,
    graft_from: HfModel | None,
    dtype: torch.dtype,
    streams_trunk: bool,
) -> list[GPTModel]:
    """Load the checkpoint's model on this rank, with the heads of another model if given; without decoder layers if its
    trunk was streamed."""
    chunks = build_hf_model(hf_model, mesh, dtype=dtype, heads=heads, streams_trunk=streams_trunk)
    if lora:
        add_adapters(chunks, lora, hf_model.family.rows(hf_model.config, heads.layers))
    load_checkpoint(checkpoint, mesh, chunks, with_heads=graft_from is None)
    if graft_from:
        graft_heads(chunks, graft_from.directory, hf_model.family, hf_model.config)
    return chunks


def _cast(dtypes: Mapping[str, str], hf_model: HfModel, heads: Heads, dtype: str) -> dict[str, str]:
    """Return the dtype in which each tensor is written.

    This is `dtype`, except for float32 tensors of 16-bit models, which remain float32.
    """
    cast = dict.fromkeys(dtypes, dtype)
    if dtype == "float32":
        return cast
    rows = hf_model.family.rows(hf_model.config, heads.layers)
    exact = shapes_of(row for row in rows if row.is_exact)
    return cast | {key: own for key, own in dtypes.items() if key in exact}


@contextmanager
def _whole_or_absent(output_dir: Path) -> Iterator[Path]:
    """Yield a directory to write to. At the end of the context it is renamed to the result; on failure it is removed.

    The directory is `.NAME.writing` next to the result, and is locked against other exports. Links are followed. The
    first rank creates, renames and deletes it.

    Raises:
        UserError: another export is writing there, or the directory cannot be renamed.
    """
    result = output_dir.resolve()
    place = result.with_name(f".{result.name}.writing")
    writing = place / result.name
    if dist.get_rank() > 0:
        yield writing
        return
    with only_run_in(output_dir, place):
        try:
            with _named(output_dir):
                shutil.rmtree(writing, ignore_errors=True)  # files of a killed export
                writing.mkdir()
                if result.exists():
                    result.rmdir()  # must be empty and not a mount point
            yield writing
            with _named(output_dir):
                fsync_tree(writing)
                writing.rename(result)
                sync(result.parent)
        finally:
            shutil.rmtree(writing, ignore_errors=True)


@contextmanager
def _named(output_dir: Path) -> Iterator[None]:
    """Convert errors of the file system in this context to errors that name the option.

    Raises:
        UserError: the file system reported an error.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be created: {error.strerror}",
            "fix it, or use a new directory",
        ) from None


def _copy_small_files(
    args: ExportArgs, hf_model: HfModel, heads: Heads, writing: Path, quantized_trunk: HfModel | None
) -> None:
    """Copy the small files of the source model, such as the tokenizer, and write config.json with the export's heads
    and dtype, and with the quantization of a kept trunk.
    """
    for path in hf_model.directory.iterdir():
        if path.name not in ("config.json", TENSORS_FILE, CARRIED_FILE, TOKEN_MAP_FILE):
            shutil.copy2(path, writing / path.name)
    if heads.draft_vocab:
        torch.save(list(heads.draft_vocab), writing / TOKEN_MAP_FILE)
    changes = hf_model.family.config_with(hf_model.config, heads)
    if args.torch_dtype:
        changes |= dtype_change(hf_model.config, args.torch_dtype)
    config_from = hf_model.directory
    if quantized_trunk:
        config_from = quantized_trunk.directory
        changes |= quantization_with_heads(quantized_trunk, heads)
    for line in write_patched(config_from, writing, changes):
        logger.info("config.json: %s", line)


def _audit(directory: Path, hf_model: HfModel, source_keys: Iterable[str]) -> None:
    """Compare the export with its config.json and with the source model.

    Args:
        source_keys: tensors of the source model.

    Raises:
        UserError: the export differs from its config.json or from the source model.
    """

    def is_mtp(key: str) -> bool:
        return hf_model.family.is_mtp(hf_model.config, key)

    problems = audit_hf(directory, hf_model.family)
    problems += quantized_head_problems(replace(hf_model, directory=directory, config=read_config(directory)))
    trunk = {key for key in source_keys if not is_mtp(key) and not hf_model.family.is_derived(key)}
    written = {key for key in describe(directory) if not is_mtp(key)}
    problems += [f"{key} of the source model was not written" for key in sorted(trunk - written)]
    problems += [f"{key} is not in the source model" for key in sorted(written - trunk)]
    if problems:
        lines = "\n  ".join(some(problems))
        raise UserError(f"the export does not match its config.json and was removed:\n  {lines}", "please report this")
