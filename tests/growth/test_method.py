"""Test adding a training method: a `Method`, options, a row parser and an objective, all in this file.

The method is REINFORCE with stored answers. Each row has an answer and a reward. The model learns to give answers with
a high reward a higher probability, and answers with a negative reward a lower one:

    loss = mean over answers of -(reward - baseline) * log p(answer)

swiftlite needs no change: the command line, the rules, the plan, the trainer, the export and the report are those of
every method.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.cli.main import main
from swiftlite.data.batch import Batch, Extra
from swiftlite.data.encoder import ConversationEncoder, Encoder
from swiftlite.data.rows.conversation import Conversation, RowError, parse_row
from swiftlite.data.template import ChatTemplate
from swiftlite.families.resolved import HfModel
from swiftlite.methods.index import METHODS
from swiftlite.methods.method import Lines, Method
from swiftlite.model.forward import forward
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.rules.training import sft
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.mtp_loss import add_heads, count_labels, head_coefficients, head_means, head_sums
from swiftlite.train.methods.preference import log_probabilities_of
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

# The options and their rules


@dataclass(frozen=True)
class ReinforceArgs(SftArgs):
    """Learn from stored answers, each with a reward."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"streaming": "rewards are compared with each other"}

    reward_baseline: float = 0.0
    """Reward at which the probability of an answer is neither raised nor lowered."""


RULES = sft.RULES
NOTES = sft.NOTES

# The rows


def parse_rewarded(row: object, *, system: str | None, source: str) -> Conversation:
    """Parse a row with a `reward` into a conversation."""
    if not isinstance(row, dict) or not isinstance(row.get("reward"), int | float):
        raise RowError("reward", "is missing or not a number")
    rest = {name: value for name, value in row.items() if name != "reward"}
    conversation = parse_row(rest, system=system, source=source)
    return replace(conversation, extras={"reward": float(row["reward"])})


def make_encoder(args: ReinforceArgs, tokenizer, hf_model: HfModel) -> Encoder:
    template = ChatTemplate(tokenizer, vocab_size=hf_model.config["vocab_size"])
    return ConversationEncoder(template, args.max_length, args.truncation_strategy, parse_rewarded)


# The objective


