"""Measure training speed by shape of model and kind of run, and the speed of a plain transformers loop on the same
device.

Each case runs in a subprocess and adds a line to the results. The most important cases are first, because the stage can
be stopped. Weights are drawn on the device, and rows are created in memory. By default, rows are packed and have the
same length; a step is one micro-batch unless its name says so. In the results, `x` is the ratio to another case, if
that case was measured. The plain loop has float32 weights under bfloat16 autocast, because swiftlite also keeps float32
weights and moments. It uses SDPA and torch's fused AdamW.
"""

import importlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from result import Results, Settings, read
from torch.nn.attention import sdpa_kernel
from trainees import (
    free_memory,
    lognormal_rows,
    medians,
    profiled,
    random_rows,
    shape,
    slowest,
    trainee,
    waits,
)
from transformers import AutoConfig, AutoModelForCausalLM

from swiftlite.args.commands import SftArgs
from swiftlite.model.attention import cudnn
from swiftlite.model.layers.kernels import varlen_kernel
from swiftlite.plan.kernels import automatic
from swiftlite.runtime.device import current_device

LENGTH, ROWS, STEPS = 4096, 2, 8
TINY_LENGTH, TINY_STEPS = 64, 3
SHORT = 8
"""Number of sequences per `LENGTH` tokens of a packed row of short sequences."""
FASTEST = 2
"""Number of warm-up steps, in which kernels are compiled and memory is allocated."""


@dataclass(frozen=True)
class Case:
    """One line of the stage.

    Attributes:
        shape: name in `trainees.SHAPES`.
        options: options of `megatron sft`; empty for the plain loop.
        rival: name of the case with which tokens/s are compared.
        needs: a required package.
    """

    name: str
    shape: str
    run: Callable[["Case", Settings, Results], None]
    options: dict[str, Any] = field(default_factory=dict)
    rival: str = ""
    needs: str = ""


def run(settings: Settings, results: Results) -> None:
    script = Path(__file__).resolve().parents[1]
    selected = settings.selected(case.name for case in CASES)
    for case in CASES:
        if case.name not in selected:
            continue
        if case.needs and (reason := missing(case.needs, settings)):
            results.add(case.name, reason)
            continue
        if settings.tiny:  # only checks that cases run, so no subprocess is needed
            case.run(case, settings, results)
            continue
        log = settings.output_dir / f"speed-{CASES.index(case)}.log"
        command = [sys.executable, "-W", "ignore", str(script), *sys.argv[1:], "--case", case.name]
        with log.open("w") as file:
            status = subprocess.run(command, stderr=file).returncode
        if status:
            results.add(case.name, f"exit status {status}, see {log}", False, "a figure")


def missing(package: str, settings: Settings) -> str:
    """Return why a package of Triton kernels cannot be measured on this machine; empty if it can."""
    if settings.device != "cuda":
        return f"the kernels of {package} require a GPU"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return ""


def size_of(settings: Settings) -> tuple[int, int]:
    """Return row length and number of steps."""
    if settings.tiny:
        return TINY_LENGTH, TINY_STEPS
    return LENGTH, STEPS


def run_case(name: str, settings: Settings, results: Results) -> None:
    (case,) = [case for case in CASES if case.name == name]
    case.run(case, settings, results)


def swiftlite(case: Case, settings: Settings, results: Results, lengths: str = "whole", micro_batches: int = 1) -> None:
    length, steps = size_of(settings)
    config = shape(case.shape, settings.tiny)
    vocab = config["vocab_size"]
    options: dict[str, Any] = {"padding_free": True} | case.options
    if settings.device != "cuda":
        options.pop("attention_backend", None)  # those of a GPU
    args = SftArgs(
        model="-",
        max_length=length,
        micro_batch_size=ROWS,
        global_batch_size=ROWS * micro_batches,
        train_iters=steps,
        mtp_init="random",
        **options,
    )
    num_rows = steps * ROWS * micro_batches
    rows = random_rows(num_rows, length, vocab)
    if lengths == "lognormal":
        rows = lognormal_rows(num_rows * length, length, vocab)
    with trainee(config, args, rows) as trainer:
        is_cuda = trainer.mesh.device.is_cuda
        measured = [trainer.step(step) for step in range(1, steps)][FASTEST:] or [trainer.step(steps)]
        middle = medians(measured)
        events = profiled(lambda: trainer.step(steps), is_cuda)
    detail = [f"{middle['peak_memory_gb']:.1f} GB", f"{sum(waits(events).values())} waits per step"]
    if "mfu" in middle:
        detail.insert(0, f"MFU {middle['mfu']:.1%}")
    report(case, middle["tokens_per_second"], detail, events, is_cuda, results)


