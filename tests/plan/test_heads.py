"""Test the defaults of a run for its heads."""

from dataclasses import replace

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import Heads
from swiftlite.plan.heads import LR_ON_QUANTIZED_TRUNK, heads_defaults, heads_of, lr_of, mtp_init_of, mtp_loss_of
from swiftlite.plan.run import make_plan


@pytest.mark.parametrize(
    ("options", "layers", "expected"),
    [
        ({}, 0, {"mtp_num_layers": 0, "mtp_init": "checkpoint", "mtp_loss": "ce", "mtp_tuner": "lora", "lr": 1e-5}),
        ({}, 2, {"mtp_num_layers": 2, "mtp_init": "checkpoint", "mtp_loss": "ce", "mtp_tuner": "lora", "lr": 1e-5}),
        (
            {"mtp_mode": "heads_only"},
            0,
            {"mtp_num_layers": 1, "mtp_init": "fit_last_layer", "mtp_loss": "kl", "mtp_tuner": "full", "lr": 1e-3},
        ),
        (
            {"mtp_mode": "heads_only"},
            2,
            {"mtp_num_layers": 2, "mtp_init": "checkpoint", "mtp_loss": "kl", "mtp_tuner": "lora", "lr": 1e-5},
        ),
    ],
)
def test_defaults(options, layers, expected):
    args = SftArgs(**options)
    assert heads_defaults(args, Heads(layers)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"streaming": True},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tmL"},
        {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett|tt|mL"},
    ],
)
def test_fit_only_where_the_last_layer_and_rows_are_at_hand(options):
    can_fit = options.get("pipeline_model_parallel_layout") == "Ettt|tmL"
    args = SftArgs(mtp_mode="heads_only", **options)
    assert mtp_init_of(args, Heads()) == ("fit_last_layer" if can_fit else "copy_last_layer")


def test_heads_with_features_are_fitted():
    args, features = SftArgs(mtp_mode="heads_only"), Heads(kind="mtp_features", features=(1, 2))
    assert mtp_init_of(args, features) == "fit_last_layer"
    assert mtp_init_of(args, replace(features, kind="eagle3")) == "random"
    assert lr_of(args, features) == lr_of(args, Heads())


def test_another_drafter_does_not_get_the_inputs_of_old_heads():
    old = Heads(1, drafting=Drafting(zeroes_first_embedding=True))
    args = SftArgs(mtp_mode="heads_only")
    assert heads_of(args, old).drafting == old.drafting
    assert heads_of(args, replace(old, kind="mtp_features", features=(1,))).drafting is None


def test_what_is_given_stays():
    args = SftArgs(mtp_mode="heads_only", mtp_num_layers=0, mtp_init="random", mtp_loss="ce", lr=1e-4)
    assert heads_of(args, Heads()).layers == 0
    assert (mtp_init_of(args, Heads()), mtp_loss_of(args), lr_of(args, Heads())) == ("random", "ce", 1e-4)


@pytest.mark.parametrize(
    ("mtp_init", "lr"), [("random", 1e-3), ("copy_last_layer", 1e-3), ("graft", 3e-4), ("checkpoint", 1e-5)]
)
def test_trained_heads_are_not_thrown_back(mtp_init, lr):
    assert lr_of(SftArgs(mtp_mode="heads_only", mtp_init=mtp_init), Heads(1)) == lr


@pytest.mark.parametrize(
    ("options", "depth", "lr"),
    [
        ({"mtp_mode": "heads_only"}, 1, LR_ON_QUANTIZED_TRUNK),
        ({"mtp_mode": "heads_only"}, 0, 1e-3),  # new heads
        ({"mtp_mode": "heads_only", "mtp_init": "graft"}, 1, 3e-4),
        ({"mtp_mode": "heads_only", "lr": 2e-5}, 1, 2e-5),
        ({}, 1, 1e-5),
        ({"tuner_type": "lora"}, 1, 1e-4),
    ],
)
def test_heads_adapt_to_a_quantized_trunk(options, depth, lr):
    """Only if the heads alone are trained, and exist."""
    args = SftArgs(**options)
    assert lr_of(args, Heads(depth), is_quantized=True) == lr
    plan = make_plan(args, 1, Heads(depth), is_quantized=True)
    assert (plan.lr, plan.min_lr) == (lr, lr / 10)
    default = heads_defaults(args, Heads(depth), is_quantized=True)["lr"]
    assert default == lr_of(replace(args, lr=None), Heads(depth), is_quantized=True)


def test_adapters_take_larger_steps():
    assert lr_of(SftArgs(tuner_type="lora"), Heads(1)) == 1e-4
