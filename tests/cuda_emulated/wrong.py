"""Deliberately wrong operations, and similar correct operations. `detect.py` runs them on the emulated device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.cuda_emulated.record import RECORDER, Kind


@dataclass
class Tensors:
    """Tensors on the host and on the device."""

    here: torch.Tensor
    pinned: torch.Tensor
    there: torch.Tensor
    number: torch.Tensor
    mask: torch.Tensor
    weight: torch.nn.Parameter
    wide: torch.Tensor


Operation = Callable[[Tensors], Any]
WRONG: dict[Kind, list[Operation]] = {}
RIGHT: list[Operation] = []


def make_tensors() -> Tensors:
    torch.manual_seed(0)
    here = torch.rand(8, 8)
    there = here.cuda()
    return Tensors(
        here=here,
        pinned=here.pin_memory(),
        there=there,
        number=there.sum(),
        mask=there > 0.5,
        weight=torch.nn.Parameter(torch.rand(8, 8, device="cuda")),
        wide=torch.zeros(64, device="cuda", dtype=torch.float64),
    )


def wrong(kind: Kind) -> Callable[[Operation], Operation]:
    """Mark an operation with the kind of event that it must cause."""

    def add(operation: Operation) -> Operation:
        WRONG.setdefault(kind, []).append(operation)
        return operation

    return add


def right(operation: Operation) -> Operation:
    RIGHT.append(operation)
    return operation


@wrong("mixed")
def adds_host_and_device(t: Tensors):
    return t.there + t.here


@wrong("mixed")
def multiplies_with_a_matrix_of_the_host(t: Tensors):
    torch.mm(t.there, t.here)


@wrong("mixed")
def gives_a_parameter_the_data_of_the_host(t: Tensors):
    t.weight.data = t.here


@wrong("mixed")
def scales_a_list_by_a_number_of_the_host(t: Tensors):
    torch.ops.aten._foreach_mul_.Tensor([t.there.clone()], torch.tensor(2.0))


@wrong("mixed")
def looks_up_a_table_of_the_host(t: Tensors):
    return t.here[t.there[0].long()]


@wrong("mixed")
def writes_values_of_the_host(t: Tensors):
    t.there.clone()[torch.arange(8, device="cuda")] = t.here


@wrong("generator")
def draws_on_the_device_with_a_generator_of_the_host(t: Tensors):
    torch.randn(8, device="cuda", generator=torch.Generator())


@wrong("generator")
def fills_with_a_generator_of_the_host(t: Tensors):
    t.there.clone().uniform_(generator=torch.Generator())


@wrong("wait")
def asks_for_a_number(t: Tensors):
    t.number.item()


@wrong("wait")
def asks_whether(t: Tensors):
    if t.number > 3:
        pass


@wrong("wait")
def asks_for_a_list(t: Tensors):
    t.there.tolist()


@wrong("wait")
def copies_to_the_host(t: Tensors):
    t.there.cpu()


@wrong("wait")
def copies_into_memory_that_is_not_pinned(t: Tensors):
    torch.empty(8, 8).copy_(t.there, non_blocking=True)


@wrong("wait")
def asks_where(t: Tensors):
    t.mask.nonzero()


@wrong("wait")
def selects_by_a_mask(t: Tensors):
    t.there.masked_select(t.mask)


@wrong("wait")
def indexes_by_a_mask(t: Tensors):
    return t.there[t.mask]


@wrong("wait")
def writes_many_by_a_mask(t: Tensors):
    t.there.clone()[t.mask] = torch.zeros(1, device="cuda")


@wrong("wait")
def repeats_by_counts_of_the_device(t: Tensors):
    t.there.repeat_interleave(torch.arange(8, device="cuda"), 0)


@wrong("wait")
def counts_bins(t: Tensors):
    torch.arange(8, device="cuda").bincount()


@wrong("wait")
def compares_whole_tensors(t: Tensors):
    torch.equal(t.there, t.there)


@wrong("wait")
def makes_a_tensor_of_numbers_of_the_device(t: Tensors):
    torch.tensor([t.number, t.number])


@wrong("wait")
def waits_for_a_pinned_copy(t: Tensors):
    t.pinned.to("cuda")


@wrong("wait")
def synchronizes(t: Tensors):
    torch.cuda.synchronize()


@wrong("wait")
def waits_in_the_backward_pass(t: Tensors):
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    Waits.apply(t.weight).sum().backward()


@wrong("unpinned")
def copies_from_memory_that_is_not_pinned(t: Tensors):
    t.here.to("cuda", non_blocking=True)


@wrong("unpinned")
def copies_into_a_tensor_from_memory_that_is_not_pinned(t: Tensors):
    t.there.clone().copy_(t.here, non_blocking=True)


@wrong("unpinned")
def makes_a_tensor_of_numbers_of_the_host(t: Tensors):
    torch.tensor([1, 2, 3], device="cuda")


@wrong("unpinned")
def indexes_by_numbers_of_the_host(t: Tensors):
    return t.there[torch.tensor([0, 1])]


@wrong("float64")
def computes_in_double_precision(t: Tensors):
    t.there.double()


@wrong("float64")
def sums_in_double_precision(t: Tensors):
    return t.wide + 1


@right
def copies_pinned_memory(t: Tensors):
    t.pinned.to("cuda", non_blocking=True)


@right
def copies_part_of_pinned_memory(t: Tensors):
    t.pinned[2:4].to("cuda", non_blocking=True)


@right
def copies_to_the_host_without_waiting(t: Tensors):
    t.there.to("cpu", non_blocking=True)


@right
def sets_one_number_by_a_mask(t: Tensors):
    t.there.clone()[t.mask] = 0.0


@right
def chooses_by_a_mask(t: Tensors):
    torch.where(t.mask, t.there, 0.0)


@right
def multiplies_by_a_number_of_the_host(t: Tensors):
    return t.there * torch.tensor(2.0)


@right
def draws_on_the_device(t: Tensors):
    torch.randn(8, device="cuda")
    torch.randn(8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    torch.nn.functional.dropout(t.there, 0.5)


@right
def sums_a_few_numbers_in_double_precision(t: Tensors):
    t.there[:1].double()


@right
def indexes_by_numbers_of_the_device(t: Tensors):
    return t.there[torch.arange(4, device="cuda")]


@right
def repeats_to_a_known_size(t: Tensors):
    t.there.repeat_interleave(torch.arange(8, device="cuda"), 0, output_size=28)


@right
def computes_on_the_host(t: Tensors):
    t.here[t.here > 0.5].sum().item()


def views(t: Tensors):
    t.there.view(-1)[3:].unsqueeze(0).t().expand(-1, 4).detach()


def a_product_and_its_gradient(t: Tensors):
    (t.there @ t.weight).backward(t.there)


def a_compiled_function(t: Tensors):
    torch.compile(lambda hidden, other: (hidden * other).sigmoid() + 1)(t.there, t.weight).backward(t.there)


def attention(t: Tensors):
    query = torch.nn.Parameter(torch.rand(1, 4, 6, 8, device="cuda"))
    key = torch.rand(1, 2, 6, 8, device="cuda")
    RECORDER.launches.clear()
    out = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    out.backward(out.detach())
