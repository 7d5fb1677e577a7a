"""Compute a digest that identifies a base model of adapters or a reference model. All ranks compute it together."""

import math
import time
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from swiftlite.base.log import logger
from swiftlite.bridge.adapters.files import combine_digests, digest_of_tensor
from swiftlite.bridge.tensors import Checkpoint

ROUND_SECONDS = 20.0
"""Seconds for which each rank hashes tensors before all ranks exchange their digests. A rank thus waits for the slowest
rank for at most about this time plus the time of one tensor, which is far less than --distributed_timeout_minutes.
"""


@lru_cache(maxsize=4)
def shared_digest_of(hf_dir: Path) -> str:
    """Return `digest_of` a Hugging Face directory. Collective over all ranks; the result is cached in the process.

    Each rank hashes a share of the tensors. After each round, the remaining tensors are distributed again.
    """
    found: dict[str, str] = {}
    with Checkpoint(hf_dir) as checkpoint:
        # The largest tensors first, so that the shares are about equal.
        keys = sorted(checkpoint.entries, key=lambda key: (-math.prod(checkpoint.entries[key].shape), key))
        while left := [key for key in keys if key not in found]:
            if found:
                logger.info("digest of %s: %d of %d tensors read", hf_dir, len(found), len(keys))
            found |= _hash_some(checkpoint, left)
    return combine_digests(hf_dir, found)


def _hash_some(checkpoint: Checkpoint, keys: list[str]) -> dict[str, str]:
    """Hash some of the tensors `keys`, and return their digests. Collective.

    Every rank that has a share of the tensors hashes at least one.
    """
    deadline = time.monotonic() + ROUND_SECONDS
    mine: dict[str, str] = {}
    for key in keys[dist.get_rank() :: dist.get_world_size()]:
        mine[key] = digest_of_tensor(checkpoint, key)
        if time.monotonic() > deadline:
            break
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return dict(chain.from_iterable(rank_digests.items() for rank_digests in everyone))
