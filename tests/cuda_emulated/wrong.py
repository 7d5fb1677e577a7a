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


def gives_a_parameter_the_data_of_the_host(t: Tensors):
    t.weight.data = t.here


def writes_values_of_the_host(t: Tensors):
    t.there.clone()[torch.arange(8, device="cuda")] = t.here


def asks_whether(t: Tensors):
    if t.number > 3:
        pass


def writes_many_by_a_mask(t: Tensors):
    t.there.clone()[t.mask] = torch.zeros(1, device="cuda")


def waits_in_the_backward_pass(t: Tensors):
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    Waits.apply(t.weight).sum().backward()


def sets_one_number_by_a_mask(t: Tensors):
    t.there.clone()[t.mask] = 0.0


def draws_on_the_device(t: Tensors):
    torch.randn(8, device="cuda")
    torch.randn(8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    torch.nn.functional.dropout(t.there, 0.5)


WRONG: dict[Kind, dict[str, Operation]] = {
    "mixed": {
        "adds_host_and_device": lambda t: t.there + t.here,
        "multiplies_with_a_matrix_of_the_host": lambda t: torch.mm(t.there, t.here),
        "scales_a_list_by_a_number_of_the_host": lambda t: torch.ops.aten._foreach_mul_.Tensor(
            [t.there.clone()], torch.tensor(2.0)
        ),
        "looks_up_a_table_of_the_host": lambda t: t.here[t.there[0].long()],
        "gives_a_parameter_the_data_of_the_host": gives_a_parameter_the_data_of_the_host,
        "writes_values_of_the_host": writes_values_of_the_host,
    },
    "generator": {
        "draws_on_the_device_with_a_generator_of_the_host": lambda t: torch.randn(
            8, device="cuda", generator=torch.Generator()
        ),
        "fills_with_a_generator_of_the_host": lambda t: t.there.clone().uniform_(generator=torch.Generator()),
    },
    "wait": {
        "asks_for_a_number": lambda t: t.number.item(),
        "asks_for_a_list": lambda t: t.there.tolist(),
        "copies_to_the_host": lambda t: t.there.cpu(),
        "copies_into_memory_that_is_not_pinned": lambda t: torch.empty(8, 8).copy_(t.there, non_blocking=True),
        "asks_where": lambda t: t.mask.nonzero(),
        "selects_by_a_mask": lambda t: t.there.masked_select(t.mask),
        "indexes_by_a_mask": lambda t: t.there[t.mask],
        "repeats_by_counts_of_the_device": lambda t: t.there.repeat_interleave(torch.arange(8, device="cuda"), 0),
        "counts_bins": lambda t: torch.arange(8, device="cuda").bincount(),
        "compares_whole_tensors": lambda t: torch.equal(t.there, t.there),
        "makes_a_tensor_of_numbers_of_the_device": lambda t: torch.tensor([t.number, t.number]),
        "waits_for_a_pinned_copy": lambda t: t.pinned.to("cuda"),
        "synchronizes": lambda t: torch.cuda.synchronize(),
        "asks_whether": asks_whether,
        "writes_many_by_a_mask": writes_many_by_a_mask,
        "waits_in_the_backward_pass": waits_in_the_backward_pass,
    },
    "unpinned": {
        "copies_from_memory_that_is_not_pinned": lambda t: t.here.to("cuda", non_blocking=True),
        "copies_into_a_tensor_from_memory_that_is_not_pinned": lambda t: t.there.clone().copy_(
            t.here, non_blocking=True
        ),
        "makes_a_tensor_of_numbers_of_the_host": lambda t: torch.tensor([1, 2, 3], device="cuda"),
        "indexes_by_numbers_of_the_host": lambda t: t.there[torch.tensor([0, 1])],
    },
    "float64": {
        "computes_in_double_precision": lambda t: t.there.double(),
        "sums_in_double_precision": lambda t: t.wide + 1,
    },
}
"""Operations by the kind of event that they must cause."""
RIGHT: dict[str, Operation] = {
    "copies_pinned_memory": lambda t: t.pinned.to("cuda", non_blocking=True),
    "copies_part_of_pinned_memory": lambda t: t.pinned[2:4].to("cuda", non_blocking=True),
    "copies_to_the_host_without_waiting": lambda t: t.there.to("cpu", non_blocking=True),
    "chooses_by_a_mask": lambda t: torch.where(t.mask, t.there, 0.0),
    "multiplies_by_a_number_of_the_host": lambda t: t.there * torch.tensor(2.0),
    "sums_a_few_numbers_in_double_precision": lambda t: t.there[:1].double(),
    "indexes_by_numbers_of_the_device": lambda t: t.there[torch.arange(4, device="cuda")],
    "repeats_to_a_known_size": lambda t: t.there.repeat_interleave(torch.arange(8, device="cuda"), 0, output_size=28),
    "computes_on_the_host": lambda t: t.here[t.here > 0.5].sum().item(),
    "sets_one_number_by_a_mask": sets_one_number_by_a_mask,
    "draws_on_the_device": draws_on_the_device,
}


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
