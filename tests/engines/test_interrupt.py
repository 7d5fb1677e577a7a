"""Test SIGTERM while an engine runs."""

import os
import signal

import pytest

from swiftlite.engines.interrupt import raises_at_sigterm


def test_sigterm_ends_what_is_under_way():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, raises_at_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
