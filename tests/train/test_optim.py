"""Test learning rates against the formula, and updates against torch's AdamW."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import DistributedArgs
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.train.optim import make_optimizer, wrap_model
from tests.tiny import make_tiny_hf, make_tiny_vision_hf

STEPS, LR, MIN_LR = 20, 1e-2, 1e-3


@pytest.fixture(scope="module")
def chunks(tmp_path_factory, mesh):
    """Return a model with biases, and its name for each parameter."""
    hf_model = resolve(make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen2"))
    chunks, _ = open_model(hf_model, mesh, dtype=torch.float32)
    return chunks


def make(chunks, mesh, **options):
    args = SftArgs(torch_dtype="float32", train_iters=STEPS, lr=LR, min_lr=MIN_LR, **options)
    plan = make_plan(args, 1, Heads(1))
    wrapped = wrap_model(chunks, mesh, torch.float32)
    return wrapped, *make_optimizer(args, plan, make_schedule(args, 1), wrapped, mesh)


def expected_lr(step: int, warmup: int, style: str) -> float:
    """Return the learning rate of a step, counted from 1."""
    if step <= warmup:
        return LR * step / warmup
    done = (step - warmup) / (STEPS - warmup)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[style]
    return MIN_LR + share * (LR - MIN_LR)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_learning_rate_of_every_step(chunks, mesh, style, warmup):
    _, optimizer, scheduler = make(chunks, mesh, lr_decay_style=style, lr_warmup_fraction=warmup / STEPS)
    found = []
    for _ in range(STEPS):
        scheduler.step(increment=1)
        (lr,) = {group["lr"] for group in optimizer.param_groups}
        found.append(lr)
    assert found == pytest.approx([expected_lr(step, warmup, style) for step in range(1, STEPS + 1)])


def rates_of(optimizer, scheduler) -> list[float]:
    found = []
    for _ in range(STEPS):
        scheduler.step(increment=1)
        (lr,) = {group["lr"] for group in optimizer.param_groups}
        found.append(lr)
    return found


def rates_of_transformers(get_schedule, **options) -> list[float]:
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    schedule = get_schedule(inner, **options)
    found = []
    for _ in range(STEPS):
        inner.step()
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    return found


@pytest.mark.parametrize(("style", "theirs"), [("cosine", "cosine"), ("linear", "linear"), ("minus_sqrt", "1-sqrt")])
@pytest.mark.parametrize("warmup", [0, 5])
def test_wsd_is_that_of_transformers(chunks, mesh, style, theirs, warmup):
    given = {"lr_wsd_decay_style": style, "lr_wsd_decay_fraction": 8 / STEPS, "lr_warmup_fraction": warmup / STEPS}
    _, optimizer, scheduler = make(chunks, mesh, lr_decay_style="WSD", **given)
    steps = {"num_warmup_steps": warmup, "num_decay_steps": 8, "num_training_steps": STEPS}
    # There, a warmup starts at the minimum; here at 0.
    expected = rates_of_transformers(get_wsd_schedule, **steps, decay_type=theirs, min_lr_ratio=MIN_LR / LR)
    assert rates_of(optimizer, scheduler)[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)


def test_inverse_square_root_is_that_of_transformers(chunks, mesh):
    _, optimizer, scheduler = make(chunks, mesh, lr_decay_style="inverse-square-root", lr_warmup_fraction=5 / STEPS)
    expected = rates_of_transformers(get_inverse_sqrt_schedule, num_warmup_steps=5)
    assert min(expected[5:]) > MIN_LR
    assert rates_of(optimizer, scheduler) == pytest.approx(expected, rel=1e-12)


def test_warming_up_to_the_end_is_possible(chunks, mesh):
    """megatron-core requires a step of decay, so the last step has the learning rate that the warmup has reached."""
    _, optimizer, scheduler = make(chunks, mesh, lr_warmup_fraction=1.0)
    scheduler.step(increment=STEPS - 1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR)


@pytest.mark.parametrize("theirs_class", [torch.optim.AdamW, torch.optim.Adam])
def test_an_update_is_adamw_without_decay_of_biases_and_norms(chunks, mesh, theirs_class):
    (chunk,) = chunks
    options: dict[str, Any] = {"lr_decay_style": "constant", "weight_decay": 0.3, "clip_grad": 0.0}
    if theirs_class is torch.optim.Adam:
        options["megatron_config"] = {"decoupled_weight_decay": False}
    wrapped, optimizer, scheduler = make(chunks, mesh, lr_warmup_fraction=0.0, **options)
    torch.manual_seed(0)
    copies = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    decayed = [name for name in copies if not (name.endswith("bias") or "norm" in name)]
    assert 0 < len(decayed) < len(copies)
    theirs = theirs_class(
        [
            {"params": [copies[name] for name in copies if name in decayed], "weight_decay": 0.3},
            {"params": [copies[name] for name in copies if name not in decayed], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for _ in range(3):
        wrapped[0].zero_grad_buffer()
        optimizer.zero_grad()
        for name, parameter in chunk.named_parameters():
            gradient = torch.randn_like(parameter)
            parameter.main_grad.copy_(gradient)
            copies[name].grad = gradient
        scheduler.step(increment=1)
        optimizer.step()
        theirs.step()
    for name, parameter in chunk.named_parameters():
        assert torch.equal(parameter, copies[name]), name


def test_decoupled_learning_rates(chunks, mesh):
    settings = {"decoupled_lr": LR / 2, "decoupled_min_lr": MIN_LR / 2}
    _, optimizer, scheduler = make(chunks, mesh, lr_warmup_fraction=0.0, megatron_config=settings)
    decoupled = {
        id(parameter) for name, parameter in chunks[0].named_parameters() if "embed" in name or "output" in name
    }
    assert decoupled
    for _ in range(STEPS):
        scheduler.step(increment=1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                scale = 0.5 if id(parameter) in decoupled else 1.0
                assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] * scale)


def test_decay_of_norms_of_queries_and_keys(tmp_path, mesh):
    chunks, _ = open_model(resolve(make_tiny_hf(tmp_path, "qwen3")), mesh, dtype=torch.float32)
    _, optimizer, _ = make(chunks, mesh, megatron_config={"apply_wd_to_qk_layernorm": True})
    names = {id(parameter): name for name, parameter in chunks[0].named_parameters()}
    decayed = {names[id(each)] for group in optimizer.param_groups if group["wd_mult"] for each in group["params"]}
    norms = {name for name in names.values() if "norm" in name}
    assert decayed & norms == {name for name in norms if "q_layernorm" in name or "k_layernorm" in name} != set()


def test_nan_in_a_gradient(chunks, mesh):
    (wrapped,) = wrap_model(chunks, mesh, torch.float32, settings={"check_for_nan_in_grad": True})
    wrapped.finish_grad_sync()
    parameter: Any = next(chunks[0].parameters())  # megatron-core adds `main_grad`
    parameter.main_grad[0] = math.nan
    with pytest.raises(RuntimeError, match="NaN"):
        wrapped.finish_grad_sync()


@pytest.mark.parametrize(("clip_grad", "mtp_clip_grad"), [(0.5, 0.2), (0.0, 0.2), (0.5, 0.0)])
def test_trunk_and_heads_are_clipped_by_their_own_norms(tmp_path, mesh, clip_grad, mtp_clip_grad):
    hf_model = resolve(make_tiny_hf(tmp_path / "model", "qwen3", depth=1))
    chunks, _ = open_model(hf_model, mesh, dtype=torch.float32)
    optimizer: Any
    _, optimizer, scheduler = make(chunks, mesh, clip_grad=clip_grad, mtp_clip_grad=mtp_clip_grad)
    torch.manual_seed(0)
    copies: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    gradients = []
    parameter: Any  # megatron-core adds `main_grad`
    for name, parameter in chunks[0].named_parameters():
        parameter.main_grad.normal_()
        copy = torch.nn.Parameter(torch.empty_like(parameter))
        copy.grad = parameter.main_grad.clone()
        copies[name.startswith("mtp.")].append(copy)
        gradients.append((parameter.main_grad, copy.grad))
    scheduler.step(increment=1)
    norms: dict[str, torch.Tensor] = {}
    optimizer.check = lambda found: not norms.update(found)
    optimizer.step()
    trunk_norm, mtp_norm = map(float, norms.values())
    for of_heads, largest, norm in ((True, mtp_clip_grad, mtp_norm), (False, clip_grad, trunk_norm)):
        expected = torch.nn.utils.clip_grad_norm_(copies[of_heads], largest or math.inf)
        assert norm == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_learning_rates_of_the_vision_tower(mesh, tmp_path):
    """The schedules of tower and aligner have the shape of --lr's schedule."""
    hf_model = resolve(make_tiny_vision_hf(tmp_path, "qwen3_5")).with_images()
    (chunk,), _ = open_model(hf_model, mesh, dtype=torch.float32)
    _, optimizer, scheduler = make([chunk], mesh, lr_warmup_fraction=0.0, vit_lr=LR / 2, aligner_lr=LR / 5)
    scale_of_parameter = {}
    for name, parameter in chunk.named_parameters():
        scale_of_parameter[id(parameter)] = 1.0
        if name.startswith("tower."):
            scale_of_parameter[id(parameter)] = 0.2 if "merger" in name else 0.5
    for _ in range(STEPS):
        scheduler.step(increment=1)
        rate = optimizer.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert group["lr"] == pytest.approx(rate * scale_of_parameter[id(parameter)])


def test_buckets_reach_megatron_and_divide_the_gradients(chunks, mesh):
    distributed = DistributedArgs(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=5000)
    numbers = []
    for chosen, is_padded in (
        (replace(distributed, ddp_bucket_size=None), False),
        (distributed, False),
        (distributed, True),
    ):
        settings = {"pad_buckets_for_high_nccl_busbw": is_padded}
        (wrapped,) = wrap_model(chunks, mesh, torch.float32, chosen, settings)
        config = wrapped.ddp_config
        assert config.bucket_size == (chosen.ddp_bucket_size or 40_000_000)
        assert config.pad_buckets_for_high_nccl_busbw == is_padded
        buffers: Any = wrapped.buffers  # a list, unlike that of other modules
        sizes = [bucket.grad_data.numel() for buffer in buffers for bucket in buffer.buckets]
        multiple = 2**16 if is_padded else 128
        assert all(size % multiple == 0 for size in sizes)
        numbers.append(len(sizes))
    assert numbers[0] == 1
    assert numbers[1] == numbers[2] > 1
