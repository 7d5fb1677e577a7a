"""Define the steps of an export; `run.py` chooses them and calls them in order, on all ranks."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.args.commands import ExportArgs
from swiftlite.args.fields import MtpInit
from swiftlite.base.draft_vocab import TOKEN_MAP_FILE
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, Heads, depth_key
from swiftlite.base.log import logger
from swiftlite.bridge.audit import audit_hf, mtp_keys
from swiftlite.bridge.carry import copy_trunk
from swiftlite.bridge.encoding.expert_stack import transposed_stacks
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.hf_config import DRAFT_FOLDER, dtype_change, patch, read_config, write_patched
from swiftlite.bridge.rows import shapes_of
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.tensors import describe, some
from swiftlite.bridge.transfer import WeightsReport, graft_heads
from swiftlite.engines.quantized_heads import quantized_head_problems
from swiftlite.engines.vllm.stock_draft import draft_folder, draft_problems, trunk_config, write_draft
from swiftlite.export import adapter
from swiftlite.export.calibrated import Calibrated, calibrated
from swiftlite.export.card import engines_that_draft, model_card, read_quality
from swiftlite.export.gate import check_quality
from swiftlite.export.gguf import export_gguf
from swiftlite.export.image_bounds import write_image_bounds
from swiftlite.export.quantization import matrices_of, quantize
from swiftlite.export.schemes import Scheme, scheme_of
from swiftlite.export.source import RunSource, heads_of_result, resolve_graft
from swiftlite.families.drafters import SERVED
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.families.serving import stock
from swiftlite.families.serving.quantized import with_heads_kept
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.lora import add_adapters, merge
from swiftlite.model.open import build_hf_model, open_model
from swiftlite.plan.quantization import CALIBRATED_METHODS
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.checkpointer import Checkpointer, load_checkpoint
from swiftlite.train.checkpoint.source import (
    CARRIED_FILE,
    TENSORS_FILE,
    carried_file,
    dtypes_of,
    source_tensors,
    with_heads_of,
    write_source,
)
from swiftlite.train.checkpoint.state import CheckpointState


@dataclass(frozen=True)
class Export:
    """One export: its options, what it reads, and the directories that its steps write.

    Attributes:
        source: a checkpoint of a run, or a Hugging Face model.
        plain: directory of the model before quantization or conversion to GGUF; `result` without such a step.
        result: directory that is renamed to --output_dir after the last step.
    """

    args: ExportArgs
    mesh: Mesh
    source: RunSource | HfModel
    plain: Path
    result: Path

    @property
    def run_source(self) -> RunSource:
        assert isinstance(self.source, RunSource)
        return self.source

    @property
    def model(self) -> HfModel:
        """The Hugging Face model, which `write_model` has written if the source is a run."""
        if isinstance(self.source, HfModel):
            return self.source
        return resolve(self.plain)

    @property
    def dtype(self) -> str:
        """Dtype of the computations with the model, and of the tensors of a checkpoint."""
        if isinstance(self.source, HfModel):
            return self.args.torch_dtype or _declared_dtype(self.source)
        return self.args.torch_dtype or self.source.state.torch_dtype


def write_model(export: Export) -> None:
    """Write the Hugging Face model of a run: the weights of its checkpoint, and the small files of its source.

    Raises:
        UserError: the checkpoint is damaged, or the audit of the result found a problem.
    """
    args, source, directory = export.args, export.run_source, export.plain
    chunks = _open_checkpoint(source, export.mesh)
    merge(chunks)
    copied: dict[str, Entry] | None = None
    if dist.get_rank() == 0:
        _write_small_files(export)
    if source.trunk.files_from:
        copied = _copy_quantized_trunk(source.trunk.files_from, directory)
    dist.barrier()  # the first rank has created the directory's files; other ranks write their slices into others
    tensors = _source_tensors(source)
    dtypes = dtypes_of(tensors)
    carried = None
    if copied is None:  # otherwise the copied files have the parts outside of the language model, too
        carried = carried_file(source.hf_model.directory)
    save = partial(
        save_hf,
        chunks,
        family=source.hf_model.family,
        hf_config=source.hf_model.config,
        dtypes=_written_dtypes(dtypes, source, args.torch_dtype),
        transposed=transposed_stacks({key: tensor["shape"] for key, tensor in tensors.items()}),
    )
    has_draft = _has_draft_folder(export)
    with source.trunk.pieces(source.dtype) as layers:
        save(
            out_dir=directory,
            max_shard_bytes=int(args.max_shard_size_gb * 1e9),
            carried=carried,
            layers=layers,
            trunk=copied,
            part="trunk" if has_draft else None,
        )
    if has_draft:
        save(out_dir=directory / DRAFT_FOLDER, part="heads", max_shard_bytes=sys.maxsize)  # one file
    if dist.get_rank() == 0:
        if has_draft:
            write_draft(directory, source.hf_model.family)
        _audit(directory, source.hf_model, dtypes)


def write_adapters(export: Export) -> None:
    """Write the adapters of a run in PEFT's format."""
    source = export.run_source
    assert source.lora is not None  # `adapter.check_can_be_written`
    assert source.state.base is not None
    chunks = _open_checkpoint(source, export.mesh)
    adapter.write(chunks, export.result, source.lora, source.state.base, source.hf_model, source.heads)


