"""Test that each detector finds what it is for, names the line that caused it, and accepts similar valid operations."""

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cuda_emulated import library, wrong

pytestmark = [
    pytest.mark.cuda_emulated,
    pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "there is a compiler"),
]
WRONG = [(kind, name) for kind, operations in wrong.WRONG.items() for name in operations]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.cuda_emulated.detect"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout)


def lines_of(code: Any) -> set[int]:
    """Return the numbers of all lines of a function."""
    inner = [lines_of(part) for part in code.co_consts if inspect.iscode(part)]
    return {line for _, _, line in code.co_lines()}.union(*inner)


@pytest.mark.parametrize(("kind", "name"), WRONG)
def test_what_is_wrong_is_seen(found, kind, name):
    events = found["events"][name]
    assert {event["kind"] for event in events} == {kind}
    lines = lines_of(wrong.WRONG[kind][name].__code__)
    for event in events:
        path, _, line = event["line"].partition(":")
        assert path == "tests/cuda_emulated/wrong.py"
        assert int(line.split(",")[0]) in lines
        # What CUDA refuses is refused.
        assert bool(event["error"]) == (kind in ("mixed", "generator"))


def test_a_wait_in_a_backward_pass_is_not_at_a_border(found):
    (event,) = found["events"]["waits_in_the_backward_pass"]
    assert event["region"] == "backward"


@pytest.mark.parametrize("name", wrong.RIGHT)
def test_what_is_right_is_let_pass(found, name):
    assert found["events"][name] == []


def test_launches_are_kernels(found):
    launches = found["launches"]
    assert launches["views"] == {}
    assert launches["a_product_and_its_gradient"] == {"border": 1, "backward": 1}
    assert launches["a_compiled_function"] == {"border": 1, "backward": 1}
    assert launches["attention"] == {"border": 1, "backward": 1}


@pytest.mark.slow
def test_a_compiler_is_asked_once(tmp_path, monkeypatch):
    """The library is cached for the version of torch and of the source."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = library.build()
    monkeypatch.setenv("PATH", "")
    assert library.build() == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]
