"""Test losses and gradients of `megatron gkd` against TRL's GKDTrainer (requirements/dev.txt)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from swiftlite.args.commands import GkdArgs
from swiftlite.data.sample import Sample
from tests.tiers import some_of
from tests.train.completions import first_step
from tests.train.distilled import gkd_options, make_models, samples_of_step, store
from tests.train.pairs import check_gradients, open_hf


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("models"), depth=0)


def their_step(
    models: tuple[Path, Path], out_dir: Path, args: GkdArgs, samples: list[Sample]
) -> tuple[float, torch.nn.Module]:
    """Return TRL's loss and model with gradients for these rows."""
    ids, labels = (
        pad_sequence([torch.from_numpy(getattr(each, name)).long() for each in samples], True, value)
        for name, value in (("input_ids", 0), ("labels", -100))
    )
    lengths = torch.tensor([len(each) for each in samples])
    inputs = {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.size(1)) < lengths[:, None]).long(),
        "labels": labels,
    }
    # Imported here, because every worker imports all test files, and this takes seconds.
    trl_gkd, datasets = pytest.importorskip("trl.experimental.gkd"), pytest.importorskip("datasets")
    config = trl_gkd.GKDConfig(output_dir=str(out_dir), beta=args.beta, bf16=False, use_cpu=True, report_to=[])
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    trainer = trl_gkd.GKDTrainer(
        model=open_hf(models[0]),
        teacher_model=open_hf(models[1]),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"messages": []}]),
        processing_class=tokenizer,
    )
    model = trainer.model.train()
    if args.loss_temperature == 1:
        loss = trainer.compute_loss(model, inputs)
    else:  # TRL's trainer does not pass a temperature to its loss
        logits, target = (
            each(ids, attention_mask=inputs["attention_mask"]).logits for each in (model, trainer.teacher_model)
        )
        loss = trainer.generalized_jsd_loss(
            logits[:, :-1],
            target[:, :-1].detach(),
            labels[:, 1:],
            beta=args.beta,
            temperature=args.loss_temperature,
        )
    loss.backward()
    return float(loss.detach()), model


CASES: dict[str, dict[str, Any]] = {
    "forward": {"beta": 0.0},
    "0.1": {"beta": 0.1},
    "0.5": {},
    "0.5, cold, packed": {"loss_temperature": 0.7, "padding_free": True},
    "reverse": {"beta": 1.0},
    "reverse, warm": {"beta": 1.0, "loss_temperature": 1.5},
    "on-policy, packed": {"beta": 0.5, "lmbda": 1.0, "padding_free": True},
    "on-policy, forward": {"beta": 0.0, "lmbda": 1.0},
}
KEPT = ("0.5, cold, packed", "on-policy, forward")


@pytest.mark.parametrize("name", some_of(list(CASES), *KEPT))
def test_a_step_is_trls(models, mesh, tmp_path, name):
    changed: dict[str, Any] = {"lmbda": 0.0} | CASES[name]
    if changed["lmbda"]:
        changed["rollouts_from"] = str(tmp_path / "rollouts")
    args = gkd_options(models, tmp_path)(**changed)
    if args.rollouts_from:
        store(args, mesh, Path(args.rollouts_from), step=0)
    samples = samples_of_step(args, mesh, step=0)
    metrics, gradients = first_step(args, mesh)
    loss, hf_model = their_step(models, tmp_path / "trl", args, samples)
    assert loss > 0.1
    # Sums of float32 in another order.
    assert metrics["loss"] == pytest.approx(loss, rel=2e-5)
    check_gradients(gradients, hf_model, 2e-5)
