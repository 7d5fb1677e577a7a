"""Test that samples are moved between ranks with all their arrays, and training from a single reader."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from swiftlite.args.fields import ParallelLayout
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.train.batches.exchange import ALL, broadcast, exchange, gather, stage_fields
from tests.messages import naming
from tests.parallel.launch import launch
from tests.parallel.packing import LONGEST, Job, run
from tests.parallel.test_packing import assert_same_gradients, assert_same_losses
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

CPU = torch.device("cpu")
IDS, TARGETS = ALL[:1], ALL[1:]


def make_sample(random: np.random.RandomState, length: int) -> Sample:
    """Return a random sample with zeros among ids, labels and weights. Weights use all bits."""
    return Sample(
        random.randint(0, 3, length).astype(np.int32),
        random.choice([IGNORED, 0, 2**31 - 1], length).astype(np.int32),
        random.choice([0, 0.5, 1e-40, np.inf], length).astype(np.float32),
    )


def make_samples(seed: int, num: int) -> list[Sample]:
    random = np.random.RandomState(seed)
    return [make_sample(random, random.choice([0, 1, 2, 50])) for _ in range(num)]


def assert_same(ours: Sample, expected: Sample, fields=ALL) -> None:
    for name in fields:
        mine, its = vars(ours)[name], vars(expected)[name]
        assert mine.dtype == its.dtype
        assert mine.tobytes() == its.tobytes()


def exchange_many() -> int:
    """Exchange samples with random assignments over four ranks, some without samples; return the number of compared
    samples.
    """
    group = dist.group.WORLD
    assert group is not None
    rank, random = group.rank(), np.random.RandomState(0)
    for seed in range(100):
        own = [make_samples(seed * 4 + owner, random.randint(0, 6) * random.randint(0, 2)) for owner in range(4)]
        everything = [sample for samples in own for sample in samples]
        destination = random.randint(0, 4, len(everything))
        assignment = [random.permutation(np.flatnonzero(destination == to)).tolist() for to in range(4)]
        if everything:
            assignment[seed % 4] += [0]  # once more
        lengths = gather([len(sample) for sample in own[rank]], group, CPU)
        assert lengths == [[len(sample) for sample in samples] for samples in own]
        ours = exchange(own[rank], lengths, assignment, group, CPU)
        for sample, number in zip(ours, assignment[rank], strict=True):
            assert_same(sample, everything[number])
    first = make_samples(0, 1)
    lengths = gather([len(first[0])], group, CPU)
    with pytest.raises(ValueError, match=naming("4 0")):
        exchange(first, lengths, [[4], [], [], []], group, CPU)
    return seed + 1


def broadcast_many(pipeline_size: int, fields: list[tuple[str, ...]]) -> None:
    """Broadcast samples to ranks 0, 1, ... of a stage, which are neighbors as in megatron-core."""
    stage_size, rank = 4 // pipeline_size, dist.get_rank()
    pipelines = [dist.new_group(list(range(first, 4, stage_size))) for first in range(stage_size)]
    stages = [dist.new_group(list(range(first, first + stage_size))) for first in range(0, 4, stage_size)]
    pipeline_group, stage_group = pipelines[rank % stage_size], stages[rank // stage_size]
    assert isinstance(pipeline_group, dist.ProcessGroup)
    assert isinstance(stage_group, dist.ProcessGroup)
    own = fields[rank // stage_size]
    for seed, num_samples in enumerate([[2, 0, 3], [], [1], [0], [4, 4, 4, 4]]):
        rows = [make_samples(10 * seed + number, num) for number, num in enumerate(num_samples)]
        ours = broadcast(
            rows if rank == 0 else None, fields, pipeline_group=pipeline_group, stage_group=stage_group, device=CPU
        )
        for mine, row in zip(ours, rows, strict=True):
            for sample, expected in zip(mine, row, strict=True):
                assert len(sample) == len(expected)
                assert_same(sample, expected, own)
                for name in set(ALL) - set(own):  # nothing of it came
                    assert set(vars(sample)[name].tolist()) <= {IGNORED if name == "labels" else 0}


def move_all() -> int:
    """Run all cases in this process."""
    dist.init_process_group("gloo")
    compared = exchange_many()
    broadcast_many(4, [IDS, (), IDS, TARGETS])
    broadcast_many(2, [IDS, ALL])
    broadcast_many(1, [ALL])
    dist.destroy_process_group()
    return compared


def test_samples_arrive_whole():
    assert launch(4, move_all) == [100] * 4


@pytest.mark.parametrize(
    ("stages", "size", "depth", "fields"),
    [
        ("Et|t|m|L", 4, 1, [IDS, (), IDS, TARGETS]),
        ("Et|t|mL", 3, 1, [IDS, (), ALL]),
        ("Et|t|t|mL", 2, 1, [IDS, ALL]),
        ("Et|t|L", 3, 0, [IDS, (), TARGETS]),
        (None, 1, 2, [ALL]),
        (None, 2, 0, [IDS, TARGETS]),
    ],
)
def test_a_stage_gets_what_it_uses(stages, size, depth, fields):
    layout = ParallelLayout(pipeline_model_parallel_size=size, pipeline_model_parallel_layout=stages)
    assert stage_fields(layout, depth) == fields


LAYOUTS: dict[str, dict[str, Any]] = {
    "PP4 MTP third": {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et*3|t|m|L"},
    "PP2xCP2": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    "PP2xTP2": {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def test_training_from_one_reader(tmp_path):
    """Only the first rank has samples. Losses and gradients must equal those of one process."""
    model = make_tiny_hf(
        tmp_path / "model",
        "llama",
        depth=1,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    [alone] = run(1, [Job(model, tmp_path / "alone", rows="one by one")])
    jobs = [Job(model, tmp_path / name, layout=layout, one_reader=True) for name, layout in LAYOUTS.items()]
    for result in run(4, jobs):
        assert_same_losses(result, alone)
        assert_same_gradients(result, alone)
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-6)
