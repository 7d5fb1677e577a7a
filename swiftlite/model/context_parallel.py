"""placeholder"""

import torch


def shard_sequence(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    if size == 1:
        return tensor
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def unshard_sequence(parts, dim: int) -> torch.Tensor:
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim)
