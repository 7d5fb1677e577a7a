"""Test the digest of a base model, computed in rounds. tests/parallel/test_slow_ranks.py uses several ranks."""

import pytest

from swiftlite.bridge.adapters.files import digest_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.train.checkpoint import base_digest
from tests.messages import mentions
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize("round_seconds", [-1, 600], ids=["one tensor per round", "one round"])
def test_rounds_after_the_first_are_logged(mesh, tmp_path, caplog, monkeypatch, round_seconds):
    monkeypatch.setattr(base_digest, "ROUND_SECONDS", round_seconds)
    caplog.set_level("INFO")
    hf_dir = make_tiny_hf(tmp_path, "qwen3")
    assert base_digest.shared_digest_of(hf_dir) == digest_of(hf_dir)
    with Checkpoint(hf_dir) as checkpoint:
        total = len(checkpoint.entries)
    lines = [record.getMessage() for record in caplog.records if str(hf_dir) in record.getMessage()]
    read = range(1, total) if round_seconds < 0 else range(0)
    assert len(lines) == len(read)
    assert all(mentions(line, f"{number} {total}") for line, number in zip(lines, read, strict=True))
