"""Test torchrun as `launch.py` starts it: real processes, their exit codes, signals and messages."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftlite.runtime.temporary import OWNER
from tests.messages import has_line, mention_each, mentions
from tests.tiers import some_of

pytestmark = pytest.mark.gloo

PRELUDE = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"


# What `swiftlite` does with a command, for one that is only `body`: ranks in one collective after another.
COMMAND = """
import torch, torch.distributed as dist
from swiftlite.cli import main as cli

def run(argv):
    dist.init_process_group("gloo")
    try:
        for step in range(10**9):
            dist.all_reduce(torch.ones(4))
            if step == 10 and rank == int(sys.argv[1]):
                {body}
    finally:
        dist.destroy_process_group()

cli._run = run
sys.exit(cli.main([]))
"""


@pytest.fixture(autouse=True)
def hears_sighup() -> Iterator[None]:
    """Enable SIGHUP, also if the test session runs under nohup, whose setting child processes would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


LAUNCHER = ("-m", "swiftlite.launch.elastic")


def start(
    tmp_path, body: str, *options: str, argv: tuple[str, ...] = (), launcher: tuple[str, ...] = LAUNCHER
) -> subprocess.Popen:
    """Start two ranks that run `body`."""
    (tmp_path / "ranks.py").write_text(PRELUDE + body)
    options = options or ("--nnodes=1", "--master-addr=127.0.0.1", "--master-port=0")
    return subprocess.Popen(
        [sys.executable, *launcher, "--nproc-per-node=2", *options, "ranks.py", *argv],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.05)


def test_the_exit_code_of_the_rank_that_failed(tmp_path):
    process = start(tmp_path, "print('what went wrong', file=sys.stderr) if rank else time.sleep(60)\nsys.exit(7)\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7
    first, last = stderr.splitlines()
    assert first == "what went wrong"
    assert mentions(last, "swiftlite: 1 7")


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGTERM))
def test_a_signal_reaches_every_rank_and_is_waited_for(tmp_path, number):
    body = f"""
def save(*_):
    time.sleep(2)  # a checkpoint takes its time
    Path(f"saved-{{rank}}").touch()
    sys.exit(0)

signal.signal({int(number)}, save)
Path(f"ready-{{rank}}").touch()
time.sleep(60)
"""
    process = start(tmp_path, body)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert mention_each(stderr.splitlines(), [f"swiftlite: {number.name}"])


def test_ranks_end_with_their_launcher(tmp_path):
    """The operating system (out of memory) or a batch system can kill a launcher.

    Remaining ranks would compete with a restarted run.
    """
    body = """
from swiftlite.cli import main as cli
def run(argv):
    Path(f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
cli._run = run
cli.main([])
"""
    process = start(tmp_path, body)
    ready = [tmp_path / "ready-0", tmp_path / "ready-1"]
    wait_for(*ready)
    time.sleep(0.2)  # between touching a file and writing into it
    ranks = [Path(f"/proc/{file.read_text()}") for file in ready]
    assert all(rank.exists() for rank in ranks)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(rank.exists() and "Z" not in (rank / "stat").read_text().split()[2] for rank in ranks):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.05)


@pytest.mark.slow
def test_nohup_keeps_a_job_without_its_terminal(tmp_path):
    body = "Path(f'ready-{rank}').touch()\nwhile not Path('go').exists():\n    time.sleep(0.05)\n"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup's part, inherited
    try:
        process = start(tmp_path, body)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    (tmp_path / "go").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_second_signal_reaches_the_ranks_too(tmp_path):
    body = """
received = []

def stop(number, frame):
    received.append(number)
    Path(f"received-{len(received)}-{rank}").touch()
    if len(received) == 2:
        os._exit(0)

signal.signal(signal.SIGTERM, stop)
Path(f"ready-{rank}").touch()
while True:
    time.sleep(1)
"""
    process = start(tmp_path, body)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "received-1-0", tmp_path / "received-1-1")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "received-2-0").exists()
    assert (tmp_path / "received-2-1").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start_nodes(tmp_path, body: str, *argv: str, launcher: tuple[str, ...] = LAUNCHER) -> list[subprocess.Popen]:
    """Start two launchers as on two nodes, with two ranks each."""
    port = free_port()
    return [
        start(
            tmp_path,
            body,
            "--nnodes=2",
            f"--node-rank={node}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            argv=argv,
            launcher=launcher,
        )
        for node in range(2)
    ]


def test_the_rank_that_raised_is_shown_and_not_those_that_lost_it(tmp_path):
    process = start(tmp_path, COMMAND.format(body="raise ValueError('what went wrong')"), argv=("1",))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.count("Traceback") == 1
    assert "ValueError: what went wrong" in stderr
    assert mentions(stderr.splitlines()[-1], "swiftlite: 1")


