"""Check the file `.metadata` of a checkpoint before torch unpickles it.

A pickle can run code. Therefore only the classes that occur in torch's distributed checkpoints are allowed.
"""

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.planner import WriteItemType

METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"{METADATA_FILE} names {module}.{name}, which no checkpoint needs")


# Stored before any file is read, because a pickle can modify a class.
_MEMBERS: dict[Any, dict[str, Enum]] = {enum: dict(enum.__members__) for enum in (_MEM_FORMAT_ENCODING, WriteItemType)}


def _enum_member(enum: Any, name: Any) -> Enum:
    """Return a member of an enum. Early Python 3.11, such as Debian 12's, pickles members of enums with `getattr`."""
    try:
        return _MEMBERS[enum][name]
    except (KeyError, TypeError):
        raise pickle.UnpicklingError(f"{METADATA_FILE} names {name!r} of {enum}, which no checkpoint needs") from None


def check_metadata(checkpoint: Path) -> None:
    """Check that `.metadata` contains only classes of checkpoints, without running code from it.

    Raises:
        OSError: `.metadata` or common.pt is missing. megatron-core reports a missing common.pt as an AttributeError.
        pickle.UnpicklingError: `.metadata` is damaged, or refers to another class or to a file outside the checkpoint;
            or a file is truncated.
    """
    (checkpoint / COMMON_STATE_FNAME).stat()
    with (checkpoint / METADATA_FILE).open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
            ends: dict[str, int] = {}  # of the last tensor in each file
            for info in metadata.storage_data.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        except (OSError, pickle.UnpicklingError):
            raise
        except Exception as error:  # a damaged pickle can raise almost any exception
            raise pickle.UnpicklingError(f"{METADATA_FILE}: {error}") from None
    for name, end in ends.items():
        if not name or name == ".." or Path(name).name != name:
            raise pickle.UnpicklingError(f"{METADATA_FILE} names a file outside of the checkpoint: {name!r}")
        if (checkpoint / name).stat().st_size < end:
            raise pickle.UnpicklingError(f"{name} is truncated")
