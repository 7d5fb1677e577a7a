"""Define the environment of engines that a trainer starts: their GPUs, and no variables of torchrun."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from swiftlite.base.errors import UserError


@contextmanager
def on_devices(devices: Sequence[int]) -> Iterator[None]:
    """Make only these GPUs visible to processes that start within the context.

    Args:
        devices: indices among the GPUs visible to this process; empty: all GPUs remain visible.

    Raises:
        UserError: an index exceeds the number of visible GPUs.
    """
    if not devices:
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = list(map(str, range(max(devices) + 1)))
    if before is not None:
        visible = before.split(",")
    if before == "" or max(devices) >= len(visible):
        raise UserError(
            f"invalid GPU {max(devices)} for the engine: CUDA_VISIBLE_DEVICES={before} has fewer",
            "use indices of visible GPUs, starting at 0",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[place] for place in devices)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def outside_torchrun() -> Iterator[None]:
    """Hide torchrun's environment variables. The processes of an engine would use them, and would wait for a store that
    does not exist.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    parts = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    hidden = {name: value for name, value in os.environ.items() if name in names or name.startswith(parts)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
