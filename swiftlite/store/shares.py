"""Divide the files of a checkpoint over the ranks that copy it to a store.

Each rank copies the files that it has written, which are still in the memory of its node. The first rank copies the
rest, among it the files of ranks that could not, and completes the copy.
"""

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

_WRITTEN = re.compile(r"__(\d+)_\d+\.distcp")  # by rank N, in megatron-core's format
_POLL_SECONDS = 0.2


class Messages(Protocol):
    """Messages between the ranks by key, such as torch's key-value stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Shares:
    """The ranks that copy a checkpoint.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
        messages: must be set if there are several ranks.
        number: number of the checkpoint in this process, the same on all ranks. A step can be saved twice.
        is_alone: set if the first rank must not wait for others any more, because the run has failed.
    """

    rank: int = 0
    num_ranks: int = 1
    messages: Messages | None = None
    number: int = 0
    is_alone: threading.Event = field(default_factory=threading.Event)

    def of(self, number: int) -> "Shares":
        """Return the shares of another checkpoint."""
        return replace(self, number=number)

    def own(self, names: Iterable[str]) -> list[str]:
        """Return the files that this rank copies. Those of ranks that do not exist are divided as well."""

        def writer(name: str) -> int:
            found = _WRITTEN.fullmatch(name)
            return int(found[1]) % self.num_ranks if found else 0

        return [name for name in names if writer(name) == self.rank]

    def report(self, copied: list[str]) -> None:
        """Tell the first rank which files this rank has copied, none if it has failed or was not reached."""
        assert self.messages is not None
        self.messages.set(self._key(self.rank), json.dumps(copied))

    def copied_by_others(self) -> set[str]:
        """Return the files that the other ranks have copied. Waits for the reports of all of them."""
        copied: set[str] = set()
        for rank in range(1, self.num_ranks):
            assert self.messages is not None
            while not self.messages.check([self._key(rank)]):
                if self.is_alone.wait(_POLL_SECONDS):
                    return copied
            copied.update(json.loads(self.messages.get(self._key(rank))))
        return copied

    def _key(self, rank: int) -> str:
        return f"copied/{self.number}/{rank}"


ALONE = Shares()
"""The shares of a single rank."""
