"""Cache the hidden states of a frozen trunk (`--cache_trunk_states`).

With `--mtp_mode heads_only`, the trunk produces the same hidden states for a micro-batch in every epoch. After the
first epoch, these states are read from files instead of being computed again. So are the outputs of a tower, which
heads read as well.

The directory of the cache contains a record per micro-batch (and per part of a row, if ranks share rows), in a few
files (`record_files.py`). The key of a record is the sha256 of the micro-batch's tokens, labels and other inputs of the
trunk. Other runs over the same rows can read the records, also with another order of rows, another loss or another
number of drafts. `cache.json` describes the model and the settings that the states depend on. The stored states are
bitwise identical to computed states, so the results of training do not change.

Rows are many. What the cache keeps or computes for all of them is in arrays: 16 bytes per record while the run trains.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
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
from swiftlite.data.batch import AXES, ITEM, Batch, Extra, count_items
from swiftlite.data.encoded_rows import keys_of
from swiftlite.data.packing.packing import PackedRows
from swiftlite.data.sample import Sample
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
from swiftlite.runtime.decisions import record_decision
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches, Collated, SampleRows
from swiftlite.train.metrics.run_report import hash_tensor
from swiftlite.train.record_files import ENTRY, KEY_BYTES, DamagedRecord, RecordFiles
from swiftlite.train.train_state import TrainState

FLAG = "--cache_trunk_states"
MANIFEST = "cache.json"
STATES = "states"
"""Key of the manifest for the states that heads read."""
_ANOTHER_DIRECTORY = "use another directory; or delete this one, if nothing else needs it"
LOSS_BYTES = 4 + 8
"""Bytes per token for the trunk's loss (float32) and prediction (int64), see `TokenLoss`."""
HEADER_BYTES = 256
"""Maximum header size of a record: names, dtypes and shapes of its tensors."""
TOWER_HEADER_BYTES = 112
"""Maximum additional header size of a record with outputs of a tower."""
FORMAT = "records 1"
"""Names the files. Earlier releases wrote a file per micro-batch, and named no format."""
WHOLE, MISSING, DAMAGED = range(3)
"""States of a record on a rank. The highest of all ranks decides for all."""


