"""Experts that a file stacks in one tensor, seen as tensors of single experts, and back.

The hub's files have `experts.{e}.gate_proj.weight` and so on; transformers 5 holds `experts.gate_up_proj`
[experts, 2 * ffn, hidden] and `experts.down_proj` [experts, hidden, ffn] in memory, and writes them so when it is asked
not to keep the original format. An expert's part of such a tensor is one stretch of the file, so it is an `Entry` like
any other; rows know single experts only.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from swiftlite.bridge.entry import Entry

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
# Names of the parts of one expert, in the order in which they are stacked.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PACKED = {part: packed for packed, parts in _PARTS.items() for part in parts}


def unfold(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The same entries with every stacked one replaced by those of its experts.

    What cannot be taken apart stays, for the plan to call it unexpected: another shape, or experts that are there on
    their own too.
    """
    unfolded = {}
    for key, entry in entries.items():
        prefix, _, name = key.rpartition(".")
        experts = _experts_of(prefix, _PARTS[name], entry) if prefix.endswith(".experts") and name in _PARTS else {}
        unfolded.update(experts if experts and entries.keys().isdisjoint(experts) else {key: entry})
    return unfolded


def fold(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], packed: Collection[str]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of single experts' tensors, with those replaced whose stacked name is in `packed`."""
    folded: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for key, (dtype, shape) in tensors.items():
        name = packed_name(key)
        if name != key and name in packed:
            (rows, columns), num_parts = shape, len(_PARTS[name.rpartition(".")[2]])
            match = _EXPERT.fullmatch(key)
            assert match
            folded[name] = (dtype, (int(match.group(2)) + 1, num_parts * rows, columns))  # the last expert stays
        else:
            folded[key] = (dtype, shape)
    return folded


def stack(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with those of single experts stacked, as transformers holds them in memory; experts come in order."""
    parts: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        parts.setdefault(packed_name(key), []).append(tensor)
    return {
        name: tensors[name]
        if name in tensors
        else torch.stack(part).unflatten(0, (-1, len(_PARTS[name.rpartition(".")[2]]))).flatten(1, 2)
        for name, part in parts.items()
    }


def packed_name(key: str) -> str:
    """Where a file that stacks experts keeps this tensor: the name of the stack, or the tensor's own."""
    match = _EXPERT.fullmatch(key)
    return f"{match.group(1)}.{_PACKED[match.group(3)]}" if match else key


def _experts_of(prefix: str, parts: tuple[str, ...], entry: Entry) -> dict[str, Entry]:
    if len(entry.shape) != 3 or entry.shape[1] % len(parts):
        return {}
    num_experts, rows, columns = entry.shape
    part = replace(entry, shape=(rows // len(parts), columns))
    keys = [f"{prefix}.{expert}.{name}.weight" for expert in range(num_experts) for name in parts]
    return {key: replace(part, offset=entry.offset + number * part.nbytes) for number, key in enumerate(keys)}
