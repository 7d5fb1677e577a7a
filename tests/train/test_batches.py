"""Test the micro-batches of every rank of a layout, made in one process: each sample must be where it belongs."""

import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch, Extra, collate_packed
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample, make_sample
from swiftlite.model.forward import on_this_rank, shard
from swiftlite.plan.cost.flops import Flops
from swiftlite.plan.run import make_plan
from swiftlite.runtime.device import Device
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.batches.prefetch import Prefetched

FLOPS = Flops(linear=1.0, square=0.01, targets=(0.0,))
PACKINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": {"padding_free": True},
    "packed": {"packing": True, "packing_length": 16, "micro_batch_size": 1},
    "levelled": {
        "packing": True,
        "packing_length": 16,
        "micro_batch_size": 1,
        "sequence_packing_scheduler": "dp_balanced",
    },
}


def make_samples(num: int) -> list[Sample]:
    """Return samples. Sample n consists of token n, 2 to 9 times."""
    return [make_sample(np.full(2 + n % 8, n), np.ones(2 + n % 8)) for n in range(1, num + 1)]


def ranks(size: int, heads: Heads = Heads(), **options: Any) -> list[Batches]:
    """Return the `Batches` of each data-parallel rank; padding is -1."""
    args = SftArgs(**{"micro_batch_size": 2, "global_batch_size": 8, **options})
    plan = make_plan(args, size, heads)
    return [Batches(plan, rank, -1, FLOPS, (Extra("reference"),)) for rank in range(size)]


def test_images_are_work():
    """The sample with items is alone on its rank, although it is the shortest."""
    samples = make_samples(8)
    samples[7] = samples[7].with_extras(patches=[[0.0]] * 40)
    assert len(samples[7]) == min(map(len, samples))
    flops = replace(FLOPS, item=1.0)
    options: dict[str, Any] = PACKINGS["levelled"] | {"global_batch_size": 8, "packing_length": 64, "max_length": 64}
    found = []
    for batches in ranks(2, **options):
        batches = replace(batches, flops=flops, extras=(Extra("patches", per="item", shape=(1,)),))
        (batch,) = batches.train(batches.rows(samples), Sampler(8, 8, 0, False), 0)
        found.append((batch.num_items, batch.num_sequences))
    assert sorted(found) == [(0, 7), (40, 1)]


