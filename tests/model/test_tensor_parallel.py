"""Test gradients that are added directly to `main_grad` against autograd's gradients."""

from functools import partial
from typing import Any

import pytest
import torch

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
