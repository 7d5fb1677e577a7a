"""Test metric loggers: the file after resuming, and the progress bar."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.train.metrics.loggers import MetricsFile, ProgressBar, TensorBoard, open_metric_loggers
from tests.messages import has_line, naming


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_step_that_is_there_at_once(tmp_path):
    metric_logger = MetricsFile(tmp_path / "metrics.jsonl", 0, 9)
    metric_logger.log(1, {"loss": 2.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}]  # before it is closed
    metric_logger.log(2, {"loss": 2.0, "grad_norm": 1.0})
    metric_logger.close()
    assert lines(tmp_path / "metrics.jsonl")[1] == {"step": 2, "loss": 2.0, "grad_norm": 1.0}


@pytest.mark.parametrize(("first", "kept"), [(2, [1, 2]), (5, [1, 2, 3]), (0, [])])
def test_a_resumed_run_cuts_the_lines_that_it_will_write_again(tmp_path, first, kept):
    """Steps after the checkpoint were logged before the process was lost. A new run starts with an empty file."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in (1, 2, 3)))
    metric_logger = MetricsFile(path, first, 9)
    metric_logger.log(9, {"loss": 0.0})
    metric_logger.close()
    assert [line["step"] for line in lines(path)] == [*kept, 9]


def test_the_last_evaluation_is_there_once(tmp_path):
    """A finished run that resumes evaluates again. An unfinished run keeps its last evaluation."""
    path = tmp_path / "metrics.jsonl"
    step, evaluation = {"step": 3, "loss": 1.0}, {"step": 3, "eval_loss": 2.0}
    path.write_text(json.dumps(step) + "\n" + json.dumps(evaluation) + "\n")
    MetricsFile(path, 3, 6).close()
    assert lines(path) == [step, evaluation]
    metric_logger = MetricsFile(path, 3, 3)
    metric_logger.log(3, {"eval_loss": 2.0})
    metric_logger.close()
    assert lines(path) == [step, evaluation]


def test_the_bar_shows_the_step_and_short_names(capsys):
    bar = ProgressBar(10)
    bar.log(3, {"loss": 1.25, "learning_rate": 1e-4, "tokens_per_second": 12345.678})
    assert bar.bar is not None
    assert (bar.bar.n, bar.bar.total) == (3, 10)
    assert bar.bar.postfix == "loss=1.25 lr=0.0001 tok/s=1.235e+04"
    bar.log(4, {"loss": 1.0})
    assert bar.bar.n == 4
    bar.close()
    assert bar.bar.disable  # tqdm's word for closed


def test_an_evaluation_is_a_line_of_its_own(capsys):
    bar = ProgressBar(10)
    bar.log(5, {"eval_loss": 0.5})
    bar.close()
    assert capsys.readouterr().err == "step 5: eval_loss=0.5\n"
    assert bar.bar is None  # the bar's clock has not begun


def test_a_resumed_run_hides_the_scalars_that_it_will_write_again(tmp_path):
    """The files are read by TensorBoard itself."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, loss in ((0, 1.0), (2, 0.5)):
        metric_logger = TensorBoard(tmp_path, first)
        for step in range(first + 1, 5):
            metric_logger.log(step, {"loss": loss})
        metric_logger.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 1), (3, 0.5), (4, 0.5)]


def test_tensorboard_is_left_out_where_it_is_not_installed(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", logger=logger.name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as Python does for a module that is not there
    metric_loggers = open_metric_loggers(tmp_path, 0, 10, ["tensorboard"])
    assert [type(metric_logger).__name__ for metric_logger in metric_loggers] == ["ProgressBar", "MetricsFile"]
    assert has_line(caplog.text, "pip install tensorboard")
    for metric_logger in metric_loggers:
        metric_logger.close()


def test_what_a_full_disk_or_a_killed_process_left_is_left_out(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "loss": 2.5}\n'
    path.write_bytes(whole + b"\n" + b"\0\0\0\n" + b"[1]\n" + b'{"loss": 1}\n' + b"\xff\n" + b'{"step": 2, "lo')
    logger.propagate = True
    metric_logger = MetricsFile(path, 5, 9)
    metric_logger.log(6, {"loss": 1.0})
    metric_logger.close()
    assert lines(path) == [{"step": 1, "loss": 2.5}, {"step": 6, "loss": 1.0}]
    assert has_line(caplog.text, "metrics.jsonl: 6")


def test_metrics_that_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=naming("metrics.jsonl")):
        MetricsFile(tmp_path / "metrics.jsonl", 5, 9)


def test_a_full_disk_is_named(tmp_path):
    metric_logger = MetricsFile(tmp_path / "metrics.jsonl", 0, 9)
    metric_logger.close()
    metric_logger.file = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics\.jsonl.*No space left on device"):
        metric_logger.log(1, {"loss": 1.0})
    with contextlib.suppress(OSError):
        metric_logger.close()
