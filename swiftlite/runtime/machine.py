"""Do work once per machine, and give its result to all ranks of the machine."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from swiftlite.base.errors import UserError
from swiftlite.runtime.presence import wait_for_first

Result = TypeVar("Result")


@dataclass(frozen=True)
class Machine:
    """The ranks of this machine.

    Attributes:
        ranks: their global ranks, ascending.
        group: their process group; None if this rank is alone.
    """

    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one of its machine."""
        return self.group is None or self.group.rank() == 0

    def once(self, function: Callable[[], Result]) -> Result:
        """Call a function on the first rank of the machine, and return its result on all of them. Collective.

        The function can take hours: the other ranks wait as long as the first one gives signs of life.

        Raises:
            UserError: the function raised a UserError, or another error on the first rank; raised on every rank.
            LostRank: the first rank hangs.
        """
        if self.group is None:
            return function()
        outcome: list[Any] = [None, None]
        failure = None
        if self.is_first:
            try:
                outcome[0] = function()
            except UserError as error:
                outcome[1] = error
            except Exception as error:  # the other ranks must not wait for this one
                failure = error
                outcome[1] = UserError(f"{type(error).__name__} on rank {self.ranks[0]}: {error}")
        wait_for_first(self.ranks, "work that one rank of a machine does for all", is_first=self.is_first)
        dist.broadcast_object_list(outcome, self.ranks[0], group=self.group)
        result, told = outcome
        if failure or told:
            raise failure or told
        return result

    def wait(self) -> None:
        """Wait until all ranks of the machine have called this method. Collective."""
        if self.group is not None:
            dist.barrier(self.group)


def this_machine() -> Machine:
    """Return the ranks of the machine of this rank. Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Machine()
    everyone: list[Any] = [None] * dist.get_world_size()
    # Containers can have equal host names, but each has its own torchrun.
    mine = (socket.gethostname(), os.environ.get("GROUP_RANK"))
    dist.all_gather_object(everyone, mine)
    found = Machine()
    for name in dict.fromkeys(everyone):
        ranks = tuple(rank for rank, other in enumerate(everyone) if other == name)
        group = dist.new_group(list(ranks), backend="gloo")
        if name == mine and len(ranks) > 1 and isinstance(group, dist.ProcessGroup):
            found = Machine(ranks, group)
    return found
