"""Compute a digest that identifies the base model of adapters or a reference model, together on all ranks."""

import math
import time
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from swiftlite.bridge.adapters.files import combine_digests, digest_of_tensor
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.log import logger

ROUND_SECONDS = 20.0
"""Seconds that a rank hashes before all ranks exchange their digests. A rank waits for another one for at most about
this time plus the time of one tensor, far less than --distributed_timeout_minutes for a model of any size.
"""


@lru_cache(maxsize=4)
def shared_digest_of(hf_dir: Path) -> str:
    """Return `digest_of` a Hugging Face directory, read once per process; collective over all ranks.

    Each rank hashes a share of the tensors. After each round, the tensors that are left are distributed again.
    """
    found: dict[str, str] = {}
    with Checkpoint(hf_dir) as checkpoint:
        # The largest tensors first, so that the shares are about equal.
        keys = sorted(checkpoint.entries, key=lambda key: (-math.prod(checkpoint.entries[key].shape), key))
        while left := [key for key in keys if key not in found]:
            found |= _hash_some(checkpoint, left)
            if len(found) < len(keys):
                logger.info("digest of %s: %d of %d tensors read", hf_dir, len(found), len(keys))
    return combine_digests(hf_dir, found)


def _hash_some(checkpoint: Checkpoint, keys: list[str]) -> dict[str, str]:
    """Return the digests of some of the tensors `keys`, at least one per rank that has a share; collective."""
    deadline = time.monotonic() + ROUND_SECONDS
    mine: dict[str, str] = {}
    for key in keys[dist.get_rank() :: dist.get_world_size()]:
        mine[key] = digest_of_tensor(checkpoint, key)
        if time.monotonic() > deadline:
            break
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return dict(chain.from_iterable(rank_digests.items() for rank_digests in everyone))
