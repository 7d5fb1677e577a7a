"""Test that ranks wait for a slow rank before the first step, and that a hanging rank is named, not the waiting one."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swiftlite.base.errors import LostRank
from swiftlite.runtime import presence
from swiftlite.runtime.distributed import session
from swiftlite.runtime.machine import this_machine
from swiftlite.runtime.presence import wait_for_ranks
from tests.messages import mentions
from tests.parallel.launch import launch
from tests.tiers import all_but, some_of

pytestmark = pytest.mark.gloo

LIMIT = 4  # seconds
MINUTES: Any = LIMIT / 60  # options have whole minutes


def tokenize(slow: int, places: list[str]) -> tuple[str, float]:
    """Work for twice the time limit on rank `slow`, then take a step; return what the first rank of the machine did."""
    presence.BEAT_SECONDS = 0.5
    with session(timeout_minutes=MINUTES):
        os.environ["GROUP_RANK"] = places[dist.get_rank()]
        machine = this_machine()
        is_slow = dist.get_rank() == slow
        said = machine.once(lambda: time.sleep(2 * LIMIT if is_slow else 0) or f"by {dist.get_rank()}")
        wait_for_ranks("reading and tokenizing rows")
        total = torch.ones(1)
        dist.all_reduce(total)
        return said, float(total)


@pytest.mark.parametrize(
    ("slow", "places"),
    all_but([(0, ["0", "0", "0"]), (1, ["0", "1", "1"])], (0, ["0", "0", "0"])),
    ids=["machine", "node"],
)
def test_a_rank_may_need_longer_than_a_step_may(slow, places):
    firsts = [places.index(place) for place in places]
    assert launch(3, tokenize, slow, places) == [(f"by {first}", 3.0) for first in firsts]


def hang(directory: Path, hanging: int, place: str) -> tuple[str, float]:
    """Stop the process of rank `hanging` at a place of the set-up; return what the other rank raised, and when."""
    presence.BEAT_SECONDS = 0.5
    own, other = (directory / str(rank) for rank in (dist_rank(), 1 - dist_rank()))
    own.write_text(str(os.getpid()))
    start = time.monotonic()
    try:
        with session(timeout_minutes=MINUTES):
            machine = this_machine()
            if dist.get_rank() == hanging:
                os.kill(os.getpid(), signal.SIGSTOP)
            if place == "once":
                machine.once(lambda: None)
            wait_for_ranks("reading and tokenizing rows")
            raise AssertionError("the other rank has ended")
    except LostRank as error:
        return str(error), time.monotonic() - start
    except Exception:  # of the rank that was stopped
        assert dist_rank() == hanging
        return "", 0.0
    finally:
        if dist_rank() != hanging:
            os.kill(int(other.read_text()), signal.SIGCONT)


def dist_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize(("hanging", "place"), some_of([(0, "once"), (1, "all"), (0, "all")], (0, "once")))
def test_a_rank_that_hangs_before_the_first_step_is_named(tmp_path, hanging, place):
    (text, seconds) = launch(2, hang, tmp_path, hanging, place)[1 - hanging]
    assert mentions(text, f"{hanging} {socket.gethostname()}")
    assert seconds < 5 * LIMIT
