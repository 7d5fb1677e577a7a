"""Test losses, rewards and gradients against TRL's DPOTrainer, if TRL is installed (requirements/dev.txt)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.data.template import ChatTemplate, load_tokenizer
from tests.tiers import some_of
from tests.train.pairs import LOSSES, ROWS, first_step, open_hf
from tests.train.test_dpo import options, ref_dir  # noqa: F401, fixtures

trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")

FREE = ("simpo", "orpo")  # they have trainers of their own, see test_dpo.py


def their_step(hf_dir: Path, ref_dir: Path, out_dir: Path, args) -> tuple[float, dict[str, float], Any]:  # noqa: F811
    """Return TRL's loss, metrics and model with gradients after one batch of all pairs."""
    tokenizer = load_tokenizer(hf_dir)
    template = ChatTemplate(tokenizer)
    rows = []
    for row in ROWS:
        # Texts, to which TRL adds the end-of-turn token; of conversations it would score the newline behind that too.
        chosen, rejected = (row[name][0]["content"] for name in ("chosen", "rejected"))
        prompt = tokenizer.decode(template.encode_prompt(row["prompt"]))
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    config = trl.DPOConfig(
        output_dir=str(out_dir),
        beta=args.beta,
        loss_type=[args.loss_type],
        label_smoothing=args.label_smoothing,
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        max_length=None,
    )
    trainer = trl.DPOTrainer(
        model=open_hf(hf_dir),
        ref_model=open_hf(ref_dir),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), {name: values[-1] for name, values in trainer._metrics["train"].items()}, model


# test_dpo.py has the formula of each loss.
@pytest.mark.parametrize("loss_type", some_of([name for name in LOSSES if name not in FREE], "sigmoid"))
def test_a_step_is_trls(options, mesh, tmp_path, hf_dir, ref_dir, loss_type):  # noqa: F811
    args = options(
        loss_type=loss_type,
        ref_model=str(ref_dir),
        split_dataset_ratio=0.0,
        global_batch_size=20,
        mtp_num_layers=0,
        **LOSSES[loss_type],
    )
    ours, gradients, _ = first_step(args, mesh)
    loss, metrics, model = their_step(hf_dir, ref_dir, tmp_path / "trl", args)
    # Sums of float32 over log-probabilities of about 100, in another order.
    assert ours["loss"] == pytest.approx(loss, rel=2e-5)
    for name in [name for name in ours if name.startswith(("rewards/", "logps/"))]:
        assert ours[name] == pytest.approx(metrics[name], rel=2e-5, abs=1e-5), name
    for name, parameter in model.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-4 * largest, msg=name)
