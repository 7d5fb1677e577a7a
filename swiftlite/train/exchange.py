"""Samples between ranks, for sources that only some ranks read: `exchange` moves each to the data-parallel rank that is
to compute it, `broadcast` hands a rank's micro-batches to those that share its replica of the model.

Each is a function of its own over process groups, for frameworks that need only one of them; cutting a batch over
context-parallel ranks is `batches.shard`. Counts and lengths are always sent ahead, never found in what is sent. A
sample's `source` and `channel` stay where they were read.
"""

from collections.abc import Sequence
from itertools import accumulate, islice

import numpy as np
import torch
import torch.distributed as dist

from swiftlite.args.fields import ParallelLayout
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.plan.layout import mtp_pipeline_rank

Fields = tuple[str, ...]
"""Some of a sample's arrays."""
# What stands where a rank does not get an array, since nothing there looks at it.
FILL: dict[str, np.generic] = {
    "input_ids": np.int32(0),
    "labels": np.int32(IGNORED),
    "loss_scale": np.float32(0),
}
ALL: Fields = tuple(FILL)


def gather_lengths(samples: Sequence[Sample], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Lengths of the samples of every rank of the group, by rank: what a schedule is made from."""
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    counts[group.rank()] = len(samples)
    dist.all_reduce(counts, group=group)
    lengths = torch.zeros(group.size(), int(counts.max()), dtype=torch.int64, device=device)
    lengths[group.rank(), : len(samples)] = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
    dist.all_reduce(lengths, group=group)
    return [row[:count] for row, count in zip(lengths.tolist(), counts.tolist(), strict=True)]


def exchange(
    samples: Sequence[Sample],
    lengths: Sequence[Sequence[int]],
    assignment: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Sample]:
    """The samples that this rank is assigned, in that order, moved in one all-to-all.

    Args:
        samples: this rank's own.
        lengths: of every rank's own, by rank (`gather_lengths`). A sample's number counts through all of them.
        assignment: for each rank the numbers of the samples it gets; the same on every rank. A sample may go to several
            ranks, or to none.

    Raises:
        ValueError: a number that no sample has.
    """
    me, size = group.rank(), group.size()
    assert [len(sample) for sample in samples] == list(lengths[me])
    starts = [0, *accumulate(map(len, lengths))]
    length_of = [length for row in lengths for length in row]
    if unknown := [number for row in assignment for number in row if not 0 <= number < len(length_of)]:
        raise ValueError(f"sample {unknown[0]} is assigned, but there are {len(length_of)}, counted from 0")
    own = [range(starts[rank], starts[rank + 1]) for rank in range(size)]
    sent = [[number for number in assignment[rank] if number in own[me]] for rank in range(size)]
    received = [[number for number in assignment[me] if number in own[rank]] for rank in range(size)]

    def num_tokens(parts: Sequence[Sequence[int]]) -> list[int]:
        return [sum(length_of[number] for number in part) for part in parts]

    outgoing = _flatten([samples[number - starts[me]] for part in sent for number in part], ALL, device)
    incoming = outgoing.new_empty(sum(num_tokens(received)), len(ALL))
    dist.all_to_all_single(incoming, outgoing, num_tokens(received), num_tokens(sent), group=group)
    numbers = [number for part in received for number in part]
    arrived = dict(zip(numbers, _unflatten(incoming, [length_of[n] for n in numbers], ALL), strict=True))
    return [arrived[number] for number in assignment[me]]


def stage_fields(layout: ParallelLayout, mtp_num_layers: int) -> list[Fields]:
    """What each pipeline rank computes with: ids where there is an embedding, which the MTP layers have as well; labels
    and weights where the loss is. Positions follow from lengths, which every rank gets."""
    size = layout.pipeline_model_parallel_size
    embedding = {0, mtp_pipeline_rank(layout)} if mtp_num_layers else {0}
    return [ALL[:1] * (rank in embedding) + ALL[1:] * (rank == size - 1) for rank in range(size)]


def broadcast(
    micro_batches: Sequence[Sequence[Sample]] | None,
    fields: Sequence[Fields],
    *,
    pipeline_group: dist.ProcessGroup,
    stage_group: dist.ProcessGroup,
    device: torch.device,
) -> list[list[Sample]]:
    """A replica's micro-batches on each of its ranks, with the arrays that its stage uses; the others are constant.

    Args:
        micro_batches: on the rank that is first in both groups; elsewhere not looked at.
        fields: for each pipeline rank (`stage_fields`).
        pipeline_group: ranks that hold the stages in order.
        stage_group: ranks that hold the same stage: its tensor- and context-parallel ranks.
    """
    samples = [sample for row in micro_batches or () for sample in row]
    counts, lengths = [len(row) for row in micro_batches or ()], [len(sample) for sample in samples]
    own, flat = fields[pipeline_group.rank()], None
    if stage_group.rank() == 0:
        counts, lengths = broadcast_counts(counts, lengths, pipeline_group, device)
        flat = _send_to_stages(samples, sum(lengths), fields, pipeline_group, device)
    counts, lengths = broadcast_counts(counts, lengths, stage_group, device)
    if flat is None:
        flat = torch.empty(sum(lengths), len(own), dtype=torch.int32, device=device)
    if own:
        dist.broadcast(flat, dist.get_global_rank(stage_group, 0), group=stage_group)
    received = iter(_unflatten(flat, lengths, own))
    return [list(islice(received, count)) for count in counts]


def broadcast_counts(
    counts: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], list[int]]:
    """Samples of each row or micro-batch and tokens of each sample, as the first rank of the group has them."""
    source = dist.get_global_rank(group, 0)
    sizes = torch.tensor([len(counts), len(lengths)], device=device)
    dist.broadcast(sizes, source, group=group)
    if group.rank() == 0:
        numbers = torch.tensor([*counts, *lengths], dtype=torch.int64, device=device)
    else:
        numbers = torch.empty(int(sizes.sum()), dtype=torch.int64, device=device)
    dist.broadcast(numbers, source, group=group)
    num_micro_batches = int(sizes[0])
    return numbers[:num_micro_batches].tolist(), numbers[num_micro_batches:].tolist()


def _send_to_stages(
    samples: Sequence[Sample], num_tokens: int, fields: Sequence[Fields], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """This stage's arrays, from the first stage; a stage that uses none is sent nothing."""
    own = fields[group.rank()]
    if group.rank() == 0:
        messages = [
            (_flatten(samples, names, device), dist.get_global_rank(group, stage))
            for stage, names in enumerate(fields)
            if stage and names
        ]
        for request in [dist.isend(flat, peer, group=group) for flat, peer in messages]:
            assert request is not None
            request.wait()
        return _flatten(samples, own, device)
    flat = torch.empty(num_tokens, len(own), dtype=torch.int32, device=device)
    if own:
        dist.recv(flat, dist.get_global_rank(group, 0), group=group)
    return flat


def _flatten(samples: Sequence[Sample], fields: Fields, device: torch.device) -> torch.Tensor:
    """Some arrays of all samples, one sample after the other: int32 [tokens, fields], weights by their bits."""
    columns = [
        np.concatenate([np.empty(0, fill.dtype), *(vars(sample)[name] for sample in samples)]).astype(fill.dtype)
        for name, fill in FILL.items()
        if name in fields
    ]
    rows = np.stack([column.view(np.int32) for column in columns], axis=1) if columns else np.empty((0, 0), np.int32)
    return torch.from_numpy(rows).to(device)


def _unflatten(flat: torch.Tensor, lengths: Sequence[int], fields: Fields) -> list[Sample]:
    """`_flatten` backwards; an array that is not among the fields holds nothing but its fill."""
    columns = dict(zip(fields, flat.cpu().numpy().T, strict=True))
    arrays = {}
    for name, fill in FILL.items():
        column = (
            np.ascontiguousarray(columns[name]).view(fill.dtype) if name in columns else np.full(sum(lengths), fill)
        )
        arrays[name] = np.split(column, [*accumulate(lengths)][:-1]) if lengths else []
    return [Sample(*parts) for parts in zip(*arrays.values(), strict=True)]
