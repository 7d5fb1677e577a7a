"""Test which mutants scripts/mutants.py makes, and that it recognizes detected ones."""

import pytest

SOURCE = '''"""A module of 1 + 1."""

def clamp(value: int | None, most: int = 3) -> list[int]:
    assert value != 0
    if value < 2 and most:
        raise ValueError(f"{most + 1} is too much", 1)
    for one in sorted(most, key=value):
        log.total += one
    return value
'''


@pytest.fixture
def script(load_script):
    return load_script("mutants")


def test_what_is_changed(script, tmp_path):
    path = tmp_path / "é.py"
    path.write_text(SOURCE)
    mutants = script.mutants_of(str(path))
    assert [str(mutant).removeprefix(f"{path}:") for mutant in mutants] == [
        "3:42: 3 -> 4",
        "3:42: 3 -> (2)",
        "5:8: value < 2 and most -> (not (value < 2 and most))",
        "5:8: value < 2 and most -> (value < 2 or most)",
        "5:8: value < 2 -> (value <= 2)",
        "5:8: value < 2 -> (value >= 2)",
        "5:16: 2 -> 3",
        "5:16: 2 -> (1)",
        "6:9: raise ValueError(f'{most + 1} is too much', 1) -> pass",
        "7:16: sorted(most, key=value) -> ()",
        "7:16: sorted(most, key=value) -> sorted(most)",
        "8:9: log.total += one -> pass",
        "9:12: value -> None",
    ]
    for mutant in mutants:
        compile(mutant.source, mutant.path, "exec")
        before, after = SOURCE.splitlines(), mutant.source.decode().splitlines()
        changed = [number for number, lines in enumerate(zip(before, after, strict=True), 1) if lines[0] != lines[1]]
        assert changed == [mutant.line]


def test_the_interval(script):
    """Wilson's interval of 90 in 100 is 0.8256 to 0.9448 (formula in Brown, Cai, DasGupta 2001)."""
    assert script.interval(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