@dataclass
class HiddenStateCache:
    """The cache of a run (a `TrunkSource`), created by `open_hidden_state_cache`.

    Attributes:
        directory: directory of the files.
        mesh: the ranks of the run, which process their micro-batches at the same time.
        trunk: the source of outputs that are not in the cache.
        run: directory of the run, for decisions; None: they are only logged.
    """

    directory: Path
    mesh: Mesh
    trunk: TrunkLayers
    run: Path | None = None
    _has_reported: bool = False

    def __post_init__(self):
        self._records = RecordFiles(self.directory, f"cp{self.mesh.cp.rank()}-tp{self._tp_rank}")

    @property
    def _tp_rank(self) -> int:
        """The part of a row among tensor-parallel ranks. Without sequence parallelism all of them hold the same states,
        which the first one writes."""
        return self.mesh.tp.rank() if self.mesh.layout.sequence_parallel else 0

    def output(self, model: torch.nn.Module, batch: Batch) -> TrunkOutput:
        """Return the trunk's output for a micro-batch. Collective over all ranks.

        If the output is not in the cache, it is computed and added.

        Raises:
            UserError: an output is missing or damaged without decoder layers that compute it, or cannot be written.
        """
        bare = cast(GPTModel, unwrap_model(model))
        key = self._key(batch)
        tensors, state = self._read(key)
        # Ranks share layers, so either all ranks compute or none does.
        worst = all_reduce_max(state, self.mesh)
        if tensors is not None and worst == WHOLE:
            return _output_of(tensors, bare, self.mesh.device.torch_device)
        if worst == DAMAGED:
            self._report_damage()
        output = self.trunk.output(model, batch)
        if output is None:
            output = bare.trunk_output(ModelInputs.of(batch), batch.labels_KBS[0])
        # Records that only another rank lacks are computed here as well, but not written a second time.
        if state != WHOLE:
            self._add({key: _tensors_of(output)})
        return output

    def fill(self, batches: Batches, rows: SampleRows, held_out: SampleRows) -> None:
        """Write the missing outputs that steps cannot compute; collective.

        Outputs are written after each group of micro-batches, so a run that is killed loses at most one group.

        Args:
            rows, held_out: the training and the held-out rows.

        Raises:
            UserError: a layer cannot be read, or a file cannot be written.
        """
        on_host: dict[bytes, dict[str, torch.Tensor]] = {}
        for streamed in self.trunk.outputs_before_steps(self._missing(batches, rows, held_out)):
            key = self._key(streamed.batch)
            if key not in self._records:  # another rank lacks it
                on_host[key] = _tensors_of(streamed.output)
            if streamed.ends_group:
                self._add(on_host)
                on_host.clear()
        # In steps, data-parallel ranks read each other's records.
        dist.barrier()

    def _missing(self, batches: Batches, rows: SampleRows, held_out: SampleRows) -> Iterator[Batch]:
        """Yield the micro-batches whose output any rank lacks. Nothing is computed unless they are read."""
        num_ranks = self.mesh.dp.size()
        distinct = _DistinctRows.of(batches, rows, held_out)
        distinct = distinct.padded_to(num_ranks)  # because all ranks run the layers together
        micro_batches = Collated(batches.collate, distinct.of_rank(self.mesh.dp.rank(), num_ranks))
        for batch in on_this_rank(micro_batches, self.mesh):
            if all_reduce_max(int(self._key(batch) not in self._records), self.mesh):
                yield batch

    def _read(self, key: bytes) -> tuple[dict[str, torch.Tensor] | None, int]:
        """Return the tensors of a record on the host, if it is there, and its state."""
        try:
            content = self._records.read(key)
            if content is None:
                return None, MISSING
            return load(content), WHOLE
        except SafetensorError:  # a file of another program, with the digest of its bytes
            self._records.remove(key)
        except DamagedRecord as damaged:
            logger.warning("%s: %s is damaged", FLAG, damaged)
        return None, DAMAGED

    def _report_damage(self) -> None:
        """Record once that damaged outputs are computed again. A damaged file has many of them."""
        if self._has_reported or self.run is None or dist.get_rank():
            return
        self._has_reported = True
        # Not after a step: the files stay repaired if the run repeats its steps.
        record_decision(self.run, 0, "damaged_cache", f"{FLAG} {self.directory}: damaged states are computed again")

    def _add(self, outputs: Mapping[bytes, Mapping[str, torch.Tensor]]) -> None:
        """Write the outputs for micro-batches, after waiting for their copies to the host.

        Data-parallel ranks may write equal micro-batches of a step: padding, or rows that occur twice.

        Raises:
            UserError: the files cannot be written.
        """
        if self.mesh.tp.rank() != self._tp_rank:
            return
        self.mesh.device.synchronize()
        try:
            for key, tensors in outputs.items():
                self._records.add(key, save(dict(tensors)))
        except OSError as error:
            raise UserError(
                f"{FLAG}: {self.directory} cannot be written: {error.strerror}", "free disk space, then use --resume"
            ) from None

    def _key(self, batch: Batch) -> bytes:
        """Return the key of a micro-batch: sha256 of the trunk's inputs and the labels. Other parts of a row are in
        other files.
        """
        batch = batch.on_host or batch  # copying from the GPU would wait for queued kernels
        # With the labels, because a record also has the trunk's loss.
        given = [batch.tokens_KBS[0], batch.labels_KBS[0], batch.position_ids_BS]
        if batch.cu_seqlens is not None:
            given.append(batch.cu_seqlens)
        given += [batch.extras[name] for name in (ITEM, AXES) if name in batch.extras]
        sha = hashlib.sha256()
        if batch.items:
            sha.update(batch.items.identity)
        for tensor in given:
            sha.update(f"{tuple(tensor.shape)} ".encode() + _bytes_of(tensor))
        return sha.digest()[:KEY_BYTES]


