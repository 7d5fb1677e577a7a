"""Cache the hidden states of a frozen trunk (`--cache_trunk_states`).

With `--mtp_mode heads_only`, the trunk produces the same hidden states for a micro-batch in every epoch. After the
first epoch, these states are read from files instead of being computed again. So are the outputs of a tower, which
heads read as well.

The directory of the cache contains one safetensors file per micro-batch (and per part of a row, if ranks share rows).
The name of a file is the sha256 of the micro-batch's tokens, labels and other inputs of the trunk. Other runs over the
same rows can read the files, also with another order of rows, another loss or another number of drafts. `cache.json`
describes the model and the settings that the states depend on. The stored states are bitwise identical to computed
states, so the results of training do not change.
"""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from safetensors import SafetensorError
from safetensors.torch import load, save

from swiftlite.base.atomic import atomic_write, check_writable, delete_incomplete
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger
from swiftlite.bridge.hf_config import digest_of_trunk
from swiftlite.data.batch import AXES, ITEM, Batch, count_items
from swiftlite.data.dataset import Data
from swiftlite.data.sample import Sample, digest
from swiftlite.families.resolved import HfModel
from swiftlite.model.forward import on_this_rank
from swiftlite.model.gpt import GPTModel, TrunkOutput
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.loss.losses import TokenLoss
from swiftlite.model.ranks import all_reduce_max
from swiftlite.model.stage_states import StageStates
from swiftlite.model.trunk import TrunkLayers
from swiftlite.plan.layout import ParallelLayout
from swiftlite.plan.run import Plan
from swiftlite.plan.trainable import is_head_parameter
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches, Collated
from swiftlite.train.metrics.run_report import hash_tensor
from swiftlite.train.train_state import TrainState

FLAG = "--cache_trunk_states"
MANIFEST = "cache.json"
_ANOTHER_DIRECTORY = "use another directory; or delete this one, if nothing else needs it"
LOSS_BYTES = 4 + 8
"""Bytes per token for the trunk's loss (float32) and prediction (int64), see `TokenLoss`."""
HEADER_BYTES = 344
"""Maximum header size of a file: names, dtypes and shapes of its tensors, and their sha256."""
TOWER_HEADER_BYTES = 112
"""Maximum additional header size of a file with outputs of a tower."""


@dataclass(frozen=True)
class HiddenStateCache:
    """The cache of a run (a `TrunkSource`), created by `open_hidden_state_cache`.

    Attributes:
        directory: directory of the files.
        mesh: the ranks of the run, which process their micro-batches at the same time.
        trunk: the source of outputs that are not in the cache.
    """

    directory: Path
    mesh: Mesh
    trunk: TrunkLayers

    def output(self, model: torch.nn.Module, batch: Batch) -> TrunkOutput:
        """Return the trunk's output for a micro-batch. Collective over all ranks.

        If the output is not in the cache, it is computed and added.

        Raises:
            UserError: a file is damaged, missing without decoder layers that compute it, or cannot be written.
        """
        bare = cast(GPTModel, unwrap_model(model))
        path = self._path(batch)
        # Ranks share layers, so either all ranks compute or none does.
        if not all_reduce_max(int(not path.exists()), self.mesh):
            return _read(path, bare.drafting.takes_before_norm, self.mesh.device.torch_device)
        output = self.trunk.output(model, batch)
        if output is None:
            output = bare.trunk_output(ModelInputs.of(batch), batch.labels_KBS[0])
        self._add(path, output)
        return output

    def fill(self, batches: Batches, data: Data) -> None:
        """Write the missing files with outputs that steps cannot compute; collective.

        Files are written after each group of micro-batches, so a run that is killed loses at most one group.

        Raises:
            UserError: a layer cannot be read, or a file cannot be written.
        """
        for streamed in self.trunk.outputs_before_steps(self._missing(batches, data)):
            self._add(self._path(streamed.batch), streamed.output)
        dist.barrier()

    def _missing(self, batches: Batches, data: Data) -> Iterator[Batch]:
        """Yield the micro-batches that any rank has no file for. Nothing is computed unless they are read."""
        num_ranks = self.mesh.dp.size()
        rows = _distinct_rows(batches, data)
        rows += [[]] * (-len(rows) % num_ranks)  # padding, because all ranks run the layers together
        micro_batches = Collated(batches.collate, rows[self.mesh.dp.rank() :: num_ranks])
        for batch in on_this_rank(micro_batches, self.mesh):
            if all_reduce_max(int(not self._path(batch).exists()), self.mesh):
                yield batch

    def _add(self, path: Path, output: TrunkOutput) -> None:
        """Write the output for a micro-batch, unless its file exists."""
        # Without sequence parallelism all tensor-parallel ranks hold the same states.
        writes = self.mesh.layout.sequence_parallel or self.mesh.tp.rank() == 0
        if writes and not path.exists():
            _write(path, output)

    def _path(self, batch: Batch) -> Path:
        return self.directory / f"{self._name(batch)}.safetensors"

    def _name(self, batch: Batch) -> str:
        """Return the name of the file without its suffix: sha256 of the trunk's inputs, the labels, and this rank's
        part of the row.
        """
        tp_rank = 0
        if self.mesh.layout.sequence_parallel:
            tp_rank = self.mesh.tp.rank()
        batch = batch.on_host or batch  # copying from the GPU would wait for queued kernels
        given = [batch.tokens_KBS[0], batch.labels_KBS[0], batch.position_ids_BS]
        if batch.cu_seqlens is not None:
            given.append(batch.cu_seqlens)
        given += [batch.extras[name] for name in (ITEM, AXES) if name in batch.extras]
        sha = hashlib.sha256()
        if batch.items:
            sha.update(batch.items.identity)
        for tensor in given:
            sha.update(f"{tuple(tensor.shape)} ".encode() + _bytes_of(tensor))
        return f"{sha.hexdigest()[:32]}-cp{self.mesh.cp.rank()}-tp{tp_rank}"


