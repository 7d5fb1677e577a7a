"""Convert between stacked tensors of all experts and tensors of single experts.

Most files have a tensor `experts.{e}.gate_proj.weight` for each expert e. transformers 5 has the stacked tensors
`experts.gate_up_proj` [experts, 2 * ffn, hidden] and `experts.down_proj` [experts, hidden, ffn] in memory, and can also
write them to files. An expert's part of a stack is contiguous in the file, so it can be an `Entry` (location of a
tensor). All other code uses only tensors of single experts.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from swiftlite.bridge.entry import Entry, TensorTypes

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
# The matrices of one expert in a stack, in order, by the last component of the stack's name.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACK_OF = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


def unfold(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors' locations, with each stack of experts replaced by the locations of its experts' tensors.

    If a stack has an invalid shape, or its experts also exist as single tensors, it is not replaced, and `binding.py`
    reports it as unexpected.
    """
    unfolded = {}
    for key, entry in entries.items():
        experts = _experts_of(key, entry)
        if experts and entries.keys().isdisjoint(experts):
            unfolded |= experts
        else:
            unfolded[key] = entry
    return unfolded


def fold(tensors: TensorTypes, stacks: Collection[str]) -> TensorTypes:
    """Return the dtypes and shapes of tensors after single experts are replaced by the stacks in `stacks`."""
    folded: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for key, (dtype, shape) in tensors.items():
        match = _EXPERT.fullmatch(key)
        name = stack_name(key)
        if not match or name not in stacks:
            folded[key] = (dtype, shape)
            continue
        num_experts = int(match.group(2)) + 1  # experts are in order, so the last one sets the number
        rows, columns = shape
        folded[name] = (dtype, (num_experts, _num_parts(name) * rows, columns))
    return folded


def stack(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the tensors of single experts as transformers does in memory. The tensors must be in order.

    Example: gate and up projections of 8 experts, 16 tensors [ffn, hidden], become one [8, 2 * ffn, hidden].
    """
    members: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        members.setdefault(stack_name(key), []).append(tensor)
    stacked = {}
    for name, parts in members.items():
        if name in tensors:
            stacked[name] = tensors[name]
        else:
            by_expert = torch.stack(parts).unflatten(0, (-1, _num_parts(name)))  # [experts, parts, rows, columns]
            stacked[name] = by_expert.flatten(1, 2)
    return stacked


def stack_name(key: str) -> str:
    """Return the name of the stack that would contain the tensor of an expert; other names are unchanged."""
    match = _EXPERT.fullmatch(key)
    if not match:
        return key
    return f"{match.group(1)}.{_STACK_OF[match.group(3)]}"


def _num_parts(name: str) -> int:
    """Return the number of matrices per expert in the stack with this name."""
    return len(_PARTS[name.rpartition(".")[2]])


def _experts_of(key: str, entry: Entry) -> dict[str, Entry]:
    """Return the locations of the single experts' tensors in a stack; empty if the tensor is not a stack."""
    prefix, _, name = key.rpartition(".")
    if not prefix.endswith(".experts") or name not in _PARTS or len(entry.shape) != 3:
        return {}
    parts = _PARTS[name]
    num_experts, rows, columns = entry.shape
    if rows % len(parts):
        return {}
    part = replace(entry, shape=(rows // len(parts), columns))
    experts = {}
    offset = entry.offset
    for expert in range(num_experts):
        for matrix in parts:
            experts[f"{prefix}.{expert}.{matrix}.weight"] = replace(part, offset=offset)
            offset += part.nbytes
    return experts
