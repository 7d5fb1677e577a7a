"""Fixtures with training data for all tests of this folder."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    """Write forty short questions with answers."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    asked = [{"query": f"What is {number} plus {number}?", "response": f"It is {2 * number}."} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return path
