"""Convert weights between Hugging Face directories and Megatron models in memory, without changing a bit.

`load_hf` reads a directory into a model. In `saving.py`, `save_hf` writes a model to a directory, and `stream_hf`
yields the tensors for a running engine. Every rank reads and writes only its slices. Each function first binds the
family's bridge rows to the model's parameters, and raises an error for mismatches before it reads or writes a tensor.
Two checks are made later: copies of a tensor are compared with it when they are read, and heads for `mtp_init="graft"`
are checked when their directory is opened, after the trunk is read.

Terms: row: one Megatron parameter and the HF tensors that form it (`rows.py`). shard: the part of a parameter on this
rank (`placement.py`). binding: a row with its shard, which maps slices of HF tensors to slices of the shard
(`binding.py`). A slice without an HF key is padding: it is zero in the model and not written. piece: a slice of an HF
tensor, with the tensor's key and the values of the slice, to be sent to a file or an engine. copy: an HF tensor with
the same values as another one, such as `lm_head.weight` of tied embeddings. carried: tensors outside of the language
model, which are copied unchanged. drawn, grafted: initial values of MTP heads from random numbers, or from another
model.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, Heads
from swiftlite.bridge import mtp_init as fresh_heads
from swiftlite.bridge import placement
from swiftlite.bridge.audit import missing_mtp_keys, mtp_keys
from swiftlite.bridge.binding import Binding, Shard, bind, whole_numbers
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import own_prefix, read_config
from swiftlite.bridge.rows import HfConfig, Row, RowTable, shapes_of
from swiftlite.bridge.tensors import Checkpoint, some

MtpInit = Literal["checkpoint", "random", "copy_last_layer", "fit_last_layer", "graft"]


@dataclass(frozen=True)
class WeightsReport:
    """A report of what happened to each parameter and each HF key when a model was loaded.

    Each Megatron parameter of this rank is in `loaded` or `initialized`, and each HF key that was not read is in
    `dropped` or `carried`.

    Attributes:
        loaded: Megatron parameters read from the checkpoint.
        initialized: Megatron parameters filled from another source, with its name: "random", "copy_last_layer",
            "fit_last_layer", "graft".
        dropped: HF keys that are not needed (of heads that were not requested, of buffers derived from the config).
        carried: HF keys outside of the language model, which an export copies unchanged.
    """

    loaded: tuple[str, ...]
    initialized: Mapping[str, str]
    dropped: tuple[str, ...]
    carried: tuple[str, ...] = ()

    def over_all_ranks(self) -> "WeightsReport":
        """Return the combined report of all ranks; collective."""
        # Not sets: tensor-parallel ranks report the same names, which stay in the order of the layers.
        loaded: dict[str, None] = {}
        initialized: dict[str, str] = {}
        for report in placement.gather_from_all_ranks(self):
            loaded |= dict.fromkeys(report.loaded)
            initialized |= report.initialized
        return WeightsReport(tuple(loaded), initialized, self.dropped, self.carried)

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} parameters"]
        for origin in sorted(set(self.initialized.values())):
            names = [name for name, how in self.initialized.items() if how == origin]
            lines.append(f"initialized by {origin}: {len(names)} parameters: {', '.join(some(names))}")
        if self.dropped:
            lines.append(f"dropped {len(self.dropped)} checkpoint tensors: {', '.join(some(self.dropped))}")
        if self.carried:
            lines.append(f"carried through unchanged: {len(self.carried)} tensors: {', '.join(some(self.carried))}")
        return "\n".join(lines)


@torch.no_grad()
def load_hf(
    model_chunks: Sequence[nn.Module],
    hf_dir: str | Path,
    family: RowTable,
    hf_config: HfConfig,
    *,
    mtp_init: MtpInit = "checkpoint",
    graft_from: str | Path | None = None,
    seed: int = 42,
) -> WeightsReport:
    """Fill a Megatron model from a Hugging Face directory. Each rank reads its slices and casts them to the parameter's
    dtype.

    The model determines the number of MTP heads; if the model has no heads, the checkpoint's heads are dropped.

    Args:
        model_chunks: GPTModel(s) of this rank, wrapped or not.
        hf_dir: directory with model.safetensors, or shards and their index.
        family: the model's family, which defines the rows.
        hf_config: content of the directory's config.json.
        mtp_init: source of the heads' weights. "checkpoint": the checkpoint, which must have exactly as many heads.
            "copy_last_layer": the last decoder layer. "fit_last_layer": as copy_last_layer; the caller fits the
            heads (`train/head_fit.py`). "random": random values (`mtp_init.py`), except for frozen tensors
            (`Row.is_frozen`). "graft": another checkpoint.
        graft_from: directory of the other checkpoint, see `graft_heads`.
        seed: seed of random values.

    Raises:
        UserError: the checkpoint cannot be read, does not match the model, or does not have the model's number of MTP
            heads; or a copy, such as the `lm_head.weight` of a tied model, differs from its original.
    """
    depth = placement.mtp_num_layers(model_chunks)
    shards = placement.shards_of(model_chunks)
    with Checkpoint(hf_dir, format_of(hf_config)) as checkpoint:
        sources = _sources(checkpoint, family, hf_config, depth, mtp_init)
        carried = tuple(key for key in checkpoint.entries if family.is_carried(hf_config, key))
        _check_numbers(sources.read, checkpoint)
        # All names and shapes are compared before the first tensor is read, so that a checkpoint that does not fit is
        # refused in seconds.
        bindings = bind(
            shards,
            sources.read,
            borrowed=sources.borrowed,
            not_read=sources.not_read,
            others_hold=placement.others_hold(model_chunks, shards),
            hf_shapes={key: entry.shape for key, entry in checkpoint.entries.items()},
            ignored=[*sources.dropped, *carried],
            what=str(hf_dir),
            hint="check that the tensors belong to this config.json, and that both are complete",
        )
        # Also before the first read: a family whose head rows do not match the model fails here.
        drawn_bindings = _bind_heads(shards, sources.drawn)
        read_bindings(bindings, checkpoint, family, hf_config)
    # 0.02 is the default of transformers' config classes; some config.json contain null.
    _draw(drawn_bindings, hf_config.get("initializer_range") or 0.02, seed, family.norm_start)
    for shard in shards:
        fill = sources.fills.get(shard.name)
        if fill is not None:
            fill(shard)
    if depth and mtp_init == "graft":
        assert graft_from is not None
        graft_heads(model_chunks, graft_from, family, hf_config)
    return _report(shards, bindings, sources, mtp_init, carried)


def _report(
    shards: Sequence[Shard],
    bindings: Sequence[Binding],
    sources: "_Sources",
    mtp_init: MtpInit,
    carried: tuple[str, ...],
) -> WeightsReport:
    borrowed = {row.mcore: row for row in sources.borrowed}
    bound = [binding.shard.name for binding in bindings]
    loaded = tuple(name for name in bound if name not in borrowed)
    # Frozen tensors of heads are copies also with --mtp_init random (`_sources`).
    initialized: dict[str, str] = {
        name: "copy_last_layer" if borrowed[name].is_frozen else mtp_init for name in bound if name in borrowed
    }
    drawn = {row.mcore for row in sources.drawn}
    for name in [shard.name for shard in shards if shard.name in sources.not_read]:
        initialized[name] = "random" if name in drawn else mtp_init
    # Every parameter has exactly one source: none keeps the values with which megatron-core constructed it.
    assert len(loaded) + len(initialized) == len(shards)
    return WeightsReport(loaded, initialized, tuple(sources.dropped), carried)


@torch.no_grad()
def graft_heads(
    model_chunks: Sequence[nn.Module], graft_from: str | Path, family: RowTable, hf_config: HfConfig
) -> None:
    """Fill the model's MTP heads from another checkpoint, whose heads must match in family, number and shapes.

    Args:
        graft_from: a Hugging Face directory, such as the base model that the trunk was fine-tuned from, or that of a
            drafter.
        family: the model's family, which defines the rows.
        hf_config: content of the model's config.json.

    Raises:
        UserError: family, number or shapes of the heads differ.
    """
    base_config = hf_config
    if not own_prefix(Path(graft_from)):  # the settings of a drafter in a directory of its own are those of the model
        base_config = read_config(Path(graft_from))
    # Equal shapes are not enough: layers of two families can compute different functions of equal tensors.
    base_type = base_config.get("model_type")
    trunk_type = hf_config.get("model_type")
    if base_type != trunk_type:
        raise UserError(
            f"{graft_from} has model_type {base_type}, the trunk {trunk_type}",
            "use the model that the trunk was fine-tuned from",
        )
    depth = placement.mtp_num_layers(model_chunks)
    with Checkpoint(graft_from, format_of(base_config)) as base:
        _check_mtp_depth(depth, base, family, base_config)
        # From the base's own config, because names depend on it: heads of GLM-4.5 are numbered after its last layer.
        rows = _head_rows(family, base_config, depth)
        _check_same_shapes(rows, _head_rows(family, hf_config, depth), base)
        _check_numbers(rows, base)
        read_bindings(_bind_heads(placement.shards_of(model_chunks), rows), base, family, base_config)


def _bind_heads(shards: Iterable[Shard], rows: Sequence[Row]) -> list[Binding]:
    """Bind the rows of heads to parameters on this rank; heads can also be on other ranks."""
    names = {row.mcore for row in rows}
    held = [shard for shard in shards if shard.name in names]
    # The callers have checked that the model has these heads, so heads that this rank does not hold are on other ranks.
    return bind(held, rows, others_hold=lambda name: True)


def _check_same_shapes(rows: Sequence[Row], wanted: Sequence[Row], base: Checkpoint) -> None:
    """Check that the bridge rows of the heads on disk fill exactly the parameters that the trunk's config requires."""
    shapes = {row.mcore: list(row.hf.values()) for row in wanted}
    present = {row.mcore for row in rows}
    problems = [f"unexpected: {row.mcore}" for row in rows if row.mcore not in shapes]
    problems += [f"missing: {name}" for name in shapes.keys() - present]
    if prefix := own_prefix(base.hf_dir):  # in other directories, further tensors belong to other heads or to the trunk
        unused = base.entries.keys() - shapes_of(rows)
        problems += [f"unexpected: {key.removeprefix(prefix)}" for key in sorted(unused)]
    for row in rows:
        if row.mcore not in shapes:
            continue
        for key, shape in zip(row.hf, shapes[row.mcore], strict=True):
            found = base.entries[key].shape
            if tuple(found) != tuple(shape):
                problems.append(f"{key} has shape {list(found)}, this model requires {list(shape)}")
    if problems:
        raise UserError(
            f"the MTP heads of {base.hf_dir} do not match the model:\n  " + "\n  ".join(some(problems)),
            "use the model that the trunk was fine-tuned from",
        )


