"""Fixtures that run the command in a separate process, without environment variables that would change it."""

import os
import subprocess
import sys

import pytest

STEERING = {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"}


@pytest.fixture
def swiftlite(tmp_path):
    """Return a function such as swiftlite("megatron", "sft", ..., NPROC_PER_NODE="2"). It runs in tmp_path.

    Its result is a CompletedProcess with text output.
    """

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess:
        inherited = {name: value for name, value in os.environ.items() if name not in STEERING}
        return subprocess.run(
            [sys.executable, "-m", "swiftlite", *argv],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=inherited | {"COLUMNS": "100"} | env,
            timeout=300,
            check=False,
        )

    return run
