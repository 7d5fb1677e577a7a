"""Test the rules of --profile_steps."""

import dataclasses

import pytest

from swiftlite import rules
from tests.messages import mention_each, mentions
from tests.rules.good import SFT, problems_of


def profiled(*steps: int, **options):
    return dataclasses.replace(SFT, **{"profile_steps": list(steps), "train_iters": 20} | options)


@pytest.mark.parametrize("steps", [(3,), (1, 2, 3), (0, 2), (5, 4), (-1, 3)])
def test_steps_are_a_first_and_a_last_one(here, steps):
    ((problem, hint),) = problems_of(profiled(*steps))
    assert mentions(problem, f"--profile_steps {' '.join(map(str, steps))}")
    assert mentions(hint, "--profile_steps 10 12")


def test_steps_are_steps_of_the_run(here):
    ((problem, _),) = problems_of(profiled(19, 21))
    assert mentions(problem, "--profile_steps 19 21 --train_iters 20")
    assert rules.check(profiled(20, 20)) == []


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1]])
def test_ranks_are_ranks_of_the_run(here, ranks):
    assert mention_each(problems_of(profiled(1, 2, profile_ranks=ranks)), ["--profile_ranks"])


@pytest.mark.parametrize("kind", ["memory", "nsys"])
def test_what_only_a_gpu_has_is_not_recorded_on_a_cpu(here, kind, monkeypatch):
    monkeypatch.setattr(rules, "sees_gpu", lambda: False)
    ((problem, hint),) = problems_of(profiled(1, 2, profile_kind=kind))
    assert mentions(problem, f"--profile_kind {kind} GPU")
    assert mentions(hint, "--profile_kind torch")
    assert rules.check(profiled(1, 2, profile_kind=kind, dry_run=True)) == []
    monkeypatch.setattr(rules, "sees_gpu", lambda: True)
    assert rules.check(profiled(1, 2, profile_kind=kind)) == []


def test_kind_and_ranks_alone_profile_nothing(here):
    notes = rules.check(dataclasses.replace(SFT, profile_kind="nsys", profile_ranks=[0, 1]))
    assert mention_each(notes, ["--profile_kind --profile_steps", "--profile_ranks --profile_steps"])
