"""Test a run with names of a model and data on the hub, in two processes, and resumed in one while the hub changes."""

import json
import shutil
from pathlib import Path

import pytest

from swiftlite.plan.facts import model_of_run
from tests.hub.asking import answers, start
from tests.hub.conftest import ROWS, SFT
from tests.hub.server import files_of
from tests.messages import has_line

pytestmark = pytest.mark.gloo


def test_the_launcher_asks_once_for_all_ranks(run):
    asked = json.loads((run / "asked.json").read_text())
    weights = [method for method, path in asked if path.endswith("model.safetensors")]
    assert weights == ["HEAD", "GET"]
    assert len([path for _, path in asked if path.endswith("/revision/main")]) == 2  # of the model and of the dataset
    assert json.loads((run / "run" / "args.json").read_text())["model"] == "org/tiny"
    commits = json.loads((run / "run" / "commits.json").read_text())
    assert list(commits) == ["models/org/tiny@main", "datasets/org/rows@main"]
    said = (run / "stderr").read_text()
    told = f"org/tiny {commits['models/org/tiny@main']}"
    assert [has_line(line, told) for line in said.splitlines()].count(True) == 1
    assert has_line(said, "org/rows#20 20 24 4")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_commits(hub, tiny, run, tmp_path):
    """The newest commits of main contain another model and other rows."""
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    began_with = json.loads((tmp_path / "run" / "commits.json").read_text())
    hub.add("org/tiny", files_of(tiny) | {"config.json": b"{}"})
    hub.add("org/rows", {"rows.jsonl": ROWS[:100]}, kind="datasets")
    more = ("--resume", "--train_iters", "3")
    done = start(hub, tmp_path, *SFT, *more)
    assert done.returncode == 0, done.stderr
    for key, commit in began_with.items():
        assert has_line(done.stderr, f"--resume {key} {commit}")
    assert hub.asked == []
    assert json.loads((tmp_path / "run" / "commits.json").read_text()) == began_with


def began(run: str) -> str | None:
    return model_of_run(Path(run))


def test_the_model_that_a_run_began_with_is_the_one_of_its_commit(hub, run, tmp_path):
    began_with = json.loads((run / "run" / "commits.json").read_text())["models/org/tiny@main"]
    shutil.copytree(run / "home", tmp_path / "home")
    (name,) = answers(hub, tmp_path / "home", (f"{__name__}:began", str(run / "run")))
    assert name == f"org/tiny@{began_with}"
    assert hub.asked == []


def test_a_resumed_run_takes_no_other_name(hub, run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    words = [word if word != "org/tiny" else "org/tiny@main" for word in SFT]
    done = start(hub, tmp_path, *words, "--resume")
    assert done.returncode == 2
    assert has_line(done.stderr, "--resume --model org/tiny@main org/tiny")


def test_a_wrong_option_is_said_before_the_weights_are_fetched(hub, tmp_path):
    hub.add("org/rows", {"rows.jsonl": ROWS}, kind="datasets")
    done = start(hub, tmp_path, *SFT, "--tensor_model_parallel_size", "3", NPROC_PER_NODE="2")
    assert done.returncode == 2
    assert "3" in done.stderr
    fetched = {path.rpartition("/")[2] for method, path in hub.asked if method == "GET" and "/resolve/" in path}
    assert "config.json" in fetched
    assert not fetched & {"model.safetensors", "rows.jsonl"}


@pytest.mark.slow
def test_two_nodes_that_have_other_commits_do_not_train(hub, tiny, tmp_path):
    """Each node has a separate cache, and a new commit is pushed between their requests."""
    from concurrent.futures import ThreadPoolExecutor

    repository = hub.repositories["models/org/tiny"]
    first = repository.resolve("main")
    repository.commit(files_of(tiny) | {"LICENSE": b"new"})
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    words = [word if word != "org/rows#20" else str(tmp_path / "rows.jsonl") for word in SFT]
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    older = json.dumps({"models/org/tiny@main": first})

    def node(rank: int, known: str):
        directory = tmp_path / f"node-{rank}"
        directory.mkdir()
        return start(hub, directory, *words, **nodes, NODE_RANK=str(rank), SWIFTLITE_COMMITS=known)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (0, 1), ("", older)))
    assert all(end.returncode != 0 for end in ends)
    assert has_line(ends[0].stderr + ends[1].stderr, "--model")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