def plain(case: Case, settings: Settings, results: Results, compiles: bool = False, liger: bool = False) -> None:
    """Measure a plain transformers training loop."""
    device = torch.device(settings.device)
    length, steps = size_of(settings)
    values = dict(shape(case.shape, settings.tiny))
    model_type = values.pop("model_type")
    if liger:
        getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{model_type}")()
    config = AutoConfig.for_model(model_type, **values)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    forward = model
    if compiles:
        forward = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, values["vocab_size"], (ROWS, length), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    speed = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        speed.append(tokens.numel() / (time.perf_counter() - start))
    is_cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0
    events = profiled(step, is_cuda)
    report(case, statistics.median(speed[FASTEST:] or speed), [f"{peak:.1f} GB"], events, is_cuda, results)


def loss_alone(case: Case, settings: Settings, results: Results) -> None:
    """Measure only the loss of one micro-batch: cross-entropy with its matrix products, forward and backward."""
    from swiftlite.model.loss.chunked_loss import LabelTarget, chunked_loss
    from swiftlite.model.loss.losses import select, token_loss
    from swiftlite.runtime.distributed import session

    positions, hidden, vocab = 8192, 2048, 151_936
    if settings.tiny:
        positions, hidden, vocab = 64, 64, 499
    with session() as mesh:
        device = mesh.device.torch_device
        states = torch.randn(positions, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        matrix = (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16().requires_grad_()
        words = torch.randint(0, vocab, (1, positions))
        selected = select(words, device)

        def all_logits() -> torch.Tensor:
            return token_loss(states @ matrix.t(), selected, mesh.tp).loss_BS.sum()

        def in_chunks() -> torch.Tensor:
            return chunked_loss(states, matrix, LabelTarget(selected.label_N), selected, mesh.tp).loss_BS.sum()

        ways = {"all logits": all_logits, "in chunks, compiled": in_chunks}
        if not missing("liger_kernel", settings):
            package = importlib.import_module("liger_kernel.transformers")
            fused = package.LigerFusedLinearCrossEntropyLoss(reduction="sum")
            ways["Liger"] = lambda: fused(matrix, states, selected.label_N)
        for name, compute in ways.items():
            free_memory()
            seconds = passes(compute, [states, matrix])
            peak = torch.cuda.max_memory_allocated() / 1e9 if mesh.device.is_cuda else 0
            results.add(f"{case.name}, {name}", f"{1e3 * min(seconds):.1f} ms, {peak:.1f} GB")


def attention_alone(case: Case, settings: Settings, results: Results) -> None:
    """Measure only the attention of one layer, forward and backward, by torch's own choice and by cuDNN.

    The rows are `ROWS` whole sequences, then one packed row of shorter sequences. In the first call, cuDNN builds plans
    for the sizes.
    """
    config, (length, _) = shape(case.shape, settings.tiny), size_of(settings)
    heads, groups, channels = (config[of] for of in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    short = length // SHORT
    lengths, scale = (short,) * (ROWS * SHORT), channels**-0.5
    device = torch.device(settings.device)

    def draw(*sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        query, key, value = (torch.randn(*sizes, number, channels, **options) for number in (heads, groups, groups))
        return query, key, value

    rows, row = draw(length, ROWS), draw(ROWS * length)
    ways: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...], int]] = {
        "rows, torch": (lambda: whole_rows(*rows, scale), rows, length),
        "rows, cuDNN": (lambda: cudnn.attend(*rows, scale), rows, length),
    }
    packed = varlen_kernel(automatic(device.type == "cuda", is_float32=False, head=channels))
    if packed:
        starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        ways["packed, torch"] = (lambda: packed(*row, starts, starts, short, short, scale=scale), row, short)
    if not missing("cudnn", settings):
        ways["packed, cuDNN"] = (lambda: cudnn.attend_packed(*row, lengths, scale), row, short)
    for name, (compute, inputs, of_sequence) in ways.items():
        first, *others = passes(compute, inputs)
        # Of the pairs of a query and a key that it sees: two products forward, and five backward.
        flops = 7 * ROWS * length * of_sequence * heads * channels
        rate = flops / min(others) / 1e12
        results.add(f"{case.name}, {name}", f"{1e3 * min(others):.2f} ms, {rate:.0f} TFLOP/s, first call {first:.2f} s")


def whole_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute causal attention of rows [S, B, heads, channels] by the kernel that torch chooses without cuDNN."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    with sdpa_kernel(cudnn.WITHOUT_CUDNN):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def passes(compute: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], repeats: int = 6) -> list[float]:
    """Return the seconds of repeated forward and backward passes."""
    device = current_device()
    seconds = []
    for _ in range(repeats):
        device.synchronize()
        start = time.perf_counter()
        out = compute()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def report(case: Case, speed: float, detail: list[str], events: Any, is_cuda: bool, results: Results) -> None:
    """Add a line of measurements and a line of the slowest kernels."""
    rivals = [found for found in read(results.path.parent) if found.name == case.rival]
    measured = str(rivals[-1].value) if rivals else ""
    if " tokens/s" in measured:  # otherwise it was skipped, and the value says why
        detail.append(f"{speed / float(measured.split()[0].replace(',', '')):.2f}x {case.rival}")
    results.add(case.name, f"{speed:,.0f} tokens/s, {', '.join(detail)}")
    parts = [f"{key} {share:.0%} ({count})" for key, share, count in slowest(events, is_cuda)]
    results.add(f"{case.name}: slowest kernels, calls", "; ".join(parts))


HEAD: dict[str, Any] = {"mtp_num_layers": 1}
ALONE: dict[str, Any] = {"mtp_num_layers": 0}
HEADS_ONLY = HEAD | {"mtp_mode": "heads_only"}
LORA = ALONE | {"tuner_type": "lora"}
PLAIN = "1.7B, plain loop"
FASTEST_PLAIN = "1.7B, plain loop, compiled, Liger"
ONE_HEAD = "1.7B, one head"
FOUR = partial(swiftlite, micro_batches=4)
"""As other frameworks measure: an optimizer step for several micro-batches."""
CASES = (
    Case(ONE_HEAD, "1.7B", swiftlite, HEAD),
    Case("1.7B, one head, 4 micro-batches", "1.7B", FOUR, HEAD, rival=ONE_HEAD),
    Case(FASTEST_PLAIN, "1.7B", partial(plain, compiles=True, liger=True), needs="liger_kernel"),
    Case("1.7B, no head", "1.7B", swiftlite, ALONE, rival=FASTEST_PLAIN),
    Case("1.7B, no head, 4 micro-batches", "1.7B", FOUR, ALONE),
    Case("8B, LoRA, 4 micro-batches", "8B", FOUR, LORA),
    Case("attention of 1.7B", "1.7B", attention_alone),
    Case("attention of 8B", "8B", attention_alone),
    Case("1.7B, one head, flash", "1.7B", swiftlite, HEAD | {"attention_backend": "flash"}, rival=ONE_HEAD),
    Case("0.6B, one head, 4 micro-batches", "0.6B", FOUR, HEAD),
    Case("1.7B, one head, FP8", "1.7B", swiftlite, HEAD | {"fp8_format": "hybrid"}, rival=ONE_HEAD),
    Case(PLAIN, "1.7B", plain),
    Case("1.7B, plain loop, compiled", "1.7B", partial(plain, compiles=True), rival=PLAIN),
    Case("1.7B, plain loop, Liger", "1.7B", partial(plain, liger=True), rival=PLAIN, needs="liger_kernel"),
    Case("loss of 8,192 positions", "1.7B", loss_alone),
    Case("1.7B, lognormal, packed", "1.7B", partial(swiftlite, lengths="lognormal"), HEAD),
    Case(
        "1.7B, lognormal, packed, cuDNN",
        "1.7B",
        partial(swiftlite, lengths="lognormal"),
        HEAD | {"attention_backend": "cudnn"},
        rival="1.7B, lognormal, packed",
        needs="cudnn",
    ),
    Case(
        "1.7B, lognormal, padded",
        "1.7B",
        partial(swiftlite, lengths="lognormal"),
        HEAD | {"padding_free": False},
        rival="1.7B, lognormal, packed",
    ),
    Case("8B, heads_only, ce", "8B", swiftlite, HEADS_ONLY | {"mtp_loss": "ce"}),
    Case("8B, heads_only, kl", "8B", swiftlite, HEADS_ONLY | {"mtp_loss": "kl"}, rival="8B, heads_only, ce"),
    Case("experts", "experts", swiftlite, HEAD),
    Case("latent attention", "latent", swiftlite, HEAD),
    Case("gated delta nets", "gdn", swiftlite, HEAD),
)
