"""Define process groups whose other ranks do not exist, for code that reads only the numbers of ranks."""

from copy import copy
from dataclasses import replace
from typing import Any

from swiftlite.runtime.mesh import Mesh


class SecondOfTwo:
    """A process group in which this process is the second of two ranks. tests/parallel uses two real ranks."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def as_second_rank(mesh: Mesh, group: str) -> Mesh:
    """Return a mesh in which this process is the second of two ranks of one group, such as `dp_cp`."""
    groups: Any = copy(mesh.groups)
    setattr(groups, group, SecondOfTwo())
    return replace(mesh, groups=groups)
