"""Test reading metrics.jsonl."""

import json

from swiftlite.report.metrics import curve, read_metrics


def test_lines_that_are_whole(tmp_path):
    whole = [{"step": 1, "loss": 2.5}, {"step": 2, "eval_loss": 1}, {"step": 3, "loss": "nan"}]
    lines = [json.dumps(line).encode() for line in whole]
    (tmp_path / "metrics.jsonl").write_bytes(
        b"\n".join([*lines, b"\0\0", b"[1]", b'{"loss": 1}', b"\xff", b'{"step": 4, "lo'])
    )
    metrics = read_metrics(tmp_path)
    assert metrics == whole
    assert curve(metrics, "loss") == [(1, 2.5)]


def test_no_file_is_no_line(tmp_path):
    assert read_metrics(tmp_path) == []
