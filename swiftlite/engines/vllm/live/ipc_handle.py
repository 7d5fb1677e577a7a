"""Convert the CUDA IPC handle of a GPU buffer to numbers and strings, so that another process can open the buffer.

vLLM sends the arguments of torch's function, which include Python types, so the receiver has to unpickle them. Numbers
and strings can be sent as JSON.
"""

import base64
from collections.abc import Sequence
from typing import Any

import torch

# Arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor that differ between buffers, by position.
_NUMBERS = {"num_bytes": 8, "offset_bytes": 9, "ref_counter_offset": 12, "event_sync_required": 14}
_HANDLES = {"storage": 7, "ref_counter": 11, "event": 13}


def as_plain_values(arguments: Sequence[Any]) -> dict[str, Any]:
    """Convert the arguments of torch's `reduce_tensor` to numbers and strings.

    Args:
        arguments: the arguments for a flat tensor of bytes.
    """
    [length] = arguments[1]
    values = {name: arguments[place] for name, place in _NUMBERS.items()}
    handles = {name: base64.b64encode(arguments[place]).decode() for name, place in _HANDLES.items()}
    return {"length": length, **values, **handles}


def as_arguments(values: dict[str, Any], device: int) -> list[Any]:
    """Convert the result of `as_plain_values` back, for a process on GPU number `device`.

    Raises:
        ValueError: a value is missing, or a handle is not base64.
    """
    if missing := {"length", *_NUMBERS, *_HANDLES} - values.keys():
        raise ValueError(f"the handle of a buffer has no {', '.join(sorted(missing))}")
    # In the order of rebuild_cuda_tensor (torch/multiprocessing/reductions.py), with types set here, not received.
    arguments: list[Any] = [None] * 15
    arguments[:7] = [torch.Tensor, (values["length"],), (1,), 0, torch.storage.TypedStorage, torch.uint8, device]
    for name, place in _NUMBERS.items():
        arguments[place] = values[name]
    for name, place in _HANDLES.items():
        arguments[place] = base64.b64decode(values[name], validate=True)
    arguments[10] = False  # requires_grad
    return arguments