def samples_in(batches: Sequence[Batch]) -> Counter[int]:
    """Return how often each sample occurs in these micro-batches. A sample is identified by its token."""
    tokens = Counter(int(token) for batch in batches for token in batch.tokens_KBS[0].flatten() if token != -1)
    return Counter({token: count // (2 + token % 8) for token, count in tokens.items()})


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_sample_is_trained_on_once_per_epoch_by_one_rank(packing, size):
    samples = make_samples(24)
    seen: Counter[int] = Counter()
    for batches in ranks(size, **PACKINGS[packing]):
        rows = batches.rows(samples)
        sampler = Sampler(len(rows), 8, seed=0)
        for step in range(math.ceil(len(rows) / 8)):
            seen += samples_in(batches.train(rows, sampler, step))
    assert set(seen) == set(range(1, 25))
    # Packed rows are not a multiple of the batch: the last step begins the next epoch.
    assert set(seen.values()) <= ({1, 2} if packing == "packed" else {1})


@pytest.mark.parametrize("packing", ["padded", "padding_free"])
def test_a_step_has_the_same_samples_at_any_number_of_ranks(packing):
    samples = make_samples(24)

    def step(size: int) -> Counter[int]:
        seen: Counter[int] = Counter()
        for batches in ranks(size, **PACKINGS[packing]):
            rows = batches.rows(samples)
            seen += samples_in(batches.train(rows, Sampler(len(rows), 8, seed=3), 1))
        return seen

    assert step(1) == step(2) == step(4)
    assert len(step(1)) == 8


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("num_samples", [1, 7, 8, 13])
def test_each_held_out_sample_is_evaluated_once_and_ranks_keep_step(packing, num_samples):
    samples = make_samples(num_samples)
    parts = [batches.evaluation(samples, None) for batches in ranks(4, **PACKINGS[packing])]
    total: Counter[int] = Counter()
    for part in parts:
        total += samples_in(part)
    assert total == Counter(range(1, num_samples + 1))
    assert len({len(part) for part in parts}) == 1


def test_evaluation_ends_after_a_number_of_global_batches():
    samples = make_samples(30)
    parts = [batches.evaluation(samples, 2) for batches in ranks(2)]
    assert samples_in(parts[0]) + samples_in(parts[1]) == Counter(range(1, 17))


def test_a_padded_batch_holds_its_rows_as_they_are():
    (batches,) = ranks(1, Heads(1), global_batch_size=2)
    rows = batches.rows([make_sample([1, 1], np.ones(2)), make_sample([2, 2, 2], np.ones(3))])
    (batch,) = batches.train(rows, Sampler(2, 2, seed=0, shuffle=False), 0)
    assert batch.tokens_KBS[0].tolist() == [[1, 1, -1], [2, 2, 2]]
    assert batch.labels_KBS[0].tolist() == [[1, -100, -100], [2, 2, -100]]  # the token one later
    assert batch.labels_KBS[1].tolist() == [[-100, -100, -100], [2, -100, -100]]  # two later
    assert (batch.num_tokens, batch.lengths) == (5, (2, 3))
    assert batch.cu_seqlens is None


def test_packed_rows_are_full_and_hold_whole_samples():
    (batches,) = ranks(1, **PACKINGS["packed"])
    samples = make_samples(24)
    rows = batches.rows(samples)
    assert sum(len(rows[number]) for number in range(len(rows))) == len(samples)
    lengths = [sum(map(len, rows[number])) for number in range(len(rows))]
    assert max(lengths) <= 16
    assert len(rows) == math.ceil(sum(map(len, samples)) / 16)  # these lengths leave no room for one row fewer


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_share_each_sequence(size):
    """Each rank r has chunks r and 2 * size - 1 - r: every token is on one rank, and each rank has early and late
    tokens.
    """
    samples = [make_sample(np.arange(start, start + 8 * size), np.ones(8 * size)) for start in (0, 100)]
    batch = collate_packed(samples, -1, pad_each_to_multiple_of=2 * size, pad_to_multiple_of=2 * size)
    parts = [shard(batch, rank, size) for rank in range(size)]
    chunk = 8 * size // (2 * size)
    for rank, part in enumerate(parts):
        expected = []
        for start in (0, 100):
            for place in (rank, 2 * size - 1 - rank):
                expected += range(start + place * chunk, start + (place + 1) * chunk)
        assert part.tokens_KBS[0, 0].tolist() == expected
        assert torch.equal(part.position_ids_BS[0], torch.tensor([token % 100 for token in expected]))
        assert part.cu_seqlens is batch.cu_seqlens


def test_labels_stay_on_the_host(mesh):
    """Values of meta tensors cannot be read, so the test fails if code reads values on the device."""
    mesh = dataclasses.replace(mesh, device=Device(torch.device("meta"), "gloo"))
    (batches,) = ranks(1, Heads(2))
    collated = batches.collate(make_samples(3))
    (moved,) = on_this_rank([collated], mesh)
    devices = {name: value.device.type for name, value in vars(moved).items() if name.endswith(("KBS", "_BS"))}
    assert devices.pop("labels_KBS") == "cpu"
    assert set(devices.values()) == {"meta"}
    assert moved.labels_KBS.equal(collated.labels_KBS)


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_mismatched_answer_is_scored_once_in_a_row_that_holds_it(packing):
    """Samples are short, but their mismatched answers are as long as a row."""
    samples = []
    for number, sample in enumerate(make_samples(24), start=1):
        length = 16 if number % 2 else 3
        other = make_sample(np.full(length, number), np.ones(length)).with_extras(reference=number)
        other = dataclasses.replace(other, trains_heads=False)
        samples.append(dataclasses.replace(sample.with_extras(reference=number), companion=other))
    options = PACKINGS[packing] | {"global_batch_size": 4}
    parts = []
    for batches in ranks(2, Heads(1), **options):
        rows = batches.rows(samples)
        steps = [batches.train(rows, Sampler(len(rows), 4, seed=0), step) for step in range(len(rows) // 4)]
        parts.append([*steps, batches.evaluation(samples, None)])
    for step, (one, other) in enumerate(zip(*parts, strict=True)):
        assert len(one.companions) == len(other.companions), step
        scored = [batch.extras["reference"] for batch in (*one.companions, *other.companions)]
        trained = [batch.extras["reference"] for batch in (*one, *other)]
        assert sorted(torch.cat(scored).tolist()) == sorted(torch.cat(trained).tolist())
        for batch in (*one.companions, *other.companions):
            assert (batch.labels_KBS[1:] == -100).all()  # heads compute no loss
            assert batch.tokens_KBS.size(2) <= 16 * (2 if packing == "padding_free" else 1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_prefetched_batches_are_those_of_their_step(packing):
    """Also if the run starts after some steps, as a resumed one, or repeats a step."""
    (batches,) = ranks(1, **PACKINGS[packing])
    rows = batches.rows(make_samples(24))
    sampler = Sampler(len(rows), 8, seed=0)
    prefetched = Prefetched(lambda step: batches.train(rows, sampler, step), 5)
    for step in (2, 3, 4, 0, 1, 1):
        ours, theirs = prefetched(step), batches.train(rows, sampler, step)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.tokens_KBS, other.tokens_KBS)
            assert torch.equal(one.labels_KBS, other.labels_KBS)
    prefetched.close()


def test_the_next_step_is_collated_before_it_is_asked_for():
    started, computed = threading.Event(), []

    def get(step: int) -> list[Batch]:
        computed.append((step, threading.current_thread() is threading.main_thread()))
        if step == 1:
            started.set()
        return []

    prefetched = Prefetched(get, 2)
    prefetched(0)
    assert started.wait(60)
    prefetched(1)
    prefetched.close()
    assert computed == [(0, False), (1, False)]  # each step once, and none after the last one


def test_an_error_is_raised_in_its_step():
    def get(step: int) -> list[Batch]:
        if step == 1:
            raise UserError("rows.jsonl:7: too long", "remove it")
        return []

    prefetched = Prefetched(get, 3)
    assert prefetched(0) == []
    with pytest.raises(UserError, match=r"rows\.jsonl:7"):
        prefetched(1)
    assert prefetched(2) == []
    prefetched.close()
