"""Read tensors of a model by the Megatron names of bridge rows, which do not depend on the release of megatron-core."""

from typing import Any

import torch

from swiftlite.bridge.placement import global_name


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters, and buffers that checkpoints contain (a router's expert bias), by their Megatron names."""
    tensors = model.state_dict(keep_vars=True).items()
    return [(global_name(name, model), tensor) for name, tensor in tensors if tensor is not None]


def tensor_of(model: torch.nn.Module, name: str) -> Any:
    """Return the parameter or buffer with a Megatron name."""
    return dict(tensors_of(model))[name]