@dataclass(frozen=True)
class ReinforceObjective:
    """A mean over answers, plus the losses of the MTP heads, each of which is a mean over its targets."""

    baseline: float
    heads: Heads
    mtp_loss_scaling_factor: float

    @property
    def nonfinite_hint(self) -> str:
        return "lower --lr"

    @property
    def sums_shape(self) -> tuple[int]:
        """Shape of the statistics: number of answers, their loss, and the statistics of the heads."""
        return (2 + 3 * self.heads.drafts,)

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        answers = torch.full((1, 1 + self.heads.drafts), sum(batch.num_sequences for batch in batches))
        return torch.cat([count_labels(batches, self.heads), answers])

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        (_, *targets), _, (num_answers, *_) = counts.tolist()
        coefficients = head_coefficients(self.heads, self.mtp_loss_scaling_factor, targets, num_answers)
        counts_here = mesh.cp.rank() == 0  # context-parallel ranks have the same log-probabilities

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)

            def loss_func(losses: Losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                log_p_N, _ = log_probabilities_of(losses.main.loss_BS, batch, mesh)
                loss = -((batch.extras["reward"] - self.baseline) * log_p_N).sum()
                total = add_heads(loss, losses, batch.loss_scale_KBS, coefficients)
                answers = torch.tensor(len(log_p_N) * counts_here, dtype=torch.int32, device=total.device)
                own = torch.stack([answers.double(), loss.detach().double() * counts_here])
                return total, answers, torch.cat([own, head_sums(losses, batch, mesh)])

            return forward(model, batch), loss_func

        return forward_step

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        answers, loss = sums[:2].tolist()
        return {"loss": loss / answers if answers else 0.0} | head_means(sums[2:])


def make_objective(run: Run) -> ReinforceObjective:
    assert isinstance(run.args, ReinforceArgs)
    return ReinforceObjective(run.args.reward_baseline, run.plan.heads, run.args.mtp_loss_scaling_factor)


TRAINING = Training(make_encoder=make_encoder, make_objective=make_objective, extras=(Extra("reward"),))

# The record


def describe(args: ReinforceArgs) -> Lines:
    return [("learns from", f"answers with a reward, baseline {args.reward_baseline:g}")]


REINFORCE = Method(
    name="reinforce",
    words="megatron reinforce",
    args_class=ReinforceArgs,
    line="learn from stored answers with a reward",
    training=f"{__name__}:TRAINING",
    rules=__name__,
    describe=describe,
    lr=1e-6,
    imitates_rows=False,
)

# What swiftlite does with it

ROWS = [
    {"query": f"What is {number} plus {number}?", "response": f"It is {2 * number}.", "reward": reward}
    for number, reward in zip(range(16), [1.0, -0.5, 2.0, 0.25] * 4, strict=True)
]


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(METHODS, REINFORCE.name, REINFORCE)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", with_tokenizer=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rewarded.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def words_of(model: Path, rows: Path, run: Path) -> list[str]:
    words = f"megatron reinforce --model {model} --dataset {rows} --output_dir {run} --torch_dtype float32"
    words += " --mtp_num_layers 1 --mtp_init copy_last_layer --split_dataset_ratio 0 --max_length 64"
    words += " --reward_baseline 0.5 --train_iters 4 --micro_batch_size 4 --global_batch_size 16 --lr 1e-3"
    words += " --save_steps 4"
    return [*words.split(), "--acceptance_samples", "0"]


def run_command(words: list[str]) -> int:
    """Run a command in a separate process, which must first be told about the method."""
    METHODS[REINFORCE.name] = REINFORCE
    return main(words)


@pytest.fixture(scope="module")
def trained(model, rows, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    assert launch(1, run_command, words_of(model, rows, run)) == [0]
    return run


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_it_is_planned(model, rows, tmp_path, capsys):
    assert main([*words_of(model, rows, tmp_path / "run"), "--dry_run"]) == 0
    plan = capsys.readouterr().out
    assert "baseline 0.5" in plan
    assert "megatron reinforce args.json" in plan


def test_its_rules_are_checked(model, rows, tmp_path, capsys):
    assert main([*words_of(model, rows, tmp_path / "run"), "--streaming"]) == 2
    assert "--streaming" in capsys.readouterr().err


def test_a_bad_row_is_named(model, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({**ROWS[0], "reward": "high"}) + "\n")
    (code,) = launch(1, run_command, words_of(model, bad, tmp_path / "run"))
    assert code == 1


def test_it_minimizes_its_loss(model, trained):
    """The first loss equals the formula of the module docstring, computed with transformers."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    template = ChatTemplate(AutoTokenizer.from_pretrained(model), vocab_size=theirs.config.vocab_size)
    total = 0.0
    for row in ROWS:
        sample = template.encode(parse_rewarded(row, system=None, source=""))
        ids, labels = torch.from_numpy(sample.input_ids).long(), torch.from_numpy(sample.labels).long()
        with torch.no_grad():
            log_p_SV = theirs(ids[None]).logits[0, :-1].log_softmax(-1)
        is_label_S = labels[1:] >= 0
        log_p = log_p_SV[is_label_S].gather(1, labels[1:][is_label_S][:, None]).sum()
        total -= (row["reward"] - 0.5) * float(log_p)
    first, *_, last = losses(trained)
    assert first == pytest.approx(total / len(ROWS), rel=2e-5)  # float32 sums in another order
    assert last < first


def test_two_ranks_learn_what_one_does(model, rows, trained, tmp_path):
    assert launch(2, run_command, words_of(model, rows, tmp_path / "run")) == [0, 0]
    # Float32 sums in another order; Adam's first steps amplify them (its step is the sign of tiny gradients).
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=2e-3)


def test_it_is_exported_and_reported(trained, tmp_path):
    export = tmp_path / "hf"
    assert launch(1, run_command, ["export", "--to_hf", "--model", str(trained), "--output_dir", str(export)]) == [0]
    assert json.loads((export / "config.json").read_text())["num_nextn_predict_layers"] == 1
    page = (trained / "run_report.html").read_text()
    assert "megatron reinforce" in page
    assert "--reward_baseline" in page


def test_its_args_json_says_its_command(model, rows, trained, tmp_path, capsys):
    saved = json.loads((trained / "args.json").read_text())
    assert saved["command"] == "megatron reinforce"
    assert main(["megatron", "sft", str(trained / "args.json"), "--output_dir", str(tmp_path / "other")]) == 2
    assert "swiftlite megatron reinforce" in capsys.readouterr().err
