"""Runs the command as a user does: a process of its own, with nothing of this one's environment that steers it."""

import os
import subprocess
import sys

import pytest

STEERING = {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"}


@pytest.fixture
def swiftlite(tmp_path):
    """swiftlite("megatron", "sft", ..., NPROC_PER_NODE="2") -> CompletedProcess with text output, run in tmp_path."""

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