def open_hidden_state_cache(
    directory: Path,
    mesh: Mesh,
    batches: Batches,
    hf_model: HfModel,
    train_state: TrainState,
    data: Data,
    torch_dtype: str,
) -> HiddenStateCache:
    """Open the cache in a directory, which is created if it does not exist; collective.

    Raises:
        UserError: the directory holds other files, or states of another model or of other rows; the disk is too small;
            or the machines do not share the directory.
    """
    manifest = _manifest(batches.plan, hf_model.config, train_state, data, torch_dtype)
    if dist.get_rank() == 0:
        check_directory(directory)
        _check_is_same(directory, manifest)
        delete_incomplete(directory)
        _check_disk(directory, batches, train_state, data)
        atomic_write(directory / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    dist.barrier()
    if not _has_manifest(directory, manifest):
        raise UserError(f"{FLAG} {directory} is not shared by every machine", "use a directory on a shared file system")
    return HiddenStateCache(directory, mesh, train_state.trunk)


def _manifest(
    plan: Plan, hf_config: Mapping[str, Any], train_state: TrainState, data: Data, torch_dtype: str
) -> dict[str, str]:
    """Return everything that the stored states depend on, by name. Error messages contain the names. Collective."""
    mine = {name: value for name, value in train_state.hashes.items() if not is_head_parameter(name)}
    mine |= train_state.trunk.hashes(hash_tensor)
    trunks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(trunks, _sha256(mine))
    rows = sorted(digest([sample]) for sample in (*data.train, *data.val))
    layout = plan.layout
    states = "after the norm"
    if train_state.chunks[0].drafting.takes_before_norm:
        states = "before and after the norm"
    return {
        "trunk's weights": _sha256(sorted(set(trunks))),
        "config.json": digest_of_trunk(hf_config),
        "rows": _sha256(rows),
        "torch_dtype": torch_dtype,
        "kernels": ", ".join(plan.kernels.described.values()),
        "packing": f"{plan.packing} {plan.packing_length}",
        "layout": f"tensor {layout.tensor_model_parallel_size} sequence {layout.sequence_parallel} "
        f"context {layout.context_parallel_size}",
        "states": states,
    }


def _has_manifest(directory: Path, manifest: Mapping[str, str]) -> bool:
    """Return whether a directory has exactly this manifest.

    The check finds ranks on other machines for which the same path is a local directory with states of another model.
    """
    try:
        return read_json(directory / MANIFEST) == manifest
    except (OSError, ValueError):
        return False


def _check_is_same(directory: Path, manifest: Mapping[str, str]) -> None:
    """Check that the directory is empty or has states with the same manifest as this run.

    Raises:
        UserError: the directory has other content.
    """
    found = _read_manifest(directory)
    if found is None:
        return
    differing = [name for name, value in manifest.items() if found.get(name) != value]
    if differing:
        raise UserError(f"{FLAG} {directory} was written with other {', '.join(differing)}", _ANOTHER_DIRECTORY)


def check_directory(directory: Path) -> None:
    """Check that the directory can hold a cache, before anything is computed. It is created if it does not exist.

    Raises:
        UserError: the directory cannot be written, or has other content than a cache.
    """
    check_writable(FLAG, directory)
    _read_manifest(directory)


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest in the directory; None if the directory is empty.

    Raises:
        UserError: the manifest is damaged, or the directory has other content.
    """
    try:
        found = read_json(directory / MANIFEST)
    except FileNotFoundError:
        # Another run that checks the directory at the same time has a hidden file in it.
        if any(not path.name.startswith(".") for path in directory.iterdir()):
            raise UserError(f"{FLAG} {directory} is not empty, and has no {MANIFEST}", _ANOTHER_DIRECTORY) from None
        return None
    except (OSError, ValueError):
        raise UserError(f"{directory / MANIFEST} is damaged", _ANOTHER_DIRECTORY) from None
    return found if isinstance(found, dict) else {}


def _check_disk(directory: Path, batches: Batches, train_state: TrainState, data: Data) -> None:
    """Log the final size of the cache.

    Raises:
        UserError: the disk has too little free space.
    """
    lengths = _lengths(batches, data)
    needed = _bytes_of_files(lengths, _num_items(batches, data), train_state.chunks[0], batches.plan.layout)
    there = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    free = shutil.disk_usage(directory).free
    logger.info(
        "hidden states of the trunk for %d tokens with padding: %.2f GB in %s, of which %.2f GB exist",
        sum(lengths),
        needed / 1e9,
        directory,
        there / 1e9,
    )
    if needed - there > free:
        raise UserError(
            f"{FLAG} {directory} requires {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left",
            "free disk space, or use a directory on another disk",
        )


def _lengths(batches: Batches, data: Data) -> list[int]:
    """Return the number of tokens, with padding, of each micro-batch that is written."""
    return [batches.length_of(row) for row in _distinct_rows(batches, data)]


def _num_items(batches: Batches, data: Data) -> int:
    """Return the number of items, such as groups of patches of images, of all micro-batches that are written."""
    num_items = 0
    for row in _distinct_rows(batches, data):
        sequences = chain.from_iterable(sample.sequences for sample in row)
        num_items += count_items(list(sequences), batches.extras)[0]
    return num_items


def _distinct_rows(batches: Batches, data: Data) -> list[list[Sample]]:
    """Return the row of each micro-batch that is written; equal rows share one file."""
    held_out = batches.rows(data.val)
    rows = [*batches.rows(data.train), *held_out]
    if len(held_out) % batches.plan.global_batch_size:
        rows.append([])  # a padding-only micro-batch, which fills up the last evaluation batch
    return list({digest(row): row for row in rows}.values())


def _bytes_of_files(lengths: Sequence[int], num_items: int, model: GPTModel, layout: ParallelLayout) -> int:
    """Return the size of all files in bytes.

    Args:
        lengths: number of tokens of each micro-batch.
        num_items: number of items of all micro-batches.
    """
    num_states = 2 if model.drafting.takes_before_norm else 1
    output_bytes = model.config.hidden_size * next(model.parameters()).element_size()
    state_bytes = num_states * output_bytes
    # With sequence parallelism each tensor-parallel rank has a part of the states and the loss of all positions.
    num_losses = 1
    if layout.sequence_parallel:
        num_losses = layout.tensor_model_parallel_size
    num_files = len(lengths) * num_losses * layout.context_parallel_size
    items = num_items * output_bytes * num_losses * layout.context_parallel_size  # each file has all items of its rows
    header_bytes = HEADER_BYTES
    if num_items:
        header_bytes += TOWER_HEADER_BYTES
    return sum(lengths) * (state_bytes + num_losses * LOSS_BYTES) + items + num_files * header_bytes


def _write(path: Path, output: TrunkOutput) -> None:
    """Write the trunk's output.

    Raises:
        UserError: the file cannot be written.
    """
    tensors = {
        "states_SBH": output.states.to_wire(),
        "loss_BS": output.loss.loss_BS,
        "prediction_BS": output.loss.prediction_BS,
    }
    if output.tower_outputs is not None:
        tensors["tower_outputs"] = output.tower_outputs
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        # Data-parallel ranks may have equal micro-batches: padding, or rows that occur twice.
        writer = f"-{socket.gethostname()}-{os.getpid()}"
        atomic_write(path, save(tensors, {"sha256": _sha256_of(path.name, tensors)}), writer)
    except OSError as error:
        raise UserError(
            f"{FLAG}: {path} cannot be written: {error.strerror}", "free disk space, then use --resume"
        ) from None


def _read(path: Path, has_prenorm: bool, device: torch.device) -> TrunkOutput:
    """Read the output that `_write` wrote.

    Args:
        has_prenorm: whether the heads read the trunk's state before its final norm, so that the file also contains this
            state.

    Raises:
        UserError: the file is damaged or belongs to another micro-batch.
    """
    try:
        content = path.read_bytes()
        tensors = load(content)
        loss = TokenLoss(on_device(tensors["loss_BS"], device), on_device(tensors["prediction_BS"], device))
        tower_outputs = tensors.get("tower_outputs")
        if tower_outputs is not None:
            tower_outputs = on_device(tower_outputs, device)
        is_whole = _sha256_of(path.name, tensors).encode() in content[:4096]  # the header
    except (OSError, KeyError, SafetensorError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{FLAG}: {path} is damaged", "delete it, then use --resume; its states are computed again")
    states = StageStates.from_wire(on_device(tensors["states_SBH"], device), has_prenorm=has_prenorm)
    return TrunkOutput(states, loss, tower_outputs)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sha256_of(file_name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    sha = hashlib.sha256(file_name.encode())  # the name identifies the micro-batch
    for name in sorted(tensors):
        sha.update(_bytes_of(tensors[name]))
    return sha.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
