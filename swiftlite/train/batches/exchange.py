"""Move samples between ranks, if only some ranks read the source of the samples.

`exchange` moves each sample to the data-parallel rank that computes it. `broadcast` sends a rank's micro-batches to the
ranks that share its replica of the model. Both functions accept process groups as arguments, so that other frameworks
can use one function without the other. Counts and lengths are always sent first. A sample's `source` and `channel` are
not sent."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from swiftlite.args.fields import ParallelLayout
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.plan.layout import mtp_pipeline_rank
from swiftlite.runtime.device import on_device

Fields = tuple[str, ...]
"""Names of arrays of a `Sample`."""
# Placeholder for an array that a rank does not receive, because it does not use it.
FILL: dict[str, np.generic] = {
    "input_ids": np.int32(0),
    "labels": np.int32(IGNORED),
    "loss_scale": np.float32(0),
}
ALL: Fields = tuple(FILL)
IDS: Fields = ALL[:1]
TARGETS: Fields = ALL[1:]


def gather(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return the `numbers` of each rank of the group, one list per rank. Lists may have different lengths."""
    counts = torch.zeros(group.size(), dtype=torch.int64)
    counts[group.rank()] = len(numbers)
    counts = on_device(counts, device)
    dist.all_reduce(counts, group=group)
    # As long as the longest list on each rank, because a collective requires equal shapes. `counts` cuts off the rest.
    gathered = torch.zeros(group.size(), int(counts.max()), dtype=torch.int64)
    gathered[group.rank(), : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    gathered = on_device(gathered, device)
    dist.all_reduce(gathered, group=group)
    return [row[:count] for row, count in zip(gathered.tolist(), counts.tolist(), strict=True)]


def exchange(
    samples: Sequence[Sample],
    lengths: Sequence[Sequence[int]],
    assignment: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Sample]:
    """Return the samples that are assigned to this rank, in the order of the assignment. One all-to-all moves the
    samples.

    Example: rank 0 has the samples 0 and 1, and rank 1 has sample 2. With the assignment `[[2], [0, 1]]`, rank 0 sends
    both of its samples to rank 1 and receives sample 2 from rank 1.

    Args:
        samples: the samples that this rank has read.
        lengths: for each rank, the number of tokens of each sample that the rank has read, as returned by `gather`.
            Samples of all ranks are numbered in this order.
        assignment: the numbers of the samples that each rank receives; the same value on every rank. A sample may go to
            several ranks or to none.

    Raises:
        ValueError: the assignment contains a number that no sample has.
    """
    me = group.rank()
    assert [len(sample) for sample in samples] == list(lengths[me])
    length_of = list(itertools.chain(*lengths))
    for number in itertools.chain(*assignment):
        if not 0 <= number < len(length_of):
            raise ValueError(f"sample {number} is assigned, but there are {len(length_of)}, counted from 0")
    firsts = [0, *itertools.accumulate(map(len, lengths))]
    numbers_of = [range(first, end) for first, end in itertools.pairwise(firsts)]  # of each rank's samples

    to_send = [_among(wanted, numbers_of[me]) for wanted in assignment]  # by the rank that gets them
    to_receive = [_among(assignment[me], own) for own in numbers_of]  # by the rank that has them

    def num_tokens(numbers: Iterable[int]) -> int:
        return sum(length_of[number] for number in numbers)

    # Ordered by receiver, as `all_to_all_single` splits it. Both sides know all lengths, so no shapes are sent.
    outgoing = _flatten([samples[number - firsts[me]] for number in itertools.chain(*to_send)], ALL, device)
    sizes_received = [num_tokens(numbers) for numbers in to_receive]
    incoming = outgoing.new_empty(sum(sizes_received), len(ALL))
    sizes_sent = [num_tokens(numbers) for numbers in to_send]
    dist.all_to_all_single(incoming, outgoing, sizes_received, sizes_sent, group=group)
    # They arrive in the order of the ranks that had them; the assignment can have another one.
    arriving = list(itertools.chain(*to_receive))
    arrived = dict(zip(arriving, _unflatten(incoming, [length_of[n] for n in arriving], ALL), strict=True))
    return [arrived[number] for number in assignment[me]]


def _among(numbers: Iterable[int], own: range) -> list[int]:
    return [number for number in numbers if number in own]


def stage_fields(layout: ParallelLayout, mtp_num_layers: int) -> list[Fields]:
    """Return the fields of samples that each pipeline rank needs.

    Token ids (`IDS`) are needed for embeddings, including those of MTP layers, and labels and weights (`TARGETS`) for
    the loss. Positions follow from lengths, which every rank receives. Example: for three stages with the MTP layers on
    the second, the result is `IDS`, `IDS`, `TARGETS`.
    """
    last = layout.pipeline_model_parallel_size - 1
    with_embedding = {0}
    if mtp_num_layers:
        with_embedding.add(mtp_pipeline_rank(layout))
    fields: list[tuple[str, ...]] = []
    for rank in range(last + 1):
        used: tuple[str, ...] = ()
        if rank in with_embedding:
            used += IDS
        if rank == last:
            used += TARGETS
        fields.append(used)
    return fields


def broadcast(
    micro_batches: Sequence[Sequence[Sample]] | None,
    fields: Sequence[Fields],
    *,
    pipeline_group: dist.ProcessGroup,
    stage_group: dist.ProcessGroup,
    device: torch.device,
) -> list[list[Sample]]:
    """Return a replica's micro-batches on each of its ranks.

    In the returned samples, arrays that the rank's stage does not use are filled with a constant.

    Args:
        micro_batches: the micro-batches of the replica, on the rank that is first in both groups; ignored on other
            ranks.
        fields: names of the arrays that each pipeline rank needs (`stage_fields`).
        pipeline_group: ranks that hold the stages in order.
        stage_group: the tensor- and context-parallel ranks that hold the same stage.
    """
    micro_batches = micro_batches or []
    samples = list(itertools.chain(*micro_batches))
    counts = [len(micro_batch) for micro_batch in micro_batches]
    lengths = [len(sample) for sample in samples]
    own = fields[pipeline_group.rank()]
    # First along the pipeline to one rank of each stage, then from this rank to the other ranks of its stage.
    if stage_group.rank() == 0:
        counts, lengths = broadcast_counts(counts, lengths, pipeline_group, device)
        flat = _send_to_stages(samples, sum(lengths), fields, pipeline_group, device)
        broadcast_counts(counts, lengths, stage_group, device)
    else:
        counts, lengths = broadcast_counts(counts, lengths, stage_group, device)
        flat = torch.empty(sum(lengths), len(own), dtype=torch.int32, device=device)
    if own:
        dist.broadcast(flat, dist.get_global_rank(stage_group, 0), group=stage_group)
    received = iter(_unflatten(flat, lengths, own))
    return [list(itertools.islice(received, count)) for count in counts]


def broadcast_counts(
    counts: Sequence[int], lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], list[int]]:
    """Broadcast the number of samples of each row or micro-batch and the number of tokens of each sample.

    The values come from the first rank of the group.
    """
    source = dist.get_global_rank(group, 0)
    # The sizes come first: receivers allocate memory for the numbers before they arrive.
    sizes = on_device(torch.tensor([len(counts), len(lengths)]), device)
    dist.broadcast(sizes, source, group=group)
    if group.rank() == 0:
        numbers = on_device(torch.tensor([*counts, *lengths], dtype=torch.int64), device)
    else:
        numbers = torch.empty(int(sizes.sum()), dtype=torch.int64, device=device)
    dist.broadcast(numbers, source, group=group)
    num_counts, received = int(sizes[0]), numbers.tolist()
    return received[:num_counts], received[num_counts:]


