"""Test when signals end work."""

import signal

import pytest

from swiftlite.train.stopping import EarlyStop, Stopped, StopSignals, handled_later


def test_a_signal_does_not_end_work_that_all_ranks_do_together():
    done = []

    def work(stop: EarlyStop) -> None:
        with stop.raising():
            with handled_later():
                signal.raise_signal(signal.SIGTERM)
                done.append("together")
            done.append("alone")

    with StopSignals() as signals, EarlyStop() as stop:
        with pytest.raises(Stopped):
            work(stop)
        assert done == ["together"]
        assert stop.received
        assert signals.received == signal.SIGTERM
