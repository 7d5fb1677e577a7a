"""Test that every number has bounds, and that violated bounds are reported."""

import math

import pytest

from swiftlite.args.bounds import bounds_of, describe, out_of_bounds
from swiftlite.args.commands import BenchArgs, DeployArgs, SftArgs
from swiftlite.args.docs import options
from swiftlite.args.fields import ParallelLayout
from swiftlite.cli.table import commands
from tests.messages import mentions


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.words)
def test_every_number_has_bounds(command):
    known = options(command.args_class)
    types = (int, float, int | None, float | None, dict[str, int] | None)
    numbers = [name for name, option in known.items() if option.type in types]
    assert sorted(bounds_of(command.args_class).keys() & known.keys()) == sorted(numbers)


@pytest.mark.parametrize(
    ("args_class", "name", "words"),
    [
        (SftArgs, "micro_batch_size", "1"),
        (SftArgs, "mtp_num_layers", "0"),
        (SftArgs, "max_length", "2"),
        (SftArgs, "lr", "0"),
        (SftArgs, "min_lr", "0"),
        (SftArgs, "split_dataset_ratio", "0 1"),
        (SftArgs, "lr_warmup_fraction", "0 1"),
        (SftArgs, "mtp_unroll_beta", "0 1"),
        (SftArgs, "seed", "0 4294967296"),
        (DeployArgs, "port", "1 65535"),
    ],
)
def test_bounds_in_words(args_class, name, words):
    assert mentions(describe(bounds_of(args_class)[name]), words)


def test_numbers_in_an_object_have_bounds():
    assert list(out_of_bounds(DeployArgs(vllm_limit_mm_per_prompt={"image": -1}))) == ["vllm_limit_mm_per_prompt"]
    assert not out_of_bounds(DeployArgs(vllm_limit_mm_per_prompt={"image": 0}))


def test_what_bounds_include_shows_in_their_words():
    names = ("lr", "min_lr", "split_dataset_ratio", "lr_warmup_fraction", "mtp_unroll_beta")
    words = [describe(bounds_of(SftArgs)[name]) for name in names]
    assert len(set(words)) == len(names), words


@pytest.mark.parametrize("lr", [0.0, -1e-5, math.nan, math.inf, -math.inf])
def test_a_number_is_above_its_bound_and_finite(lr):
    assert list(out_of_bounds(SftArgs(lr=lr))) == ["lr"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"split_dataset_ratio": 0, "lr_warmup_fraction": 1, "mtp_unroll_beta": 1, "seed": 2**32 - 1}, []),
        ({"split_dataset_ratio": 1.0, "lr_warmup_fraction": 1.01}, ["split_dataset_ratio", "lr_warmup_fraction"]),
        ({"mtp_unroll_beta": 0.0, "seed": 2**32}, ["mtp_unroll_beta", "seed"]),
        ({"mtp_num_layers": None, "min_lr": None}, []),
        ({"mtp_num_layers": 64, "mtp_unroll": 64}, []),
        ({"mtp_num_layers": 65, "mtp_unroll": 65}, ["mtp_num_layers", "mtp_unroll"]),
        ({"mtp_num_layers": -1, "min_lr": -1.0}, ["mtp_num_layers", "min_lr"]),
    ],
)
def test_ends_and_unset_numbers(change, expected):
    assert list(out_of_bounds(SftArgs(**change))) == expected


def test_a_group_alone_has_its_bounds():
    assert out_of_bounds(ParallelLayout()) == {}
    assert list(out_of_bounds(ParallelLayout(context_parallel_size=0))) == ["context_parallel_size"]


def test_a_name_has_the_bounds_of_its_class():
    """In `bench` this option is a list that may contain 0, which the rules of `bench` check."""
    assert "num_speculative_tokens" in bounds_of(DeployArgs)
    assert "num_speculative_tokens" not in bounds_of(BenchArgs)
