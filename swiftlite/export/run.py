"""Run `swiftlite export`: convert a run or checkpoint to an audited Hugging Face model, or back.

An export is a list of steps over one source. A new output is a new step in `steps.py`, and a line in `steps_of`.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from swiftlite.args.commands import ExportArgs
from swiftlite.base.atomic import fsync_tree, sync
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.base.log import logger
from swiftlite.export.source import RunSource, read_run
from swiftlite.export.steps import (
    Export,
    measure,
    write_adapters,
    write_card,
    write_checkpoint,
    write_gguf,
    write_model,
    write_quantized,
)
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.hub.name import model_name
from swiftlite.hub.push import push
from swiftlite.plan.facts import reads_run
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.agreement import check_agreement
from swiftlite.runtime.distributed import session
from swiftlite.runtime.lock import only_run_in
from swiftlite.runtime.mesh import Mesh

Step = Callable[[Export], None]


def run(args: ExportArgs) -> None:
    """Export, and push the result to the hub with --push_to_hub."""
    with session(layout_of(args), timeout_minutes=args.distributed_timeout_minutes) as mesh:
        convert(args, mesh)
        is_first_rank = dist.get_rank() == 0
    if is_first_rank and args.push_to_hub:
        name = model_name(f"{args.push_to_hub}@main")
        assert name is not None  # checked by the rules
        push(Path(args.output_dir), name.at(""), is_private=args.hub_private_repo)


def convert(args: ExportArgs, mesh: Mesh) -> None:
    """Convert in the direction that the options select. Collective.

    The result is either complete or absent, even if the process is killed.

    Raises:
        UserError: --model cannot be read, an option does not apply to it, --output_dir cannot be created, or a check of
            the result found a problem; nothing is written.
    """
    source = read_source(args)
    output_dir = Path(args.output_dir)
    with _whole_or_absent(output_dir) as result, _plain_directory(args, source, result) as plain:
        export = Export(args, mesh, source, plain, result)
        for step in steps_of(args, source):
            step(export)
    logger.info("wrote %s: %s", output_dir, _describe(args, source))


def read_source(args: ExportArgs) -> RunSource | HfModel:
    """Return what is exported. Collective.

    Raises:
        UserError: --model cannot be read, or an option does not apply to it.
    """
    if reads_run(args):
        return read_run(args)
    hf_model = resolve(args.model)
    check_agreement({"commit of --model": hf_model.identity})
    return hf_model


def steps_of(args: ExportArgs, source: RunSource | HfModel) -> list[Step]:
    """Return the steps of an export, in order.

    `rules/export.py` refuses what has no place here: adapters with limits or --push_to_hub, and --push_to_hub of a
    model that is not from a run.
    """
    if args.to_mcore:
        return [write_checkpoint]
    if not args.merge_lora:
        return [write_adapters]
    steps: list[Step] = []
    if isinstance(source, RunSource):
        steps.append(write_model)
    if args.to_gguf:
        steps.append(write_gguf)  # instead of `measure`, it checks its limit with llama.cpp
    elif args.quant_method:
        steps += [write_quantized, measure]
    else:
        steps.append(measure)
    if args.push_to_hub:
        steps.append(write_card)
    return steps


def _describe(args: ExportArgs, source: RunSource | HfModel) -> str:
    """Return what was written, and from what."""
    if isinstance(source, HfModel):
        return f"{source.family.name}, from {source.directory}"
    if not args.merge_lora and source.state.base:
        return f"adapters of {source.state.base.model}, from {source.checkpoint}"
    heads = source.heads
    drafting = f"{heads.layers} MTP layers" if heads.kind == MTP else heads.name
    return f"{source.hf_model.family.name} with {drafting}, from {source.checkpoint}"


@contextmanager
def _plain_directory(args: ExportArgs, source: RunSource | HfModel, result: Path) -> Iterator[Path]:
    """Yield the directory for the model of a run: `result`, or a temporary directory next to it if a later step
    converts the model."""
    is_converted = bool(args.quant_method or args.to_gguf)
    if isinstance(source, HfModel) or not is_converted:
        yield result
        return
    # Inside of the hidden directory of the export, so that it is never published.
    plain = result.with_name(f"{result.name}.plain")
    if dist.get_rank() == 0:
        shutil.rmtree(plain, ignore_errors=True)  # files of a killed export
        plain.mkdir()
    try:
        yield plain
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(plain, ignore_errors=True)


@contextmanager
def _whole_or_absent(output_dir: Path) -> Iterator[Path]:
    """Yield a directory to write to. At the end of the context it is renamed to the result; on failure it is removed.

    The directory is `.NAME.writing` next to the result, and is locked against other exports. Links are followed. The
    first rank creates, renames and deletes it.

    Raises:
        UserError: another export is writing there, or the directory cannot be renamed.
    """
    final = output_dir.resolve()
    place = final.with_name(f".{final.name}.writing")
    writing = place / final.name
    if dist.get_rank() > 0:
        yield writing
        return
    with only_run_in(output_dir, place):
        try:
            with _named(output_dir):
                shutil.rmtree(writing, ignore_errors=True)  # files of a killed export
                writing.mkdir()
                if final.exists():
                    final.rmdir()  # now, because only an empty directory that is not a mount point can be replaced
            yield writing
            with _named(output_dir):
                fsync_tree(writing)
                writing.rename(final)
                sync(final.parent)
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
