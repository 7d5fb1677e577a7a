"""Copy the trunk of a Hugging Face model file by file, with the bytes of every tensor unchanged."""

import shutil
from pathlib import Path

from swiftlite.bridge.entry import Entry
from swiftlite.bridge.rows import HfConfig, RowTable
from swiftlite.bridge.tensors import SINGLE_NAME, Checkpoint, ShardedFiles

TRUNK_NAME = "model-trunk.safetensors"
"""Name of the copy of a single file. transformers would read a file named model.safetensors without the index."""


def copy_trunk(hf_dir: Path, out_dir: Path, family: RowTable, hf_config: HfConfig) -> dict[str, Entry]:
    """Copy the files of a model to an existing directory, without the tensors of MTP heads.

    Files without such tensors are copied byte for byte. In other files, the bytes of each remaining tensor are
    unchanged, and a file without remaining tensors is omitted. No index is written.

    Returns:
        The location of every copied tensor, by key.

    Raises:
        UserError: a file is damaged.
        OSError: a file cannot be written.
    """
    copied: dict[str, Entry] = {}
    with Checkpoint(hf_dir) as checkpoint:
        files = dict.fromkeys(entry.file for entry in checkpoint.stored.values())
        for file in files:
            there = {key: entry for key, entry in checkpoint.stored.items() if entry.file == file}
            kept = {key: entry for key, entry in there.items() if not family.is_mtp(hf_config, key)}
            name = TRUNK_NAME if file == SINGLE_NAME else file
            if len(kept) == len(there):
                shutil.copyfile(hf_dir / file, out_dir / name)
                copied |= {key: _in_file(entry, name) for key, entry in kept.items()}
            elif kept:
                copied |= _copy_tensors(checkpoint, kept, out_dir, name)
    return copied


def _in_file(entry: Entry, name: str) -> Entry:
    return Entry(entry.dtype, entry.shape, name, entry.offset)


def _copy_tensors(checkpoint: Checkpoint, kept: dict[str, Entry], out_dir: Path, name: str) -> dict[str, Entry]:
    """Write some of the tensors of a file to a new file, and return their locations."""
    types = {key: (entry.dtype, entry.shape) for key, entry in kept.items()}
    size = sum(entry.nbytes for entry in kept.values())
    # The maximum is the size of all tensors, so there is one file, with the name that other files of the model expect.
    out = ShardedFiles(out_dir, types, size, stem=name.removesuffix(".safetensors"))
    out.create()
    try:
        for key in kept:
            for index, chunk in checkpoint.stored_chunks(key):
                out.write(key, index, chunk)
        out.flush()
        out.publish()
    except BaseException:
        out.discard()
        raise
    return out.entries