@dataclass(frozen=True)
class _Sources:
    """The source of each Megatron parameter.

    Attributes:
        read: rows whose HF tensors are read.
        borrowed: rows of head parameters that are initialized from HF tensors that `read` claims.
        drawn: rows of parameters whose HF tensors are drawn at random.
        fills: functions that fill head parameters without HF tensors, by Megatron name.
        grafted: names of head parameters that `graft_heads` fills.
        dropped: HF keys that are not needed (of heads that were not requested, of buffers derived from the config).
    """

    read: Sequence[Row]
    borrowed: Sequence[Row] = ()
    drawn: Sequence[Row] = ()
    fills: Mapping[str, fresh_heads.Fill] = field(default_factory=dict)
    grafted: Collection[str] = ()
    dropped: Sequence[str] = ()

    @property
    def not_read(self) -> set[str]:
        """Names of Megatron parameters that are not filled from the checkpoint."""
        return {*(row.mcore for row in self.drawn), *self.fills, *self.grafted}


def _sources(checkpoint: Checkpoint, family: RowTable, hf_config: HfConfig, depth: int, mtp_init: MtpInit) -> _Sources:
    derived = [key for key in checkpoint.entries if family.is_derived(key)]
    if depth and mtp_init == "checkpoint":
        _check_mtp_depth(depth, checkpoint, family, hf_config)
        return _Sources(family.rows(hf_config, depth), dropped=derived)
    trunk = family.rows(hf_config, 0)
    # Also with another mtp_init: the checkpoint's heads are replaced by new ones.
    dropped = derived + mtp_keys(checkpoint.entries, family, hf_config)
    new = [row for row in trunk if row.can_be_new and checkpoint.entries.keys().isdisjoint(row.hf)]
    if new:  # a model with such parameters has no heads
        return _Sources([row for row in trunk if row not in new], drawn=new, dropped=dropped)
    if mtp_init in ("copy_last_layer", "fit_last_layer"):
        borrowed = fresh_heads.copied_rows(family, hf_config, depth)
        others = {row.mcore: row for row in _head_rows(family, hf_config, depth)}
        # What the trunk has no tensor for: first values with which the head passes its inputs on, then random ones.
        for row in borrowed:
            del others[row.mcore]
        fills = fresh_heads.pass_through(others, family.norm_start)
        drawn = [row for name, row in others.items() if name not in fills]
        return _Sources(trunk, borrowed=borrowed, drawn=drawn, fills=fills, dropped=dropped)
    heads = _head_rows(family, hf_config, depth)
    if mtp_init == "graft":
        return _Sources(trunk, grafted=[row.mcore for row in heads], dropped=dropped)
    # A frozen tensor would keep its random values, because no step trains it (except with --indexer_mode).
    held = [row for row in fresh_heads.copied_rows(family, hf_config, depth) if row.is_frozen]
    return _Sources(trunk, borrowed=held, drawn=[row for row in heads if not row.is_frozen], dropped=dropped)


