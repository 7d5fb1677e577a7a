"""Test AdamW with 8-bit moments against torchao's, its blocks, and its encoding of the moments of a checkpoint."""

import pytest
import torch

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.train.optim import make_optimizer, wrap_model
from tests.tiny import make_tiny_hf
from tests.torchao_here import torchao as torchao


def test_updates_are_those_of_torchao(torchao, tmp_path, mesh):
    """megatron-core clips, decays and sets the learning rate; the update is that of torchao, in every bit."""
    chunks, _ = open_model(resolve(make_tiny_hf(tmp_path, "qwen2")), mesh, dtype=torch.float32)
    args = SftArgs(
        torch_dtype="float32", optimizer="adamw_8bit", lr=1e-2, weight_decay=0.3, clip_grad=0.0, train_iters=4
    )
    wrapped = wrap_model(chunks, mesh, torch.float32)
    optimizer, scheduler = make_optimizer(args, make_plan(args, 1, Heads()), make_schedule(args, 1), wrapped, mesh)
    torch.manual_seed(0)
    copies = {name: parameter.detach().clone() for name, parameter in chunks[0].named_parameters()}
    decayed = [name for name in copies if not (name.endswith("bias") or "norm" in name)]
    groups = [
        {"params": [copies[name] for name in copies if name in decayed], "weight_decay": 0.3},
        {"params": [copies[name] for name in copies if name not in decayed], "weight_decay": 0.0},
    ]
    theirs = torchao.AdamW8bit(groups, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        optimizer.zero_grad()
        for name, parameter in chunks[0].named_parameters():
            copies[name].grad = torch.randn_like(parameter)
            parameter.main_grad.copy_(copies[name].grad)  # pyright: ignore[reportAttributeAccessIssue]
        scheduler.step(increment=1)
        for group in theirs.param_groups:
            group["lr"].fill_(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
        assert all(isinstance(group["lr"], float) for group in optimizer.param_groups)
    for name, parameter in chunks[0].named_parameters():
        assert torch.equal(parameter, copies[name]), name
    encoded = [each for each in theirs.state.values() if hasattr(each["exp_avg"], "codes")]
    assert 0 < len(encoded) < len(copies)


@pytest.mark.parametrize(
    ("numel", "block"),
    [(4096, 256), (256 * 100, 256), (256 * 100 + 64, 64), (256 * 100 + 16, 16), (4095, 0), (256 * 100 + 8, 0)],
)
def test_blocks_divide_the_tensor(torchao, numel, block):
    """Parts of parameters in a distributed optimizer have sizes that torchao's blocks do not divide."""
    from swiftlite.train.adamw_8bit import AdamW8bit

    parameter = torch.zeros(numel)
    parameter.grad = torch.randn(numel)
    inner = AdamW8bit([{"params": [parameter], "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}])
    inner.step()
    moment = inner.state[parameter]["exp_avg"]
    assert getattr(moment, "block_size", 0) == block
    # A code is within half a step of the table, at most 0.7 % of the largest value of a block.
    torch.testing.assert_close(inner.moment(parameter, "exp_avg"), 0.1 * parameter.grad, rtol=0, atol=0.004)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-13])
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_decoded_moments_are_encoded_exactly(torchao, kind, scale):
    """torchao would encode them with a smaller scale if the largest magnitude of a block is that of a negative number,
    because its table ends at -0.993.
    """
    from swiftlite.train.adamw_8bit import AdamW8bit

    torch.manual_seed(0)
    written, restored, moved = (torch.zeros(64, 256) for _ in range(3))
    inner = AdamW8bit([{"params": [written, restored, moved]}])
    values = scale * torch.randn(64, 256)
    if kind == "exp_avg_sq":
        values = values.square()
    inner.set_moment(written, kind, values)
    decoded = inner.moment(written, kind)
    inner.set_moment(restored, kind, decoded)
    for name in ("codes", "scale"):
        moments = [inner.state[each][kind] for each in (written, restored)]
        assert torch.equal(*(getattr(moment, name) for moment in moments))
    # Blocks of another layout: rounded once more.
    other = decoded.view(-1).roll(128).view(64, 256)
    inner.set_moment(moved, kind, other)
    largest = float(values.abs().max())
    torch.testing.assert_close(inner.moment(moved, kind), other, rtol=0, atol=max(0.01 * largest, 1e-14))
