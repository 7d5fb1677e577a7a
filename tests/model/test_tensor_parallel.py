"""Test gradients that are added directly to `main_grad` against autograd's gradients."""

from functools import partial
from typing import Any

import pytest
import torch

from swiftlite.args.fields import DistributedArgs
from swiftlite.families.resolved import resolve
from swiftlite.model.gpt import Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers import tensor_parallel
from swiftlite.model.open import open_model
from swiftlite.train.optim import wrap_model
from tests.tiny import make_tiny_hf

TOKENS = torch.tensor([[5, 9, 5, 7, 3, 5], [2, 2, 8, 1, 0, 4]])  # some occur more than once


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def hf_model(request, tmp_path_factory):
    directory = make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", depth=2, tied=request.param)
    return resolve(directory)


def losses(model: torch.nn.Module) -> torch.Tensor:
    positions = torch.arange(TOKENS.size(1)).expand_as(TOKENS)
    found: Losses = model(ModelInputs(TOKENS, positions), Target(TOKENS.roll(-1, dims=1)))
    return sum((loss.loss_BS.sum() for loss in found.mtp), start=found.main.loss_BS.sum())


def open_one(hf_model, mesh, dtype=torch.float32):
    (chunk,), _ = open_model(hf_model, mesh, dtype=dtype)
    return chunk


def test_main_grad_is_autograds_sum(hf_model, mesh):
    plain = open_one(hf_model, mesh)
    losses(plain).backward()
    chunk = open_one(hf_model, mesh)
    (model,) = wrap_model([chunk], mesh, torch.float32)
    model.zero_grad_buffer()
    by_autograd = set()

    def note(name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            by_autograd.add(name)

    for name, parameter in chunk.named_parameters():
        parameter.register_hook(partial(note, name))
    for _ in range(2):  # two micro-batches
        losses(model).backward()
    norms = {name for name, parameter in chunk.named_parameters() if parameter.dim() == 1}
    assert by_autograd == norms
    theirs = dict(plain.named_parameters())
    parameter: Any
    for name, parameter in chunk.named_parameters():
        # Twice the same sum; rows of a token that occurs often are added one by one, which rounds in another order.
        gradient = theirs[name].grad
        assert gradient is not None
        torch.testing.assert_close(parameter.main_grad, 2 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}],
    ids=str,
)
def test_the_loss_in_one_pass_adds_to_main_grad(hf_model, mesh, options):
    """The output matrix's gradient, added in the forward pass, is the sum of two micro-batches.

    With `overlap_grad_reduce`, megatron-core's hook gets a gradient of zeros, and reduces each bucket once.
    """
    shares = list(torch.rand(3, *TOKENS.shape))
    labels, positions = TOKENS.roll(-1, dims=1), torch.arange(TOKENS.size(1)).expand_as(TOKENS)
    plain = open_one(hf_model, mesh)
    found = plain(ModelInputs(TOKENS, positions), Target(labels))
    parts = [(one.loss_BS * share).sum() for one, share in zip([found.main, *found.mtp], shares, strict=True)]
    torch.stack(parts).sum().backward()
    chunk = open_one(hf_model, mesh)
    chunk.loss_in_chunks = True
    (model,) = wrap_model([chunk], mesh, torch.float32, DistributedArgs(**options))
    model.zero_grad_buffer()

    def backward() -> None:
        found: Losses = model(ModelInputs(TOKENS, positions), Target(labels, weights=shares))
        totals = [one.total for one in (found.main, *found.mtp) if one.total is not None]
        assert len(totals) == 3
        torch.stack(totals).sum().backward()

    with model.no_sync():
        backward()
    backward()
    model.finish_grad_sync()
    theirs = dict(plain.named_parameters())
    parameter: Any
    for name, parameter in chunk.named_parameters():
        gradient = theirs[name].grad
        assert gradient is not None
        torch.testing.assert_close(parameter.main_grad, 2 * gradient, rtol=1e-5, atol=1e-6)  # as above
        assert parameter.grad is None


def test_bfloat16_gradients_are_added_in_chunks(hf_model, mesh, monkeypatch):
    """Sums of two micro-batches are bitwise identical to those of the hook of DistributedDataParallel."""
    sums = []
    for elements in (None, 40):
        with monkeypatch.context() as patched:
            if elements:
                patched.setattr(tensor_parallel, "_CHUNK", elements)  # less than a row, or several elements of a norm
            else:
                patched.setattr(torch.nn.Parameter, "register_post_accumulate_grad_hook", lambda *_: None)
            chunk = open_one(hf_model, mesh, torch.bfloat16)
            (model,) = wrap_model([chunk], mesh, torch.bfloat16)
            model.zero_grad_buffer()
            for _ in range(2):
                losses(model).backward()
        parameters: Any = chunk.named_parameters()
        assert all(parameter.grad is None for _, parameter in parameters)
        parameters = chunk.named_parameters()
        sums.append({name: parameter.main_grad for name, parameter in parameters})
    for name, total in sums[0].items():
        assert torch.equal(sums[1][name], total), name
        assert bool(total.any())
