"""Process groups whose other ranks do not exist, for code that depends only on the number of a rank."""

from copy import copy
from dataclasses import replace
from typing import Any

from swiftlite.runtime.mesh import Mesh


class SecondOfTwo:
    """What is asked of a process group, on the second of its two ranks; two real ones are in tests/parallel."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def with_second_replica(mesh: Mesh) -> Mesh:
    """Return a mesh in which another data-parallel rank is the first one."""
    groups: Any = copy(mesh.groups)
    groups.dp_cp = groups.expt_dp = SecondOfTwo()
    return replace(mesh, groups=groups)