def write_quantized(export: Export) -> None:
    """Write a quantized copy of the model, and audit it.

    Raises:
        UserError: the model cannot be quantized, or the audit found a problem.
    """
    args, model = export.args, export.model
    if draft_folder(model):
        raise UserError(f"--quant_method does not support heads in {DRAFT_FOLDER}/", "quantize the run of the heads")
    if dist.get_rank() == 0 and _are_for_stock(model, model.heads):
        logger.warning("%s/ is not written: heads of quantized models require swiftlite's plugin in vLLM", DRAFT_FOLDER)
    matrices = matrices_of(model, args.quant_heads)
    scheme = scheme_of(args, {key: entry.shape for key, entry in matrices.items()})
    fp8_model = None
    if isinstance(export.source, RunSource):
        fp8_model = export.source.fp8_model
    with _calibrated(args, model, matrices, scheme, export.result) as calibrated_trunk:
        quantize(
            model,
            export.result,
            scheme,
            quant_heads=args.quant_heads,
            max_shard_bytes=int(args.max_shard_size_gb * 1e9),
            fp8_model=fp8_model,
            calibrated=calibrated_trunk,
        )
    if dist.get_rank() == 0:
        _audit(export.result, model, describe(model.directory))


def write_gguf(export: Export) -> None:
    """Write a GGUF file of the model, on the first rank.

    Raises:
        UserError: llama.cpp does not support the model, or a check of the result failed.
    """
    if dist.get_rank() == 0:
        file = export_gguf(export.args, export.model, export.result)
        logger.info("%s: %.2f GB", file.name, file.stat().st_size / 1e9)


def measure(export: Export) -> None:
    """Measure the result on held-out rows, on the first rank.

    Raises:
        UserError: the result does not meet a limit of its quality.
    """
    if dist.get_rank() == 0:
        unquantized = None
        if export.args.quant_method:
            unquantized = export.model
        check_quality(export.args, export.result, export.dtype, export.mesh, unquantized)


def write_card(export: Export) -> None:
    """Write the README.md of a model that is pushed to the hub, on the first rank."""
    args, source = export.args, export.run_source
    if dist.get_rank() > 0 or not args.push_to_hub or source.provenance is None:
        return
    quality: dict[str, Any] | None = None
    drafting_engines: list[str] = []
    gguf_file = ""
    if args.to_gguf:
        gguf_file = min(export.result.glob("*.gguf"), key=lambda path: len(path.name)).name  # not that of a drafter
    else:
        model = resolve(export.result)
        quality, drafting_engines = read_quality(model, args.quant_method), engines_that_draft(model)
    card = model_card(
        args.push_to_hub,
        source.provenance,
        source.heads,
        source.measured_run,
        quality,
        gguf_file,
        drafting_engines=drafting_engines,
        has_draft_folder=_has_draft_folder(export),
    )
    (export.result / "README.md").write_text(card, encoding="utf-8")


def write_checkpoint(export: Export) -> None:
    """Write `checkpoint-0` and `source/`, in the format of a run, from a Hugging Face model.

    Raises:
        UserError: the model has heads that its config.json does not declare, or the disk is full.
    """
    args, hf_model = export.args, export.model
    graft_from = resolve_graft(args)
    heads = heads_of_result(args, hf_model.heads, graft_from)
    mtp_init: MtpInit = "checkpoint"
    if graft_from:
        mtp_init = "graft"
    dtype = getattr(torch, export.dtype)
    chunks, report = open_model(
        hf_model, export.mesh, dtype=dtype, heads=heads, mtp_init=mtp_init, graft_from=graft_from
    )
    _check_no_head_is_forgotten(args, hf_model, heads, report)
    logger.info("%s", report.over_all_ranks())
    if dist.get_rank() == 0:
        write_source(hf_model, export.result, heads, graft_from)
    hint = "free disk space or fix the disk, then run the same command again"
    torch_dtype: Any = export.dtype
    state = CheckpointState(step=0, mtp_num_layers=heads.layers, torch_dtype=torch_dtype)
    Checkpointer(export.result, export.mesh, chunks, None, state, hint=hint).save(0)


def quantization_with_heads(trunk: HfModel, heads: Heads) -> dict[str, Any]:
    """Return the change of config.json that excludes new heads from the quantization of their trunk."""
    if not heads.layers:
        return {}
    config, _ = patch(trunk.config, trunk.family.config_with(trunk.config, heads))
    quantization = Quantization(config["quantization_config"])
    listed = with_heads_kept(quantization, trunk.family, config, keeps_block=True)
    return {"quantization_config": listed.content}


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


