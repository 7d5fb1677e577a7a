"""Check that a Hugging Face directory contains exactly the tensors that its config.json declares.

Only files are read; no model is built.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import torch

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.binding import compare_shapes, expected_shapes, whole_numbers
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.rows import HfConfig, Row, RowTable, shapes_of
from swiftlite.bridge.tensors import Checkpoint, as_read, scan


@dataclass(frozen=True)
class MtpOnDisk:
    """The MTP heads of a directory.

    Args:
        promised: number of heads that config.json declares.
        depth: number of heads with at least one tensor.
        missing: missing HF keys of heads up to max(promised, depth).
    """

    promised: int
    depth: int
    missing: tuple[str, ...]


def mtp_keys(hf_keys: Iterable[str], family: RowTable, hf_config: HfConfig) -> list[str]:
    """Return the HF keys that belong to MTP heads."""
    return [key for key in hf_keys if family.is_mtp(hf_config, key)]


def missing_mtp_keys(hf_keys: Iterable[str], family: RowTable, hf_config: HfConfig, depth: int) -> list[str]:
    """Return the missing keys of heads 0 to depth - 1."""
    present = set(hf_keys)
    wanted = chain.from_iterable(shapes_of(family.head_rows(hf_config, head)) for head in range(depth))
    return [key for key in wanted if key not in present]


def mtp_depth_on_disk(hf_dir: str | Path, family: RowTable, hf_config: HfConfig) -> MtpOnDisk:
    """Compare the MTP heads that config.json declares with the tensors in the files.

    Raises:
        UserError: the directory has no readable safetensors.
    """
    with Checkpoint(hf_dir, format_of(hf_config)) as checkpoint:
        return _mtp_on_disk(checkpoint.entries, family, hf_config)


def audit_hf(hf_dir: str | Path, family: RowTable) -> list[str]:
    """Read every file of a Hugging Face directory and compare the tensors with the directory's config.json.

    The checks are:

    - the index lists exactly the keys in the files
    - keys and shapes of the trunk are the ones that the family defines for this config
    - config.json declares exactly the MTP heads in the files
    - copies of a tied embedding are equal to the embedding
    - all values are finite

    Returns:
        One line per problem with the name of the tensor; empty if there is no problem.
    """
    try:
        hf_config = read_config(hf_dir)
        stored, problems = scan(hf_dir)
        format = format_of(hf_config)
    except UserError as error:
        return [error.problem]
    found = as_read(Path(hf_dir), stored, format)
    entries = found.tensors
    problems += found.problems
    mtp = _mtp_on_disk(entries, family, hf_config)
    if mtp.promised != mtp.depth:
        problems.append(f"config.json declares {mtp.promised} MTP layers, the files have tensors of {mtp.depth}")

    # The larger number, so that both missing and undeclared heads are reported tensor by tensor.
    rows = family.rows(hf_config, max(mtp.promised, mtp.depth))
    shapes = {key: entry.shape for key, entry in entries.items()}
    not_of_rows = [key for key in entries if family.is_derived(key) or family.is_carried(hf_config, key)]
    problems += compare_shapes(expected_shapes(rows, shapes), shapes, not_of_rows)
    problems += whole_numbers(rows, entries)
    # Reading all values takes minutes for a large model, and requires that the tensors exist.
    if not problems:
        with Checkpoint(hf_dir, format) as checkpoint:
            problems += _copies_that_differ(checkpoint, rows)
            problems += _not_finite(checkpoint)
    return problems


def _mtp_on_disk(hf_keys: Iterable[str], family: RowTable, hf_config: HfConfig) -> MtpOnDisk:
    found = set(mtp_keys(hf_keys, family, hf_config))
    depth = 0
    for head in {family.head_of(hf_config, key) for key in found}:
        # Each head has at least one key, so the number of keys bounds the number of heads.
        if head is None or head >= len(found):
            continue
        if not found.isdisjoint(shapes_of(family.head_rows(hf_config, head))):
            depth = max(depth, head + 1)
    promised = Heads.from_config(hf_config).layers
    missing = missing_mtp_keys(found, family, hf_config, max(promised, depth))
    return MtpOnDisk(promised, depth, tuple(missing))


def _copies_that_differ(checkpoint: Checkpoint, rows: Iterable[Row]) -> list[str]:
    problems = []
    for row in rows:
        copies = [copy for copy in row.hf_copies if copy in checkpoint.entries]
        for key, copy in product(row.hf, copies):
            if not checkpoint.is_equal(key, copy):
                problems.append(f"{copy} differs from {key}")
    return problems


def _not_finite(checkpoint: Checkpoint) -> list[str]:
    problems = []
    for key, entry in checkpoint.entries.items():
        if entry.dtype.is_floating_point:
            # float(), because isfinite does not support 8-bit dtypes
            bad = sum(int((~torch.isfinite(chunk.float())).sum()) for chunk in checkpoint.chunks(key))
            if bad:
                problems.append(f"{key}: {bad} of {entry.numel} values are not finite")
    return problems