@pytest.mark.slow
def test_an_error_of_every_rank_is_shown_once_and_first(tmp_path):
    body = "from swiftlite.base.errors import UserError\nfrom swiftlite.cli import main as cli\n"
    body += "def run(argv):\n    raise UserError('train.jsonl:7: a bad row', 'correct it', 2)\n"
    process = start(tmp_path, body + "cli._run = run\nsys.exit(cli.main([]))\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    first, hint, last = stderr.splitlines()
    assert mentions(first, "swiftlite: train.jsonl:7")
    assert hint.strip() == "correct it"
    assert any(mentions(last, f"swiftlite: {rank} 2") for rank in (0, 1))


@pytest.mark.slow
def test_a_lost_connection_that_nobody_explains_is_shown(tmp_path):
    body = "from swiftlite.cli import main as cli\ndef run(argv):\n    raise RuntimeError('Connection reset by peer')\n"
    process = start(tmp_path, body + "cli._run = run\ntime.sleep(3 * rank)\nsys.exit(cli.main([]))\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.count("RuntimeError: Connection reset by peer") == 1
    assert mentions(stderr.splitlines()[-1], "swiftlite: 0 1")


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_is_named_and_not_the_waiting_one(tmp_path):
    body = """
from datetime import timedelta
import torch, torch.distributed as dist
from swiftlite.cli import main as cli
from swiftlite.runtime import presence
presence.BEAT_SECONDS, presence.AFTER_TIMEOUT_SECONDS = 0.5, 2
os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": os.path.abspath("trace-")}

def run(argv):
    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))
    with presence.signs_of_life(1):
        for step in range(5):
            dist.all_reduce(torch.ones(4), group=group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(4), group=group)

cli._run = run
sys.exit(cli.main([]))
"""
    process = start(tmp_path, body)
    _, stderr = process.communicate(timeout=240)  # torchrun waits for 30 s before it kills a rank
    assert process.returncode == 1
    assert has_line(stderr, "0 gloo:all_reduce 6 --distributed_timeout_minutes")
    assert mentions(stderr.splitlines()[-1], f"swiftlite: 1 {socket.gethostname()} gloo:all_reduce 6")
    assert [path.name for path in tmp_path.glob("trace-*")] == ["trace-0"]
    assert "Traceback" not in stderr


def test_a_launcher_that_was_killed_leaves_no_files_for_ever(tmp_path):
    body = "Path(f'{sys.argv[1]}-{rank}').touch()\nwhile not Path('go').exists():\n    time.sleep(0.05)\n"
    killed = start(tmp_path, body, argv=("ready",))
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    (left,) = tmp_path.glob("swiftlite_*")
    killed.kill()
    killed.wait()
    others = [tmp_path / f"swiftlite_{name}" for name in ("of_another_program", "of_another_machine")]
    for other in others:
        other.mkdir()
    (others[1] / OWNER).write_text("another")
    running = start(tmp_path, body, argv=("again",))
    wait_for(tmp_path / "again-0", tmp_path / "again-1")
    assert not left.exists()
    assert start(tmp_path, "sys.exit(7)").wait(60) == 7
    assert len(list(tmp_path.glob("swiftlite_*"))) == 3  # and not that of the running launcher
    (tmp_path / "go").touch()
    _, stderr = running.communicate(timeout=60)
    assert (running.returncode, stderr) == (0, "")
    assert sorted(tmp_path.glob("swiftlite_*")) == sorted(others)


@pytest.mark.slow
def test_a_rank_that_hears_no_signal_does_not_hold_up_the_end(tmp_path):
    """A rank that waits in a collective is like this: Python's handlers run only after the collective."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsys.exit(7) if rank else time.sleep(600)\n"
    began = time.monotonic()
    process = start(tmp_path, body)
    process.communicate(timeout=120)
    assert process.returncode == 7
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_with_what_it_started(tmp_path):
    body = """
import subprocess
if rank == 0:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    process = start(tmp_path, body)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert mention_each(stderr.splitlines(), ["swiftlite: 0 SIGKILL"])
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}").exists()


@pytest.mark.parametrize("rank", some_of([0, 3], 3))
def test_a_rank_that_is_killed_ends_both_nodes(tmp_path, rank):
    nodes = start_nodes(tmp_path, COMMAND.format(body="os.kill(os.getpid(), signal.SIGKILL)"), str(rank))
    errors = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [128 + signal.SIGKILL] * 2
    here, there = rank // 2, 1 - rank // 2
    assert mention_each(errors[here].splitlines(), [f"swiftlite: {rank} SIGKILL"])
    assert mention_each(errors[there].splitlines(), [f"swiftlite: {rank} {socket.gethostname()} SIGKILL"])


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.slow
def test_a_node_that_notices_nothing_ends_with_the_other(tmp_path, rank):
    """Ranks in an NCCL collective do not notice that another node is lost."""
    lines = (
        "import sys",
        "from swiftlite.launch import elastic, nodes",
        "nodes.GRACE_SECONDS = 2",
        "sys.exit(elastic.main(sys.argv[1:]))",
    )
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    body += (
        "sys.exit(7) if rank == int(sys.argv[1]) else time.sleep(600 if (rank < 2) != (sys.argv[1] == '0') else 0)\n"
    )
    began = time.monotonic()
    nodes = start_nodes(tmp_path, body, str(rank), launcher=("-c", "\n".join(lines)))
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert time.monotonic() - began < 60
    assert [node.returncode for node in nodes] == [7, 7]
    assert has_line(errors[1 - rank // 2], f"swiftlite: {rank} {socket.gethostname()} 7")


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.slow
def test_a_node_whose_ranks_fail_before_it_listens_still_says_so(tmp_path, rank):
    lines = (
        "import sys, time",
        "from swiftlite.launch import elastic, nodes",
        "listen = nodes.Nodes._listen",
        "def late(self):",
        "    time.sleep(4)",
        "    listen(self)",
        "nodes.Nodes._listen, nodes.GRACE_SECONDS = late, 1",
        "sys.exit(elastic.main(sys.argv[1:]))",
    )
    body = f"sys.exit(7) if rank == {rank} else time.sleep(600)\n"
    nodes = start_nodes(tmp_path, body, launcher=("-c", "\n".join(lines)))
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [7, 7]
    assert has_line(errors[1 - rank // 2], f"swiftlite: {rank} {socket.gethostname()} 7")
