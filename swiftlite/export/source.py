"""Read what an export converts: a checkpoint of a run, and the models that it refers to."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.files import AdapterBase
from swiftlite.bridge.layers import DecoderLayers
from swiftlite.bridge.placement import Piece
from swiftlite.export import adapter
from swiftlite.export.draft_vocab import restrict_heads
from swiftlite.export.fp8_source import fp8_model_of
from swiftlite.export.provenance import Provenance, provenance_of
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.plan.trunk import Trunk
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from swiftlite.train.checkpoint.checkpointer import resolve_checkpoint
from swiftlite.train.checkpoint.source import check_source
from swiftlite.train.checkpoint.state import CheckpointState


@dataclass(frozen=True)
class KeptTrunk:
    """The part of a frozen trunk that the export takes from the model that the run started from.

    Attributes:
        layers_from: the model that has the decoder layers, if the checkpoint lacks them.
        files_from: the quantized model whose files the export keeps instead of writing the trunk.
    """

    layers_from: HfModel | None = None
    files_from: HfModel | None = None

    @contextmanager
    def pieces(self, dtype: torch.dtype) -> Iterator[Iterable[Piece]]:
        """Yield this rank's pieces of the decoder layers that the checkpoint lacks, and that no kept file has."""
        if self.layers_from is None or self.files_from:
            yield ()
            return
        model = self.layers_from
        with DecoderLayers(model.directory, model.family, model.config) as layers:
            yield layers.pieces(dtype)


@dataclass(frozen=True)
class RunSource:
    """A checkpoint of a run, with everything that an export of it reads.

    Attributes:
        hf_model: configuration, tokenizer and other small files of the model that the run started from, which the run
            has copied to its `source`.
        heads: heads of the result.
        graft_from: the model whose heads replace those of the checkpoint, if any.
        lora: adapters of the checkpoint, if any.
        fp8_model: the FP8 model whose layout the export has, if any.
        provenance: model and data of the run, for the model card; None without --push_to_hub.
        measured_run: directory of the run, if its acceptance.json describes the exported heads.
    """

    checkpoint: Path
    state: CheckpointState
    hf_model: HfModel
    heads: Heads
    graft_from: HfModel | None
    lora: Lora | None
    trunk: KeptTrunk
    fp8_model: HfModel | None
    provenance: Provenance | None
    measured_run: Path | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the checkpoint's weights."""
        return getattr(torch, self.state.torch_dtype)


def read_run(args: ExportArgs) -> RunSource:
    """Read the checkpoint that --model names, except its tensors. Collective.

    Raises:
        UserError: there is no checkpoint, an option does not apply to it, or a model that it refers to is missing.
    """
    checkpoint = resolve_checkpoint(Path(args.model))
    run = checkpoint.parent
    check_source(run)
    provenance = None
    if args.push_to_hub:
        provenance = provenance_of(checkpoint)
    hf_model = resolve(run / "source")
    graft_from = resolve_graft(args)
    state = CheckpointState.read(checkpoint)
    if state.images:
        hf_model = hf_model.with_images()
    # `source` has the config.json of the base model; its run can have another number of heads.
    heads = heads_of_result(args, replace(hf_model.heads, layers=state.mtp_num_layers), graft_from)
    heads = restrict_heads(args, run, hf_model, heads)
    lora = state.lora
    if lora and graft_from:  # no adapters are added to grafted heads: those of the checkpoint belong to other heads
        lora = replace(lora, heads="frozen")
    if not args.merge_lora:
        adapter.check_can_be_written(checkpoint, lora, hf_model, heads)
    return RunSource(
        checkpoint=checkpoint,
        state=state,
        hf_model=hf_model,
        heads=heads,
        graft_from=graft_from,
        lora=lora,
        trunk=_kept_trunk(args, state),
        fp8_model=fp8_model_of(args),
        provenance=provenance,
        measured_run=_measured_run(args, checkpoint),
    )


def resolve_graft(args: ExportArgs) -> HfModel | None:
    """Return the model whose heads are grafted; None without --mtp_graft_from."""
    if not args.mtp_graft_from:
        return None
    return resolve(args.mtp_graft_from)


def heads_of_result(args: ExportArgs, own: Heads, graft_from: HfModel | None) -> Heads:
    """Return the MTP heads of the result: the heads of the source (`own`), of another model, or none."""
    if args.mtp == "strip":
        return Heads()
    if graft_from:
        return graft_from.heads
    return own


def _kept_trunk(args: ExportArgs, state: CheckpointState) -> KeptTrunk:
    """Return what the export takes from the model that the run started from. Collective.

    Raises:
        UserError: an option does not apply to the trunk of the run, or the model is not found or has changed.
    """
    _check_quantized_trunk(args, state)
    trunk = state.trunk
    if args.dequantize:
        trunk = replace(trunk, keeps_files=False)
    if state.base is None or not trunk.is_in_base:
        return KeptTrunk()
    model = _unchanged_base(state.base, state.trunk)
    return KeptTrunk(None if trunk.holds_layers else model, model if trunk.keeps_files else None)


def _unchanged_base(base: AdapterBase, trunk: Trunk) -> HfModel:
    """Return the model that a run with a frozen trunk started from.

    Raises:
        UserError: the model is not found, or its weights are not those of the run.
    """
    try:
        model = resolve(base.model)
    except UserError as error:
        raise UserError(error.problem, trunk.lost_base_hint) from None
    if shared_digest_of(model.directory) != base.sha256:
        raise UserError(
            f"{base.model} has other weights than when {trunk.run_words} started",
            "restore the weights: the heads were trained for them",
        )
    return model


def _check_quantized_trunk(args: ExportArgs, state: CheckpointState) -> None:
    """Check that no option contradicts a quantized trunk, whose files are kept without --dequantize.

    Raises:
        UserError: an option does not apply.
    """
    if args.dequantize:
        if not state.trunk.keeps_files:
            raise UserError("--dequantize does not apply: the trunk of the run is not quantized", "remove it")
        return
    for flag, value in (("--quant_method", args.quant_method), ("--torch_dtype", args.torch_dtype)):
        if state.trunk.keeps_files and value:
            raise UserError(
                f"{flag} {value} does not apply to the quantized trunk, whose files are kept",
                "remove it, or add --dequantize true",
            )


def _measured_run(args: ExportArgs, checkpoint: Path) -> Path | None:
    """Return the run if the acceptance.json at its end describes the heads of this export; otherwise None."""
    is_measured = checkpoint.name == resolve_checkpoint(checkpoint.parent).name
    if not is_measured or args.mtp != "keep" or args.mtp_graft_from or args.draft_vocab is not None:
        return None
    return checkpoint.parent
