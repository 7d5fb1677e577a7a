"""Write run_report.json: statistics of the data, the changes of tensors, and a check that frozen tensors did not
change.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.bridge.transfer import WeightsReport
from swiftlite.data.dataset import Data
from swiftlite.plan.trainable import Trainable, is_head_parameter

REPORT_FILE = "run_report.json"


class Hashed(NamedTuple):
    """Hashes of one parameter of one rank before and after training."""

    before: str
    after: str
    learns: bool
    is_head_parameter: bool

    @property
    def has_changed(self) -> bool:
        return self.before != self.after


def hash_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Compute the sha256 of each parameter's bytes on this rank, by label (see `_parameters`)."""
    return {label: hash_tensor(parameter) for label, _, parameter in _parameters(chunks)}


def compare_tensors(
    chunks: Sequence[torch.nn.Module], before: Mapping[str, str], trainable: Trainable
) -> dict[str, Any]:
    """Return which tensors changed on any rank since `before`, separately for trained and frozen tensors. Collective.

    Args:
        before: result of `hash_tensors` for the same chunks before training.

    Returns:
        Keys and values for run_report.json; `trunk_sha256_...` is one hash over all tensors outside of MTP heads.
    """
    mine = {
        label: Hashed(before[label], hash_tensor(parameter), trainable.learns(name), is_head_parameter(name))
        for label, name, parameter in _parameters(chunks)
    }
    ranks: list[dict[str, Hashed]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    tensors: dict[str, Hashed] = {}
    for rank, hashed in enumerate(ranks):
        tensors |= {f"rank{rank}.{label}": tensor for label, tensor in hashed.items()}

    def names(learns: bool, has_changed: bool) -> list[str]:
        chosen = (learns, has_changed)
        return [name for name, tensor in tensors.items() if (tensor.learns, tensor.has_changed) == chosen]

    trunk = {name: tensor for name, tensor in sorted(tensors.items()) if not tensor.is_head_parameter}
    return {
        "trained_tensors": len(names(learns=True, has_changed=True)),
        "trained_but_unchanged": names(learns=True, has_changed=False),
        "frozen_tensors": len(names(learns=False, has_changed=False)),
        "frozen_but_changed": names(learns=False, has_changed=True),
        "trunk_sha256_before": _sha256_of_all({name: tensor.before for name, tensor in trunk.items()}),
        "trunk_sha256_after": _sha256_of_all({name: tensor.after for name, tensor in trunk.items()}),
    }


def _parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yield (label, name, parameter) for each parameter of this rank.

    Names are unique in a chunk. If there are several virtual pipeline stages, labels have the stage's number as a
    prefix.
    """
    for number, chunk in enumerate(chunks):
        prefix = f"stage{number}." if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            yield f"{prefix}{name}", name, parameter


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return the sha256 of a tensor's bytes."""
    content = tensor.detach().contiguous().cpu().view(torch.uint8).flatten().numpy()
    return hashlib.sha256(content.data).hexdigest()  # without a copy


def _sha256_of_all(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}{value}" for name, value in hashes.items()).encode()).hexdigest()


def check_frozen(tensors: Mapping[str, Any], trainable: Trainable) -> None:
    """Raise UserError if a frozen tensor has changed. Such a change is a defect, so the run must fail.

    Args:
        tensors: result of `compare_tensors`.
    """
    if tensors["frozen_but_changed"]:
        names = ", ".join(tensors["frozen_but_changed"][:5])
        raise UserError(
            f"{trainable.option} changed frozen tensors: {names}", "please report this; do not use the result"
        )


def write_report(
    output_dir: Path, measured: Mapping[str, Any], data: Data, weights: WeightsReport, tensors: Mapping[str, Any]
) -> None:
    """Write run_report.json.

    Args:
        measured: keys and values to write first: steps, seconds, and metrics of the last evaluation.
        tensors: result of `compare_tensors`.
    """
    content = {
        **measured,
        "data": data.report.as_dict(),
        "data_sha256": data.digest,
        "weights": {
            "loaded": len(weights.loaded),
            "initialized": dict(weights.initialized),
            "dropped": list(weights.dropped),
        },
        "tensors": tensors,
    }
    atomic_write(output_dir / REPORT_FILE, (json.dumps(content, indent=2) + "\n").encode())
