"""Test which GPUs are visible to processes that start within the context."""

import subprocess
import sys

import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.devices import on_devices
from tests.messages import naming

SEEN = [sys.executable, "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), end='')"]


def seen() -> str:
    return subprocess.run(SEEN, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [(None, (7,), "7"), ("4,5,6,7", (3, 2), "7,6"), ("GPU-a,GPU-b", (1,), "GPU-b"), (None, (), "None"), ("2", (), "2")],
)
def test_devices_count_from_0_among_those_that_are_visible(monkeypatch, visible, devices, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = seen()
    with on_devices(devices):
        assert seen() == expected
    assert seen() == before


@pytest.mark.parametrize("visible", ["", "0,1"])
def test_a_device_that_is_not_visible_is_refused(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=naming("GPU 2")), on_devices((2,)):
        pass