def _head_rows(family: RowTable, hf_config: HfConfig, depth: int) -> list[Row]:
    """Return the bridge rows of heads 0 to depth - 1."""
    rows: list[Row] = []
    for head in range(depth):
        rows += family.head_rows(hf_config, head)
    return rows


def _check_numbers(rows: Iterable[Row], checkpoint: Checkpoint) -> None:
    if problems := whole_numbers(rows, checkpoint.entries):
        lines = "\n  ".join(some(problems))
        raise UserError(
            f"{checkpoint.hf_dir} cannot be read:\n  {lines}",
            "use the model before its quantization",
        )


def _draw(bindings: Sequence[Binding], std: float, seed: int, norm_start: float) -> None:
    """Fill this rank's slices of parameters from random HF tensors."""
    for binding in bindings:
        # Each rank draws whole HF tensors and keeps its slices, so that the values do not depend on the layout.
        tensors = fresh_heads.random_tensors(binding.row, std, seed, norm_start)
        for shard, local_index, hf_key, hf_index in binding.slices():
            assert hf_key is not None
            shard.tensor[local_index] = tensors[hf_key][hf_index]


def read_bindings(bindings: Sequence[Binding], checkpoint: Checkpoint, family: RowTable, hf_config: HfConfig) -> None:
    """Read every slice of this rank in the order of the files, so that disks can read ahead."""

    def place(binding: Binding) -> tuple[str, int]:
        # The first tensor decides, because those of a row (such as q, k and v) are neighbors in most files.
        entry = checkpoint.entries[next(iter(binding.row.hf))]
        return entry.file, entry.offset

    for binding in sorted(bindings, key=place):
        present_copies = [key for key in binding.row.hf_copies if key in checkpoint.entries]
        for shard, local_index, hf_key, hf_index in binding.slices():
            target = shard.tensor[local_index]
            if hf_key is None:
                target.zero_()
                continue
            # Each rank compares only its own slice of the vocabulary; together the ranks compare the whole copy.
            for copy_key in present_copies:
                if not checkpoint.is_equal(hf_key, copy_key, hf_index):
                    raise _unequal(hf_key, copy_key, family.head_of(hf_config, copy_key))
            checkpoint.read_into(target, hf_key, hf_index)


