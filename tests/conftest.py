"""Fixtures shared by all tests."""

import pytest


@pytest.fixture(scope="session")
def mesh():
    """One process with megatron-core's groups, for the whole test session."""
    from swiftlite.runtime.distributed import session

    with session() as mesh:
        yield mesh


@pytest.fixture(scope="session")
def device(mesh):
    """What that process computes on."""
    return mesh.device