def _send_to_stages(
    samples: Sequence[Sample], num_tokens: int, fields: Sequence[Fields], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Send each stage the arrays that it uses from the first stage, and return the arrays of this stage."""
    own = fields[group.rank()]
    if group.rank() == 0:
        sending = []  # pairs of request and tensor, because the tensor must not be freed before it is sent
        for stage, names in enumerate(fields):
            if stage and names:
                flat = _flatten(samples, names, device)
                sending.append((flat, dist.isend(flat, dist.get_global_rank(group, stage), group=group)))
        for _, request in sending:
            assert request is not None
            request.wait()
        return _flatten(samples, own, device)
    flat = torch.empty(num_tokens, len(own), dtype=torch.int32, device=device)
    if own:
        dist.recv(flat, dist.get_global_rank(group, 0), group=group)
    return flat


def _flatten(samples: Sequence[Sample], fields: Fields, device: torch.device) -> torch.Tensor:
    """Concatenate the arrays `fields` of all samples: int32 [tokens, fields].

    The bits of float32 weights are sent as int32.
    """
    if not fields:
        return torch.empty(0, 0, dtype=torch.int32, device=device)
    columns = []
    for name in fields:
        dtype = FILL[name].dtype
        parts = [vars(sample)[name].astype(dtype) for sample in samples]
        column = np.concatenate([np.empty(0, dtype), *parts])  # without samples an empty column
        columns.append(column.view(np.int32))
    return on_device(torch.from_numpy(np.stack(columns, axis=1)), device)


def _unflatten(flat: torch.Tensor, lengths: Sequence[int], fields: Fields) -> list[Sample]:
    """Split a tensor made by `_flatten` into samples. Arrays that are not in `fields` contain a fill value."""
    received = dict(zip(fields, flat.cpu().numpy().T, strict=True))
    arrays = {}
    for name, fill in FILL.items():
        if name in received:
            arrays[name] = np.ascontiguousarray(received[name]).view(fill.dtype)
        else:
            arrays[name] = np.full(sum(lengths), fill)
    samples = []
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        samples.append(Sample(**{name: array[here] for name, array in arrays.items()}))
        start += length
    return samples