def _unequal(hf_key: str, copy_key: str, head: int | None) -> UserError:
    """Return the error for a copy that differs from its original.

    Args:
        head: the MTP head that `copy_key` belongs to; None for a tied model's output layer.
    """
    if head is None:
        return UserError(
            f"config.json ties the embeddings, but {copy_key} differs from {hf_key}",
            'set "tie_word_embeddings": false if the model has a separate output layer, else remove the tensor',
        )
    return UserError(
        f"{copy_key} differs from {hf_key}: MTP head {head} has a separate tensor, but megatron-core's MTP layers "
        "share the trunk's",
        "use --mtp_num_layers 0 to drop the heads, or --mtp_init fit_last_layer to train new ones",
    )


def bind_all(
    model_chunks: Sequence[nn.Module], family: RowTable, hf_config: HfConfig
) -> tuple[list[Row], list[Binding]]:
    """Return the bridge rows of the whole model, and the bindings of this rank."""
    rows = family.rows(hf_config, placement.mtp_num_layers(model_chunks))
    shards = placement.shards_of(model_chunks)
    bindings = bind(
        shards,
        rows,
        others_hold=placement.others_hold(model_chunks, shards),
        what="config.json",
        hint="check that this config.json belongs to the model",
    )
    return rows, bindings


def _check_mtp_depth(depth: int, checkpoint: Checkpoint, family: RowTable, hf_config: HfConfig) -> None:
    """Check that --mtp_num_layers, config.json and the files have the same number of heads."""
    hf_dir = checkpoint.hf_dir
    declared = Heads.from_config(hf_config)
    promised = declared.layers
    # Key and tensors are compared separately: save_pretrained of transformers writes a model without its heads (its
    # classes ignore their tensors), but keeps the key that declares them.
    on_disk = mtp_keys(checkpoint.entries, family, hf_config)
    hint = "add --mtp_init fit_last_layer to start from its last layer, or --mtp_init random"
    if not on_disk:
        problem = f"--mtp_num_layers {depth}, but {hf_dir} has no MTP weights"
        if promised:
            problem += f" (its config.json declares {promised} MTP layers)"
        raise UserError(problem, hint)
    if promised != depth:
        keep = f"use --mtp_num_layers {promised}, or " if promised else ""
        raise UserError(
            f"--mtp_num_layers {depth}, but config.json of {hf_dir} declares {promised} MTP layers", keep + hint
        )
    missing = missing_mtp_keys(checkpoint.entries, family, hf_config, depth)
    if missing:
        problem = f"{hf_dir} lacks {len(missing)} tensors of its {depth} MTP layers:"
        if declared.kind != MTP:
            problem, hint = f"{hf_dir} lacks {len(missing)} tensors of its drafter:", "copy or download it again"
        raise UserError("\n  ".join([problem, *some(missing)]), hint)
