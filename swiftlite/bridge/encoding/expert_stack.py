"""Convert between stacked tensors of all experts and tensors of single experts.

Most files have a tensor `experts.{e}.gate_proj.weight` for each expert e; files of MiniMax-M2 have the names of
Mixtral, `experts.{e}.w1.weight` (gate), `w3` (up) and `w2` (down). transformers 5 has the stacked tensors
`experts.gate_up_proj` [experts, 2 * ffn, hidden] and `experts.down_proj` [experts, hidden, ffn] in memory, and can also
write them to files. An expert's part of a stack is contiguous in the file, so it can be an `Entry` (location of a
tensor). All other code uses only tensors of single experts.

Files of gpt-oss always have stacks. Their experts have biases and transposed matrices, and the rows of gate and up
alternate: `experts.gate_up_proj` [experts, hidden, 2 * ffn] and `experts.gate_up_proj_bias` [experts, 2 * ffn]. Tensors
of single experts have the names of the stacks: `experts.{e}.gate_up_proj` [2 * ffn, hidden]. In MXFP4 (`mxfp4.py`),
`experts.gate_up_proj_blocks` and `experts.gate_up_proj_scales` replace the matrices.

Files of Step-3.5 always have one stack per matrix: `moe.gate_proj.weight` [experts, ffn, hidden], `moe.up_proj.weight`
and `moe.down_proj.weight`, and in FP8 also stacks of their scales. Tensors of single experts have the names
`moe.experts.{e}.gate_proj.weight`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from swiftlite.bridge.entry import Entry, TensorTypes

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
# The matrices of one expert in a stack, in order, by the last component of the stack's name.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACK_OF = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_STACK_OF |= {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}  # of Mixtral
# Of gpt-oss. The names of stacks equal those of the parts.
_TRANSPOSED = tuple(_PARTS)
_WITH_ENDING = re.compile(r"(gate_up_proj|down_proj)_(bias|blocks|scales)")
_TRANSPOSED_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.((?:gate_up_proj|down_proj)(?:_bias)?)")
# Of Step-3.5.
_MATRIX = r"((?:gate_proj|up_proj|down_proj)\.weight(?:_scale_inv)?)"
_MATRIX_STACK = re.compile(rf"(.+\.moe)\.{_MATRIX}")
_MATRIX_EXPERT = re.compile(rf"(.+\.moe)\.experts\.(\d+)\.{_MATRIX}")


def unfold(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors' locations, with each stack of experts replaced by the locations of its experts' tensors.

    If a stack has an invalid shape, or its experts also exist as single tensors, it is not replaced, and `binding.py`
    reports it as unexpected.
    """
    unfolded = {}
    transposed = transposed_stacks({key: entry.shape for key, entry in entries.items()})
    for key, entry in entries.items():
        experts = _experts_of(key, entry, has_bias=f"{key}_bias" in entries, is_transposed=key in transposed)
        # Both forms in one directory would leave open which of them is right.
        if experts and entries.keys().isdisjoint(experts):
            unfolded |= experts
        else:
            unfolded[key] = entry
    return unfolded


