"""Test what scripts/bench/drafters.py reuses of an earlier call."""

import argparse

import pytest


@pytest.fixture
def script(load_script):
    return load_script("bench.drafters")


def test_results_of_other_options_are_not_reused(script, tmp_path):
    def check(**changed):
        options = {"output_dir": tmp_path / "out", "until": "times", "minutes": 5.0, "dataset": ["a.jsonl"]}
        script.check_options(argparse.Namespace(**options | changed))

    check()
    check(until="speed")
    with pytest.raises(SystemExit, match=r"--minutes 5\.0"):
        check(minutes=10.0)
    with pytest.raises(SystemExit, match=r"--dataset .*a\.jsonl"):
        check(dataset=["b.jsonl"])