def _tensors_of(output: TrunkOutput) -> dict[str, torch.Tensor]:
    """Return the tensors of a record, for which copies to the host are queued."""
    tensors = {
        "states_SBH": output.states.to_wire(),
        "loss_BS": output.loss.loss_BS,
        "prediction_BS": output.loss.prediction_BS,
    }
    if output.tower_outputs is not None:
        tensors["tower_outputs"] = output.tower_outputs
    return {name: tensor.detach().contiguous().to("cpu", non_blocking=True) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class _DistinctRows(Sequence[list[Sample]]):
    """The rows of the micro-batches that are written; equal rows share one record.

    Attributes:
        numbers: int64, the numbers of the rows among the training rows and then the held-out rows; -1 is a row that is
            only padding.
    """

    rows: SampleRows
    held_out: SampleRows
    numbers: np.ndarray

    @classmethod
    def of(cls, batches: Batches, rows: SampleRows, held_out: SampleRows) -> "_DistinctRows":
        keys = np.concatenate([_keys_of_rows(rows), _keys_of_rows(held_out)])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        is_first = np.ones(len(keys), bool)
        is_first[1:] = keys[1:] != keys[:-1]
        numbers = np.sort(order[is_first])
        if len(held_out) % batches.plan.global_batch_size:
            numbers = np.append(numbers, -1)  # it fills up the last evaluation batch
        return cls(rows, held_out, numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> list[Sample]:  # pyright: ignore[reportIncompatibleMethodOverride]
        number = int(self.numbers[index])
        if number < 0:
            return []
        if number < len(self.rows):
            return self.rows[number]
        return self.held_out[number - len(self.rows)]

    def padded_to(self, multiple: int) -> "_DistinctRows":
        padding = np.full(-len(self) % multiple, -1)
        return replace(self, numbers=np.concatenate([self.numbers, padding]))

    def of_rank(self, rank: int, num_ranks: int) -> "_DistinctRows":
        return replace(self, numbers=self.numbers[rank::num_ranks])

    def lengths(self, batches: Batches) -> np.ndarray:
        """Return the number of tokens, with padding, of each micro-batch."""
        padding = np.full(1, batches.plan.row_multiple, np.int32)  # at -1
        lengths = [batches.lengths_of_rows(each) for each in (self.rows, self.held_out)]
        return np.concatenate([*lengths, padding])[self.numbers]

    def num_items(self, extras: Sequence[Extra]) -> int:
        """Return the number of items, such as groups of patches of images, of all micro-batches."""
        if not any(extra.per == "item" for extra in extras):
            return 0
        num_items = 0
        for row in self:
            sequences = chain.from_iterable(sample.sequences for sample in row)
            num_items += count_items(list(sequences), extras)[0]
        return num_items


def _keys_of_rows(rows: SampleRows) -> np.ndarray:
    """Return a hash of each row, uint64.

    Of a million rows, two have the same hash by chance with a probability of 3e-8. A step then computes the output that
    `fill` has left out, or ends the run if the decoder layers are not in memory.
    """
    keys = keys_of(rows.samples)
    if not isinstance(rows.rows, PackedRows) or not len(rows):
        return keys
    order, offsets = rows.rows.order, rows.rows.offsets
    # A number that depends on the place of each sample in its row: 1, 3, 5, ...
    places = np.arange(len(order)) - np.repeat(offsets[:-1], np.diff(offsets))
    # Odd factors, because multiplying by them modulo 2 ** 64 loses no bits.
    return np.add.reduceat(keys[order] * (2 * places + 1).astype(np.uint64), offsets[:-1])


def open_hidden_state_cache(
    directory: Path,
    mesh: Mesh,
    batches: Batches,
    hf_model: HfModel,
    train_state: TrainState,
    rows: SampleRows,
    held_out: SampleRows,
    torch_dtype: str,
    run: Path | None = None,
) -> HiddenStateCache:
    """Open the cache in a directory, which is created if it does not exist; collective.

    Args:
        rows, held_out: the training and the held-out rows.
        run: directory of the run, for decisions.

    Raises:
        UserError: the directory holds other files, or states of another model or of other rows; the disk is too small;
            or the machines do not share the directory.
    """
    samples = (rows.samples, held_out.samples)
    manifest = _manifest(batches.plan, hf_model.config, train_state, samples, torch_dtype)
    if dist.get_rank() == 0:
        check_directory(directory)
        _check_is_same(directory, manifest)
        # After the check: a directory of other files stays as it is.
        delete_incomplete(directory)
        _check_disk(directory, batches, train_state, _DistinctRows.of(batches, rows, held_out))
        atomic_write(directory / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    dist.barrier()
    # On every rank after the barrier, so that all ranks of another machine notice it.
    if not _has_manifest(directory, manifest):
        raise UserError(f"{FLAG} {directory} is not shared by every machine", "use a directory on a shared file system")
    return HiddenStateCache(directory, mesh, train_state.trunk, run)


def _manifest(
    plan: Plan,
    hf_config: Mapping[str, Any],
    train_state: TrainState,
    samples: Sequence[Sequence[Sample]],
    torch_dtype: str,
) -> dict[str, str]:
    """Return everything that the stored states depend on, by name. Error messages contain the names. Collective."""
    mine = {name: value for name, value in train_state.hashes.items() if not is_head_parameter(name)}
    mine |= train_state.trunk.hashes(hash_tensor)
    trunks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(trunks, _sha256(mine))
    rows = [""]
    if dist.get_rank() == 0:  # the ranks have equal rows, see `phases.check_ranks_agree`
        # Sorted, because another order of the rows can use the same records.
        keys = np.sort(np.concatenate([keys_of(each) for each in samples]))
        rows = [hashlib.sha256(keys.tobytes()).hexdigest()]
    dist.broadcast_object_list(rows)
    layout = plan.layout
    states = "after the norm"
    if train_state.chunks[0].drafting.takes_before_norm:
        states = "before and after the norm"
    if plan.heads.features:
        states += f", inputs of layers {', '.join(map(str, plan.heads.features))}"
    return {
        "format": FORMAT,
        # A set: data-parallel ranks have the same parts, and another number of them can use the same records.
        "trunk's weights": _sha256(sorted(set(trunks))),
        "config.json": digest_of_trunk(hf_config),
        "rows": rows[0],
        # These decide which micro-batches there are, and how their states are rounded.
        "torch_dtype": torch_dtype,
        "kernels": ", ".join(plan.kernels.described.values()),
        "packing": f"{plan.packing} {plan.packing_length}",
        "layout": f"tensor {layout.tensor_model_parallel_size} sequence {layout.sequence_parallel} "
        f"context {layout.context_parallel_size}",
        STATES: states,
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
    if found.get("format") != FORMAT:
        problem = f"{FLAG} {directory} was written by another release of swiftlite, in another format"
        raise UserError(problem, _ANOTHER_DIRECTORY)
    differing = [name for name, value in manifest.items() if found.get(name) != value]
    if STATES in differing:
        differing[differing.index(STATES)] = f"{STATES} ({found.get(STATES)}; this run: {manifest[STATES]})"
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


def _check_disk(directory: Path, batches: Batches, train_state: TrainState, rows: _DistinctRows) -> None:
    """Log the final size of the cache.

    Raises:
        UserError: the disk has too little free space.
    """
    num_tokens = int(rows.lengths(batches).sum(dtype=np.int64))
    num_items = rows.num_items(batches.extras)
    needed = _bytes_of_files(num_tokens, len(rows), num_items, train_state.chunks[0], batches.plan.layout)
    there = sum(path.stat().st_size for path in directory.iterdir() if path.suffix in (".data", ".index"))
    free = shutil.disk_usage(directory).free
    logger.info(
        "hidden states of the trunk for %d tokens with padding: %.2f GB in %s, of which %.2f GB exist",
        num_tokens,
        needed / 1e9,
        directory,
        there / 1e9,
    )
    if needed - there > free:
        raise UserError(
            f"{FLAG} {directory} requires {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left",
            "free disk space, or use a directory on another disk",
        )


def _bytes_of_files(
    num_tokens: int, num_micro_batches: int, num_items: int, model: GPTModel, layout: ParallelLayout
) -> int:
    """Return the size of all files in bytes.

    Args:
        num_tokens, num_items: numbers of tokens and of items of all micro-batches.
    """
    num_states = 1 + model.drafting.takes_before_norm + len(model.heads.features)
    output_bytes = model.config.hidden_size * next(model.parameters()).element_size()
    state_bytes = num_states * output_bytes
    # With sequence parallelism each tensor-parallel rank has a part of the states and the loss of all positions.
    num_losses = 1
    if layout.sequence_parallel:
        num_losses = layout.tensor_model_parallel_size
    num_records = num_micro_batches * num_losses * layout.context_parallel_size
    items = num_items * output_bytes * num_losses * layout.context_parallel_size  # a record has all items of its rows
    header_bytes = HEADER_BYTES + ENTRY.itemsize
    if num_items:
        header_bytes += TOWER_HEADER_BYTES
    return num_tokens * (state_bytes + num_losses * LOSS_BYTES) + items + num_records * header_bytes


def _output_of(tensors: Mapping[str, torch.Tensor], model: GPTModel, device: torch.device) -> TrunkOutput:
    """Return the output that `HiddenStateCache._add` wrote for the heads of a model, on the device."""
    moved = {name: on_device(tensor, device) for name, tensor in tensors.items()}
    has_prenorm, num_features = model.drafting.takes_before_norm, len(model.heads.features)
    states = StageStates.from_wire(moved["states_SBH"], has_prenorm=has_prenorm, num_features=num_features)
    return TrunkOutput(states, TokenLoss(moved["loss_BS"], moved["prediction_BS"]), moved.get("tower_outputs"))


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # Through uint8, because numpy has no bfloat16.
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
