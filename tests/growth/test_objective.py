"""Test training with another loss than the next-token loss: an objective is passed to the trainer.

The objective of this file learns preferences. Rows are in pairs, the better answer before the worse one, and the model
learns to give the better answer a higher probability:

    loss = mean over pairs of -log sigmoid(beta * (log p(better) - log p(worse)))

Its targets are pairs, not tokens, and it logs its own metrics. swiftlite needs no change: the trainer, the
micro-batches, the pipeline, the optimizer and the metrics are those of `megatron sft`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample, make_sample
from swiftlite.families.resolved import resolve
from swiftlite.model.forward import forward
from swiftlite.model.gpt import Losses
from swiftlite.model.open import open_model
from swiftlite.model.pipeline import ForwardStep
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.metrics.loggers import MetricsFile
from swiftlite.train.objective import Objective
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.trainer import Trainer
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

BETA = 0.1
ARGS = SftArgs(torch_dtype="float32", micro_batch_size=4, global_batch_size=8, train_iters=6, lr=2e-3)


@dataclass(frozen=True)
class PreferenceObjective:
    """Preferences within pairs of rows. A micro-batch contains whole pairs."""

    beta: float

    @property
    def nonfinite_hint(self) -> str:
        """Hint of the error for a non-finite loss."""
        return "lower --lr"

    @property
    def sums_shape(self) -> tuple[int]:
        """Shape of the statistics: the loss, the number of pairs, the number of pairs whose better answer is more
        likely, the margins.
        """
        return (4,)

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        return torch.tensor([sum(batch.position_ids_BS.size(0) // 2 for batch in batches)])

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)

            def loss_func(losses: Losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                log_p_B = -losses.main.loss_BS.sum(dim=1)  # of each answer: prompts and padding have no loss
                margin_P = self.beta * (log_p_B[0::2] - log_p_B[1::2])
                loss = -F.logsigmoid(margin_P).sum()
                num_pairs = torch.tensor(len(margin_P), dtype=torch.int32)
                sums = [loss, num_pairs, (margin_P > 0).sum(), margin_P.sum()]
                return loss, num_pairs, torch.stack([value.detach().double() for value in sums])

            return forward(model, batch), loss_func

        return forward_step

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        loss, pairs, right, margins = sums.tolist()
        return {"preference_loss": loss / pairs, "accuracy": right / pairs, "margin": margins / pairs}


def make_pairs(num_pairs: int, seed: int) -> list[Sample]:
    """Return better and worse answers to random prompts.

    One counts up from a token of the prompt, the other counts down.
    """
    random = np.random.RandomState(seed)
    samples = []
    for _ in range(num_pairs):
        prompt = random.randint(0, 128, 4)
        for direction in (1, -1):
            answer = (prompt[-1] + direction * np.arange(1, 6)) % 128
            samples.append(make_sample(np.concatenate([prompt, answer]), [0.0] * 4 + [1.0] * 5))
    return samples


HELD_OUT = make_pairs(8, seed=1)


def train(hf_dir: Path, metrics_file: Path, mesh: Mesh) -> list[dict[str, float]]:
    """Train, and return the metrics over held-out pairs before and after training."""
    objective: Objective = PreferenceObjective(BETA)
    hf_model = resolve(hf_dir)
    plan = make_plan(ARGS, mesh.dp.size(), Heads())
    flops = training_flops(hf_model.config)
    batches = Batches(plan, mesh.dp.rank(), 0, flops)
    rows = batches.rows(make_pairs(16, seed=0))
    schedule = make_schedule(ARGS, len(rows))

    chunks, _ = open_model(hf_model, mesh, dtype=torch.float32)
    wrapped = wrap_model(chunks, mesh, torch.float32)
    optimizer, scheduler = make_optimizer(ARGS, plan, schedule, wrapped, mesh)
    sampler = Sampler(len(rows), plan.global_batch_size, ARGS.seed, shuffle=False)  # pairs stay together
    trainer = Trainer(
        mesh=mesh,
        model=wrapped,
        objective=objective,
        optimizer=optimizer,
        scheduler=scheduler,
        plan=plan,
        schedule=schedule,
        train_batches=partial(batches.train, rows, sampler),
        eval_batches=batches.evaluation(HELD_OUT, None),
        count_flops=lambda tokens, squares, counts, *items: flops.step(tokens, squares, [tokens], *items),
        metric_loggers=[MetricsFile(metrics_file, 0, schedule.steps)] if mesh.dp.rank() == 0 else [],
        logging_steps=1,
        checkpointer=None,
    )
    before = trainer.evaluate(0)
    trainer.fit(0)
    trainer.close()
    return [before, trainer.evaluate(0)]


def train_in_own_session(hf_dir: Path, metrics_file: Path) -> list[dict[str, float]]:
    with session(timeout_minutes=2) as mesh:
        return train(hf_dir, metrics_file, mesh)


@torch.no_grad()
def preference_of_transformers(hf_dir: Path) -> dict[str, float]:
    """Compute the metrics by their definition, one answer and one token at a time, with transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    log_p = []
    for sample in HELD_OUT:
        ids = torch.from_numpy(sample.input_ids).long()
        log_probabilities = model(ids[None]).logits[0].log_softmax(dim=-1)
        log_p.append(sum(float(log_probabilities[place - 1, ids[place]]) for place in range(4, len(ids))))
    margins = [BETA * (better - worse) for better, worse in zip(log_p[0::2], log_p[1::2], strict=True)]
    return {
        "eval_preference_loss": sum(float(np.log1p(np.exp(-margin))) for margin in margins) / len(margins),
        "eval_accuracy": sum(margin > 0 for margin in margins) / len(margins),
        "eval_margin": sum(margins) / len(margins),
    }


def test_the_trainer_learns_another_objective(tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "model", "qwen3")
    before, after = train(hf_dir, tmp_path / "metrics.jsonl", mesh)
    assert before == pytest.approx(preference_of_transformers(hf_dir), rel=1e-5)  # float32 sums in another order
    assert after["eval_preference_loss"] < before["eval_preference_loss"]
    assert after["eval_margin"] > before["eval_margin"]

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) >= {"preference_loss", "accuracy", "margin", "grad_norm"} for line in lines)
    assert not any("mtp" in name for name in lines[0])


@pytest.mark.gloo
def test_two_processes_learn_what_one_does(tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "model", "qwen3")
    alone = train(hf_dir, tmp_path / "alone.jsonl", mesh)
    first, second = launch(2, train_in_own_session, hf_dir, tmp_path / "two.jsonl")
    assert first == second
    for one, two in zip(alone, first, strict=True):
        # Float32 sums in another order; Adam's first steps amplify them (its step is the sign of tiny gradients).
        assert two == pytest.approx(one, rel=2e-3)
