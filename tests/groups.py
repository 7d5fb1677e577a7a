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


def with_second_replica(mesh: Mesh) -> Mesh:
    """Return a mesh in which this process belongs to the second of two data-parallel replicas."""
    groups: Any = copy(mesh.groups)
    groups.dp_cp = groups.expt_dp = SecondOfTwo()
    return replace(mesh, groups=groups)