def _declared_dtype(model: HfModel) -> str:
    return model.config.get("dtype") or model.config.get("torch_dtype") or "bfloat16"


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


def _copy_quantized_trunk(trunk: HfModel, directory: Path) -> dict[str, Entry]:
    """Copy the files of a quantized trunk on the first rank, and return the copied tensors on all ranks. Collective."""
    copied: list[Any] = [None]
    if dist.get_rank() == 0:
        copied = [copy_trunk(trunk.directory, directory, trunk.family, trunk.config)]
    dist.broadcast_object_list(copied)
    return copied[0]


def _has_draft_folder(export: Export) -> bool:
    """Return whether the export has a folder from which vLLM drafts without swiftlite's plugin: its heads were trained
    for that, and no later step converts the model."""
    source = export.run_source
    is_converted = export.plain != export.result or source.trunk.files_from is not None
    return not is_converted and _are_for_stock(source.hf_model, source.heads)


def _are_for_stock(model: HfModel, heads: Heads) -> bool:
    """Return whether heads or another drafter were trained for a class that vLLM has without swiftlite's plugin."""
    if heads.kind != MTP:
        return heads.layers > 0 and heads.kind in SERVED
    is_single = heads.layers == 1 and not heads.draft_vocab
    return is_single and heads.drafting == stock.DRAFTING and not stock.why_not(model.family, model.config)


def _open_checkpoint(source: RunSource, mesh: Mesh) -> list[GPTModel]:
    """Load the checkpoint's model on this rank, with the heads of another model if given; without decoder layers
    if the run read them from files."""
    hf_model = source.hf_model
    chunks = build_hf_model(
        hf_model, mesh, dtype=source.dtype, heads=source.heads, holds_layers=source.state.trunk.holds_layers
    )
    if source.lora:
        add_adapters(chunks, source.lora, hf_model.family.rows(hf_model.config, source.heads.layers))
    load_checkpoint(source.checkpoint, mesh, chunks, with_heads=source.graft_from is None)
    if source.graft_from:
        graft_heads(chunks, source.graft_from.directory, hf_model.family, hf_model.config)
    return chunks


def _source_tensors(source: RunSource) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor of the model that the run started from, with grafted heads."""
    tensors = source_tensors(source.hf_model.directory)
    if source.graft_from:
        tensors = with_heads_of(source.hf_model, tensors, source.graft_from)
    return tensors


def _written_dtypes(dtypes: dict[str, str], source: RunSource, torch_dtype: str | None) -> dict[str, str]:
    """Return the dtype in which each tensor is written.

    With --torch_dtype, float32 tensors of 16-bit models remain float32, and integers remain integers.
    """
    if torch_dtype is None:
        return dtypes
    rows = source.hf_model.family.rows(source.hf_model.config, source.heads.layers)
    kept = shapes_of(row for row in rows if row.is_integer or (row.is_exact and torch_dtype != "float32"))
    return {key: own if key in kept else torch_dtype for key, own in dtypes.items()}


def _write_small_files(export: Export) -> None:
    """Copy the small files of the source model, such as the tokenizer, and write config.json with the export's heads
    and dtype, and with the quantization of a kept trunk.
    """
    args, source, directory = export.args, export.run_source, export.plain
    hf_model, heads, quantized = source.hf_model, source.heads, source.trunk.files_from
    for path in hf_model.directory.iterdir():
        if path.name not in ("config.json", TENSORS_FILE, CARRIED_FILE, TOKEN_MAP_FILE):
            shutil.copy2(path, directory / path.name)
    if heads.draft_vocab:
        torch.save(list(heads.draft_vocab), directory / TOKEN_MAP_FILE)
    changes = hf_model.family.config_with(hf_model.config, heads)
    if _has_draft_folder(export):
        changes |= trunk_config(hf_model.family, hf_model.config)
    if args.torch_dtype:
        changes |= dtype_change(hf_model.config, args.torch_dtype)
    config_from = hf_model.directory
    if quantized:
        config_from = quantized.directory
        changes |= quantization_with_heads(quantized, heads)
    for line in write_patched(config_from, directory, changes):
        logger.info("config.json: %s", line)
    write_image_bounds(source.checkpoint.parent, directory)


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
    written_model = replace(hf_model, directory=directory, config=read_config(directory))
    problems += quantized_head_problems(written_model) + draft_problems(written_model)
    trunk = {key for key in source_keys if not is_mtp(key) and not hf_model.family.is_derived(key)}
    written = {key for key in describe(directory) if not is_mtp(key)}
    problems += [f"{key} of the source model was not written" for key in sorted(trunk - written)]
    problems += [f"{key} is not in the source model" for key in sorted(written - trunk)]
    if problems:
        lines = "\n  ".join(some(problems))
        raise UserError(f"the export does not match its config.json and was removed:\n  {lines}", "please report this")
