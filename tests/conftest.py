"""Fixtures shared by all tests."""

import pytest


@pytest.fixture(scope="session")
def device():
    """One process with megatron-core's groups, for the whole test session."""
    from swiftlite.runtime.distributed import session

    with session() as device:
        yield device
