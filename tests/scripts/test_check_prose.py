"""Test `scripts/check_prose.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_prose.py"


def check(file: Path, text: str) -> subprocess.CompletedProcess:
    file.write_text(text)
    return subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "# Title\n\nA table\nbeside it.\n", 4),
        ("module.py", '"""What this module does."""\n', 1),
        ("module.py", 'def f():\n    """Return it.\n\n    The run goes on.\n    """\n', 4),
        ("module.py", '"""Do it."""\n\nX = 1  # nobody reads it\n', 3),
        ("module.py", 'raise ValueError(\n    f"{name} wants a value"\n)\n', 2),
    ],
)
def test_a_phrase_is_reported_with_its_line(tmp_path, name, text, line):
    result = check(tmp_path / name, text)
    assert result.returncode == 1
    (reported,) = result.stdout.splitlines()
    assert reported.startswith(f"{tmp_path / name}:{line}: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "There is no checkpoint.\n\n    beside it\n\nThe option `beside` and\n```\nanew\n```\n"),
        ("module.py", '"""Return the next token."""\n\nX = "beside"\n'),
    ],
)
def test_code_and_standard_terms_are_not_reported(tmp_path, name, text):
    result = check(tmp_path / name, text)
    assert (result.returncode, result.stdout) == (0, "")
