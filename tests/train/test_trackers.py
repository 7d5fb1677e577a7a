"""Test runs in trackers with their packages and without an account, by reading what they store on this machine.

The packages are not in the requirements: `pip install wandb swanlab mlflow-skinny sqlalchemy alembic`.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.base.redact import redact
from swiftlite.train import phases
from swiftlite.train import run as training
from swiftlite.train.metrics.trackers import TRACKERS, Table, TableLogger, TolerantTracker, TrackedRun, open_trackers
from tests.messages import has_line
from tests.train.prepared import prepare

ANSWER = "a remarkable answer"
CONFIG = redact({"lr": 1e-3, "model": "a model", "nothing": None, "kwargs": {"api_key": "sesame"}})


@pytest.fixture
def wandb_offline(monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()  # it has read these variables


@pytest.fixture
def swanlab_local(monkeypatch):
    pytest.importorskip("swanlab", reason="pip install swanlab")
    pytest.importorskip("pyecharts", reason="pip install pyecharts")
    monkeypatch.setenv("SWANLAB_MODE", "local")


@pytest.fixture(scope="module")
def trackio_local(tmp_path_factory) -> Iterator[Path]:
    """Return the directory of all runs, which the package reads from the environment when it is imported."""
    directory = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(directory))
        pytest.importorskip("trackio", reason="pip install trackio")
        yield directory


@pytest.fixture
def mlflow_local(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    pytest.importorskip("sqlalchemy", reason="pip install sqlalchemy alembic")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def track(name: str, output_dir: Path, first: int, last: int) -> None:
    """Log a run, or the part of it after step `first`."""
    output_dir.mkdir(exist_ok=True)
    (tracker,) = open_trackers([name], output_dir, CONFIG, first)
    for step in range(first + 1, last + 1):
        tracker.log(step, {"loss": 1 / step})
    assert isinstance(tracker, TableLogger) == (name != "mlflow")  # otherwise no table is made
    if isinstance(tracker, TableLogger):
        tracker.log_table(last, Table("completions", ["completion", "accuracy"], [[ANSWER, 0.5]]))
    tracker.summarize({"acceptance_after": 0.75})
    tracker.close()
    assert tracker.tracker is not None  # nothing failed


BLOCK = 32768


def wandb_records(path: Path) -> list:
    """Return the records of a .wandb file: LevelDB's log format after 7 bytes, with a protobuf
    message in each record.
    """
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    content = path.read_bytes()
    assert content.startswith(b":W&B")
    records = []
    data = b""
    position = 7
    while position + 7 <= len(content):
        left = BLOCK - position % BLOCK
        if left < 7:  # too short for a header: padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
            data = b""
    return records


def test_wandb(wandb_offline, tmp_path):
    run = tmp_path / "my run"
    track("wandb", run, 0, 3)
    track("wandb", run, 2, 4)
    first, second = [wandb_records(path) for path in sorted(run.glob("wandb/offline-run-*/*.wandb"))]
    runs = [record.run for records in (first, second) for record in records if record.HasField("run")]
    assert {each.run_id for each in runs} == {json.loads((run / "trackers.json").read_text())["wandb"]}
    assert {(each.project, each.display_name) for each in runs} == {("swiftlite", "my run")}
    rows = []
    for record in first:
        if record.HasField("history"):
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
    losses = [(row["step"], float(row["loss"])) for row in rows if "loss" in row]
    assert losses == [("1", 1.0), ("2", 0.5), ("3", 1 / 3)]
    text = repr(first)
    assert "acceptance_after" in text
    assert "a model" in text
    assert any(ANSWER.encode() in path.read_bytes() for path in stored(tmp_path))


def test_mlflow(mlflow_local, tmp_path):
    run = tmp_path / "my run"
    track("mlflow", run, 0, 3)
    track("mlflow", run, 2, 4)
    client = mlflow_local.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "swiftlite"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == json.loads((run / "trackers.json").read_text())["mlflow"]
    assert (found.info.run_name, found.info.status) == ("my run", "FINISHED")
    assert found.data.params == {"lr": "0.001", "model": "a model", "nothing": "None", "kwargs": "{'api_key': '***'}"}
    assert found.data.metrics["acceptance_after"] == 0.75
    history = client.get_metric_history(found.info.run_id, "loss")
    assert {(each.step, each.value) for each in history} == {(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)}


def test_swanlab(swanlab_local, tmp_path):
    track("swanlab", tmp_path / "run", 0, 3)
    kept = [path for path in (tmp_path / "run/swanlab").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in kept)
    assert b"loss" in content
    assert ANSWER.encode() in content
    assert b"acceptance_after" in content
    assert b"a model" in content


def test_trackio(trackio_local, tmp_path):
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    run = tmp_path / "my run"
    track("trackio", run, 0, 3)
    track("trackio", run, 3, 4)
    name = json.loads((run / "trackers.json").read_text())["trackio"]
    assert name.startswith("my run-")
    lines = SQLiteStorage.get_logs("swiftlite", name)
    assert [(each["step"], each["loss"]) for each in lines if "loss" in each] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (4, 0.25),
    ]
    assert any(ANSWER.encode() in path.read_bytes() for path in stored(trackio_local))
    assert [each["acceptance_after"] for each in lines if "acceptance_after" in each] == [0.75, 0.75]


def stored(*directories: object) -> list[Path]:
    """Return the files in those of the arguments that are directories."""
    found = [path for directory in directories if isinstance(directory, Path) for path in directory.rglob("*")]
    return [path for path in found if path.is_file()]


LOCAL = {"wandb": "wandb_offline", "swanlab": "swanlab_local", "mlflow": "mlflow_local", "trackio": "trackio_local"}


@pytest.mark.parametrize("name", list(TRACKERS))
def test_keys_are_not_told(request, monkeypatch, tmp_path, name):
    """Neither options nor the command line may reveal keys."""
    given = request.getfixturevalue(LOCAL[name])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--api_key", "sesame"])
    track(name, tmp_path / "run", 0, 1)
    kept = stored(tmp_path, given)
    assert kept
    assert [path for path in kept if b"sesame" in path.read_bytes()] == []


def test_a_run_of_sft_is_in_mlflow(mlflow_local, options, mesh, tmp_path):
    run = prepare(options(report_to=["mlflow"], acceptance_samples=2, acceptance_max_new_tokens=4), mesh)
    phases.restore(run)
    phases.fit(run, training.make_trainer(run, phases.state_of(run)), 0, training.make_held_out(run))
    client = mlflow_local.MlflowClient()
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    acceptance = json.loads((tmp_path / "run/acceptance.json").read_text())
    for when in ("before", "after"):
        assert found.data.metrics[f"acceptance_{when}"] == acceptance[when]["generated"]["acceptance_rate"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == losses


class Broken:
    """A tracker whose server stops at step 2."""

    id = "abc"

    def __init__(self, run: TrackedRun):
        self.steps: list[int] = []

    def log(self, step, metrics):
        self.steps.append(step)
        if step >= 2:
            raise ConnectionError("the server has gone away")

    def summarize(self, figures):
        raise AssertionError("nobody asks any more")

    def close(self):
        raise AssertionError("nobody asks any more")


def test_a_tracker_that_fails_is_left_alone(monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(TRACKERS, "wandb", Broken)
    logger.propagate = True
    (tracker,) = open_trackers(["wandb"], tmp_path, {}, 0)
    broken = tracker.tracker
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    tracker.summarize({})
    tracker.close()
    assert isinstance(broken, Broken)
    assert broken.steps == [1, 2]
    assert caplog.text.count("the server has gone away") == 1


def refuse(run: TrackedRun):
    raise PermissionError("no API key")


def test_a_tracker_that_cannot_be_opened_stops_a_new_run_but_not_one_that_goes_on(monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(TRACKERS, "wandb", refuse)
    with pytest.raises(UserError, match=r"--report_to wandb.*no API key") as error:
        open_trackers(["wandb"], tmp_path, {}, 0)
    assert "WANDB_MODE=offline" in error.value.hint
    logger.propagate = True
    assert open_trackers(["wandb"], tmp_path, {}, 2) == []
    assert has_line(caplog.text, "--report_to wandb no API key")
    assert not (tmp_path / "trackers.json").exists()


@pytest.mark.parametrize(
    ("content", "expected"), [("[]", {}), ("half", {}), ('{"wandb": "x", "a": 1}', {"wandb": "x"})]
)
def test_damaged_ids_begin_a_run_of_its_own(monkeypatch, tmp_path, content, expected):
    seen = []

    def remember(run: TrackedRun) -> Broken:
        seen.append(run.known_ids)
        return Broken(run)

    monkeypatch.setitem(TRACKERS, "wandb", remember)
    (tmp_path / "trackers.json").write_text(content)
    (tracker,) = open_trackers(["tensorboard", "wandb"], tmp_path, {}, 1)
    assert isinstance(tracker, TolerantTracker)
    assert seen == [expected]
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb"] == "abc"
