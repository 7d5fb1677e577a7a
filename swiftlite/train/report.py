"""run_report.json: what a run did to its data and its tensors, and the proof that frozen tensors stayed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.bridge.tensors import write_durably
from swiftlite.errors import UserError


def hash_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, str]:
    """sha256 of the bytes of each parameter as this rank holds it, by name."""
    return {
        name: hashlib.sha256(parameter.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in _parameters(chunks).items()
    }


def compare_tensors(chunks: Sequence[torch.nn.Module], before: Mapping[str, str]) -> dict[str, Any]:
    """Which tensors changed since `before`, over all ranks; trainable and frozen apart.

    Returns:
        `trunk_sha256` is one hash over all tensors that are not MTP's, before and after.
    """
    after = hash_tensors(chunks)
    trainable = {name for name, parameter in _parameters(chunks).items() if parameter.requires_grad}
    mine = {name: (before[name], after[name], name in trainable) for name in after}
    ranks: list[dict[str, tuple[str, str, bool]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    pairs = {f"rank{rank}.{name}": entry for rank, tensors in enumerate(ranks) for name, entry in tensors.items()}

    def digest(which: int) -> str:
        trunk = "".join(f"{name}{entry[which]}" for name, entry in sorted(pairs.items()) if ".mtp." not in name)
        return hashlib.sha256(trunk.encode()).hexdigest()

    def names(is_trainable: bool, has_changed: bool) -> list[str]:
        return [
            name for name, (old, new, trains) in pairs.items() if trains == is_trainable and (old != new) == has_changed
        ]

    return {
        "trained_tensors": len(names(True, True)),
        "trained_but_unchanged": names(True, False),
        "frozen_tensors": len(names(False, False)),
        "frozen_but_changed": names(False, True),
        "trunk_sha256_before": digest(0),
        "trunk_sha256_after": digest(1),
    }


def _parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Parameters of this rank by name; of virtual pipeline stages, with the number of the stage."""
    return {
        f"stage{number}.{name}" if len(chunks) > 1 else name: parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def check_frozen(tensors: Mapping[str, Any]) -> None:
    """Raises UserError when a tensor that had to stay has changed: a defect, which must not pass as success."""
    if tensors["frozen_but_changed"]:
        names = ", ".join(tensors["frozen_but_changed"][:5])
        raise UserError(
            f"--mtp_mode heads_only changed frozen tensors: {names}", "please report this; do not use the result"
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small file whole or not at all."""
    write_durably(path, (json.dumps(content, indent=2) + "\n").encode())
