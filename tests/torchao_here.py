"""Make torchao importable in a test. Elsewhere it is not, because peft imports torchao wherever it can be imported."""

import os
import sys
from pathlib import Path

import pytest

SITE = Path(os.environ.get("SWIFTLITE_TORCHAO_SITE", Path(sys.prefix) / "torchao"))


@pytest.fixture
def torchao(monkeypatch):
    """Return the module `torchao.optim`. Processes that the test starts with multiprocessing can also import it."""
    monkeypatch.syspath_prepend(SITE)
    return pytest.importorskip("torchao.optim", reason=f"torchao is not in {SITE} (requirements/torchao.txt)")
