"""Test the rules of --report_to."""

import dataclasses
import sys

import pytest

from swiftlite import rules
from tests.messages import mention_each, mentions
from tests.rules.good import SFT, problems_of


@pytest.mark.parametrize(
    ("names", "problem", "hint"),
    [
        (["tensorbord"], "--report_to tensorbord", "tensorboard"),
        (["tensorboard", "none"], "--report_to none", ""),
        (["tensorboard", "tensorboard"], "--report_to tensorboard", ""),
    ],
)
def test_places_are_known_and_named_once(here, names, problem, hint):
    ((found, next_step),) = problems_of(dataclasses.replace(SFT, report_to=names))
    assert mentions(found, problem)
    assert mentions(next_step, hint)


def test_a_package_that_is_not_installed_is_named(here, monkeypatch):
    """A folder with wandb's runs does not count as the package."""
    monkeypatch.setattr(sys, "path", [str(here)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (here / "wandb").mkdir()
    problems = problems_of(dataclasses.replace(SFT, report_to=["wandb"]))
    assert mention_each(problems, ["--report_to wandb pip install wandb"])


def test_nothing_and_tensorboard_are_fine(here):
    assert rules.check(dataclasses.replace(SFT, report_to=[])) == []
    assert rules.check(dataclasses.replace(SFT, report_to=["tensorboard"])) == []
