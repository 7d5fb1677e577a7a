"""`swiftlite export`: a run or checkpoint to a Hugging Face model, audited before it appears; or the other way."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.args.commands import ExportArgs
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.hf_config import dtype_change, read_config, write_patched
from swiftlite.bridge.tensors import describe
from swiftlite.bridge.transfer import graft_heads, load_hf, save_hf
from swiftlite.errors import UserError
from swiftlite.evaluate.gate import check_acceptance
from swiftlite.families import index
from swiftlite.families.family import Family
from swiftlite.heads import Heads
from swiftlite.log import logger
from swiftlite.model.build import build_model
from swiftlite.plan.facts import model_of_run
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint import Checkpointer, load_checkpoint, read_state, resolve_checkpoint
from swiftlite.train.source import TENSORS_FILE, describe_heads, source_dtypes, write_source


def run(args: ExportArgs) -> None:
    """Convert in one direction; the result is complete or not there."""
    with session(layout_of(args)) as mesh:
        if args.to_hf:
            to_hf(args, mesh)
        else:
            to_mcore(args, mesh)


def to_hf(args: ExportArgs, mesh: Mesh) -> None:
    """Write the checkpoint's weights with the configuration and tokenizer of the model that the run started from.

    Raises:
        UserError: there is no checkpoint, the audit of what was written found a problem, or its heads fall short of
            what was asked for (nothing is left behind).
    """
    checkpoint = resolve_checkpoint(Path(args.model))
    source, output_dir = checkpoint.parent / "source", Path(args.output_dir)
    hf_config = read_config(source)
    family = index.get(hf_config, source)
    state = read_state(checkpoint)
    heads = replace(Heads.from_config(hf_config), layers=state["mtp_num_layers"])
    if args.mtp_graft_from:
        heads = Heads.from_config(read_config(Path(args.mtp_graft_from)))
    if args.mtp == "strip":
        heads = Heads()
    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=getattr(torch, state["torch_dtype"]),
        heads=heads,
    )
    load_checkpoint(checkpoint, model, with_heads=not args.mtp_graft_from)
    if args.mtp_graft_from:
        graft_heads(model, args.mtp_graft_from, family, hf_config)

    writing = output_dir.with_name(f".{output_dir.name}.writing")
    is_first = dist.get_rank() == 0
    changes = heads.config_change(hf_config)
    if args.torch_dtype:
        changes |= dtype_change(hf_config, args.torch_dtype)
    dtypes = source_dtypes(source)
    if args.mtp_graft_from:
        grafted = describe_heads(args.mtp_graft_from, family, hf_config)
        dtypes |= {key: tensor["dtype"] for key, tensor in grafted.items()}
    if is_first:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        for path in source.iterdir():
            if path.name not in ("config.json", TENSORS_FILE):
                shutil.copy2(path, writing / path.name)
        for line in write_patched(source, writing, changes):
            logger.info("config.json: %s", line)
    dist.barrier()
    try:
        save_hf(
            model,
            writing,
            family,
            hf_config,
            dtypes=dict.fromkeys(dtypes, args.torch_dtype) if args.torch_dtype else dtypes,
            max_shard_bytes=int(args.max_shard_size_gb * 1e9),
        )
        if is_first:
            _audit(writing, family, hf_config, dtypes)
            if args.min_acceptance is not None or args.max_regression is not None:
                check_acceptance(
                    writing,
                    Path(args.baseline) if args.baseline else model_of_run(Path(args.model)),
                    args.val_dataset,
                    min_acceptance=args.min_acceptance,
                    max_regression=args.max_regression,
                    force=args.force,
                    torch_dtype=args.torch_dtype or state["torch_dtype"],
                    mesh=mesh,
                )
            output_dir.parent.mkdir(parents=True, exist_ok=True)
            if output_dir.exists():
                output_dir.rmdir()  # only an empty one got past the option check
            writing.rename(output_dir)
    finally:
        if is_first:
            shutil.rmtree(writing, ignore_errors=True)
    logger.info("wrote %s: %s with %d MTP layers, from %s", output_dir, family.name, heads.layers, checkpoint)


def _audit(directory: Path, family: Family, hf_config: Mapping[str, Any], source_tensors: Mapping[str, Any]) -> None:
    problems = audit_hf(directory, family)
    trunk = {key for key in source_tensors if not family.is_mtp(hf_config, key) and not family.is_derived(key)}
    written = {key for key in describe(directory) if not family.is_mtp(hf_config, key)}
    problems += [f"{key} of the source model was not written" for key in sorted(trunk - written)]
    problems += [f"{key} is not in the source model" for key in sorted(written - trunk)]
    if problems:
        lines = "\n  ".join(problems)
        raise UserError(
            f"the export is not what its config promises, so it was removed:\n  {lines}", "please report this"
        )


def to_mcore(args: ExportArgs, mesh: Mesh) -> None:
    """Write `checkpoint-0` and `source/`, as a run has them, from a Hugging Face model."""
    hf_dir, output_dir = Path(args.model), Path(args.output_dir)
    hf_config = read_config(hf_dir)
    family = index.get(hf_config, hf_dir)
    heads = Heads.from_config(read_config(Path(args.mtp_graft_from)) if args.mtp_graft_from else hf_config)
    if args.mtp == "strip":
        heads = Heads()
    dtype = args.torch_dtype or hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=getattr(torch, dtype),
        heads=heads,
    )
    mtp_init = "graft" if args.mtp_graft_from else "checkpoint"
    report = load_hf(model, hf_dir, family, hf_config, mtp_init=mtp_init, graft_from=args.mtp_graft_from)
    logger.info("%s", report.over_all_ranks())
    if dist.get_rank() == 0:
        write_source(hf_dir, output_dir, family, hf_config, heads, args.mtp_graft_from)
    Checkpointer(output_dir, model, None, {"mtp_num_layers": heads.layers, "torch_dtype": dtype}).save(0)
