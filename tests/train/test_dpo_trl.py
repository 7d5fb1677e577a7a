"""Test losses, rewards and gradients against TRL's DPOTrainer, if TRL is installed (requirements/dev.txt)."""

from pathlib import Path
from typing import Any

import pytest

from swiftlite.data.template import ChatTemplate, load_tokenizer
from tests.tiers import some_of
from tests.train.pairs import LOSSES, ROWS, check_gradients, first_step, open_hf, trls_step
from tests.train.test_dpo import options, ref_dir  # noqa: F401, fixtures

pytest.importorskip("trl")

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
    models = {"model": open_hf(hf_dir), "ref_model": open_hf(ref_dir)}
    given = {"beta": args.beta, "loss_type": [args.loss_type], "label_smoothing": args.label_smoothing}
    return trls_step("DPO", out_dir, rows, models, tokenizer, **given)


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
    check_gradients(gradients, model, 1e-4)
