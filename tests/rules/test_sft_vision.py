"""Test the rules of `megatron sft` for the vision tower of a model."""

from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite import rules
from tests.messages import mentions
from tests.rules.good import SFT, problems_of
from tests.tiny import make_tiny_vision_hf

VISION = replace(SFT, model="vision")
TRAINED = {"freeze_vit": False, "freeze_aligner": False}


@pytest.fixture
def with_vision(here) -> None:
    make_tiny_vision_hf(Path("vision"), "qwen3_5", depth=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**TRAINED, "vit_lr": 1e-6, "aligner_lr": 1e-5},
        {"freeze_llm": True, "freeze_aligner": False},
        {"mtp_mode": "heads_only", "torch_dtype": "float32"},
    ],
)
def test_good_options_pass(with_vision, options):
    assert rules.check(replace(VISION, **options)) == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "plain", **TRAINED}, "--freeze_vit --freeze_aligner vision tower"),
        ({"mtp_mode": "heads_only", "freeze_vit": False}, "--freeze_vit --mtp_mode heads_only"),
        ({"tuner_type": "lora", "freeze_aligner": False}, "--freeze_aligner --tuner_type lora"),
        ({"tuner_type": "lora", "freeze_llm": True}, "--freeze_llm --tuner_type lora"),
        ({"freeze_llm": True}, "--freeze_llm --freeze_vit --freeze_aligner"),
    ],
)
def test_bad_options_are_reported(with_vision, options, problem):
    ((found, _),) = problems_of(replace(VISION, **options))
    assert mentions(found, problem)


@pytest.mark.parametrize("option", ["vit_lr", "aligner_lr", "vit_gradient_checkpointing"])
def test_options_of_frozen_parts_have_no_effect(with_vision, option):
    value = False if option == "vit_gradient_checkpointing" else 1e-4
    (note,) = rules.check(replace(VISION, **{option: value}))
    assert mentions(note, f"--{option}")