def transposed_stacks(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of the stacks of transposed matrices, as in published files of Qwen3-VL with experts.

    Args:
        shapes: shapes of all tensors of a model, by name.
    """
    found = set()
    for name, shape in shapes.items():
        prefix, _, last = name.rpartition(".")
        other = f"{prefix}.down_proj"
        if last != "gate_up_proj" or len(shape) != 3 or len(shapes.get(other, ())) != 3:
            continue
        _, hidden, twice_ffn = shape
        if (twice_ffn, hidden) == (2 * shapes[other][1], shapes[other][2]):
            found |= {name, other}
    return found


def fold(tensors: TensorTypes, stacks: Collection[str], transposed: Collection[str] = ()) -> TensorTypes:
    """Return the dtypes and shapes of tensors after single experts are replaced by the stacks in `stacks`.

    Experts of gpt-oss and Step-3.5 are always replaced.

    Args:
        transposed: names of stacks of transposed matrices (`transposed_stacks`).
    """
    folded: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for key, (dtype, shape) in tensors.items():
        name = stack_name(key)
        # Experts are in order, so the last one sets the number.
        if match := _TRANSPOSED_EXPERT.fullmatch(key):
            folded[name] = (dtype, (int(match.group(2)) + 1, *shape[::-1]))
        elif match := _MATRIX_EXPERT.fullmatch(key):
            folded[name] = (dtype, (int(match.group(2)) + 1, *shape))
        elif (match := _EXPERT.fullmatch(key)) and name in stacks:
            matrix = (_num_parts(name) * shape[0], shape[1])
            folded[name] = (dtype, (int(match.group(2)) + 1, *(matrix[::-1] if name in transposed else matrix)))
        else:
            folded[key] = (dtype, shape)
    return folded


def stack(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the tensors of single experts as transformers does in memory. The tensors must be in order.

    Example: gate and up projections of 8 experts, 16 tensors [ffn, hidden], become one [8, 2 * ffn, hidden]. Without
    gates, as in Nemotron-H, the stack is that of the up projections.
    """
    of_experts = [key for key in tensors if stack_name(key).endswith(".experts.gate_up_proj")]
    # The name of the stack alone does not show it: `stack_name` puts gate and up into one.
    has_gates = not all(key.endswith(".up_proj.weight") for key in of_experts)
    members: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        members.setdefault(stack_name(key), []).append(tensor)
    stacked = {}
    for name, parts in members.items():
        if name in tensors:
            stacked[name] = tensors[name]
        elif name.endswith(".experts.gate_up_proj") and not has_gates:
            stacked[name.replace("gate_up_proj", "up_proj")] = torch.stack(parts)
        # Only gpt-oss has biases of experts, and its stacks are transposed.
        elif f"{name}_bias" in members:
            stacked[name] = torch.stack([part.T for part in parts])
        elif name.endswith("_bias") or _MATRIX_STACK.fullmatch(name):
            stacked[name] = torch.stack(parts)
        else:
            by_expert = torch.stack(parts).unflatten(0, (-1, _num_parts(name)))  # [experts, parts, rows, columns]
            stacked[name] = by_expert.flatten(1, 2)
    return stacked


def stack_as_in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack only the experts of gpt-oss and Step-3.5, as in files. The tensors must be in order."""
    experts = {key: tensor for key, tensor in tensors.items() if _always_stacked(key)}
    return {key: tensor for key, tensor in tensors.items() if key not in experts} | stack(experts)


def part_of_stack(stacked: torch.Tensor, key: str) -> torch.Tensor:
    """Return the part of a stack that is the tensor of a single expert of gpt-oss or Step-3.5, as a view."""
    match = _always_stacked(key)
    assert match is not None, key
    part = stacked[int(match.group(2))]
    return part.T if match.re is _TRANSPOSED_EXPERT and part.dim() == 2 else part


def _always_stacked(key: str) -> re.Match[str] | None:
    """Return the parts of the name of an expert's tensor that is a part of a stack in all files of its family: the
    prefix, the number of the expert and the name of the matrix; None for other tensors.
    """
    return _TRANSPOSED_EXPERT.fullmatch(key) or _MATRIX_EXPERT.fullmatch(key)


def stack_name(key: str) -> str:
    """Return the name of the stack that would contain the tensor of an expert; other names are unchanged."""
    if match := _always_stacked(key):
        return f"{match.group(1)}.{match.group(3)}"
    match = _EXPERT.fullmatch(key)
    if not match:
        return key
    return f"{match.group(1)}.{_STACK_OF[match.group(3)]}"


def _num_parts(name: str) -> int:
    """Return the number of matrices per expert in the stack with this name."""
    return len(_PARTS[name.rpartition(".")[2]])


def _experts_of(key: str, entry: Entry, has_bias: bool, is_transposed: bool) -> dict[str, Entry]:
    """Return the locations of the single experts' tensors in a stack; empty if the tensor is not a stack.

    Args:
        has_bias: whether there is also a stack of biases, as in files of gpt-oss.
        is_transposed: whether matrices are transposed, as in files of Qwen3-VL with experts.
    """
    if match := _MATRIX_STACK.fullmatch(key):
        return _matrix_experts(match.group(1), match.group(2), entry)
    prefix, _, name = key.rpartition(".")
    if not prefix.endswith(".experts"):
        return {}
    if _WITH_ENDING.fullmatch(name) or (has_bias and name in _TRANSPOSED):
        return _transposed_experts(prefix, name, entry)
    if name not in _PARTS or len(entry.shape) != 3:
        return {}
    parts = _PARTS[name]
    num_experts, rows, columns = entry.shape
    if is_transposed:
        rows, columns = columns, rows
    if rows % len(parts):
        return {}
    part = replace(entry, shape=(rows // len(parts), columns))
    expert_bytes = len(parts) * part.nbytes
    part_bytes = part.nbytes
    if is_transposed:  # parts are side by side in the rows of the file
        part = replace(part, is_transposed=True, row_length=rows)
        part_bytes = part.shape[0] * entry.dtype.itemsize
    experts = {}
    for expert in range(num_experts):
        for number, matrix in enumerate(parts):
            # In [experts, 2 * ffn, hidden], the gate of expert e begins at row 2e * ffn of the flat rows, and up at (2e
            # + 1) * ffn.
            offset = entry.offset + expert * expert_bytes + number * part_bytes
            experts[f"{prefix}.{expert}.{matrix}.weight"] = replace(part, offset=offset)
    return experts


def _matrix_experts(prefix: str, name: str, entry: Entry) -> dict[str, Entry]:
    """Return the locations of the single experts' tensors in a stack of Step-3.5."""
    if len(entry.shape) != 3:
        return {}
    num_experts, *shape = entry.shape
    part = replace(entry, shape=tuple(shape))
    return {
        f"{prefix}.experts.{expert}.{name}": replace(part, offset=entry.offset + expert * part.nbytes)
        for expert in range(num_experts)
    }


def _transposed_experts(prefix: str, name: str, entry: Entry) -> dict[str, Entry]:
    """Return the locations of the single experts' tensors in a stack of gpt-oss, or of its codes and scales."""
    num_axes = {"bias": 2, "blocks": 4}.get(name.rpartition("_")[2], 3)
    if len(entry.shape) != num_axes:
        return {}
    num_experts, *shape = entry.shape
    if name in _TRANSPOSED:
        part = replace(entry, shape=tuple(shape[::-1]), is_transposed=True)
    else:
        # Codes of gpt-oss are [experts, rows, groups, bytes of a group]: the last two axes are one row of the matrix.
        part = replace(entry, shape=(shape[0], prod(shape[1:])) if len(shape) > 1 else tuple(shape))
    return {
        f"{prefix}.{expert}.{name}": replace(part, offset=entry.offset + expert * part.nbytes)
        for expert in range(num_experts)
    }
