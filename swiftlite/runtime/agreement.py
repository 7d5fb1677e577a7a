"""Check before the first step that all ranks of a run have the same options, data, weights and versions.

Without this check, nodes with different files would combine gradients of different models or rows without an error.
"""

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist

from swiftlite.base.errors import UserError


def digest(value: Any) -> str:
    """Return a short digest of any JSON value. It is the same in every process.

    Raises:
        TypeError: the value is not JSON.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def check_agreement(facts: Mapping[str, str]) -> None:
    """Check that `facts` are the same on all ranks. Collective; returns immediately if there is only one rank.

    If a fact is missing on some ranks, this is also a difference.

    Args:
        facts: by name, a digest, or the value itself if it is short and more informative, such as a version.

    Raises:
        UserError: facts differ; raised on every rank, with the facts that differ and their ranks.
    """
    size = dist.get_world_size()
    if size == 1:
        return
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (socket.gethostname(), dict(facts)))
    problems = differences(everyone)
    if problems:
        raise UserError("ranks have different settings or files:\n  " + "\n  ".join(problems), _HINT)


_HINT = "start all nodes with the same command, the same files and the same environment"


def differences(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a description (one line) of each fact that differs between ranks.

    The most frequent value counts as correct. If several are equally frequent, the value of the lowest rank does.

    Args:
        everyone: (host, facts) of each rank.
    """
    problems = []
    for name in dict.fromkeys(chain.from_iterable(facts for _, facts in everyone)):
        values = [facts.get(name, "absent") for _, facts in everyone]
        (usual, count), *others = Counter(values).most_common()
        if others:
            strangers = [rank for rank, value in enumerate(values) if value != usual]
            listed = [f"{values[rank]} on rank {rank} ({everyone[rank][0]})" for rank in strangers[:_SHOWN]]
            if len(strangers) > _SHOWN:
                listed.append(f"and {len(strangers) - _SHOWN} more ranks")
            problems.append(f"{name}: {usual} on {count} of {len(values)} ranks, but {'; '.join(listed)}")
    return problems


_SHOWN = 8  # the ranks of a node
