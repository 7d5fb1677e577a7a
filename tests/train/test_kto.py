"""Test `megatron dpo --loss_type kto` against TRL's KTOTrainer, if TRL is installed (requirements/dev.txt)."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.rows.rated import others
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.report.run_page import write_run_page
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.messages import naming
from tests.train.pairs import RATED, check_gradients, first_step, open_hf, train, trls_step, write_rated
from tests.train.prepared import prepare
from tests.train.test_dpo import options, ref_dir  # noqa: F401, fixtures
from tests.train.test_sft import metrics

WEIGHTS = {"desirable_weight": 0.7, "undesirable_weight": 1.3, "beta": 0.2}


@pytest.fixture
def rated(options, tmp_path):  # noqa: F811
    """Return the options of a run over rated rows, some of them replaced."""
    path = write_rated(tmp_path / "rated.jsonl")
    return lambda **changed: options(**{"loss_type": "kto", "dataset": [str(path)], **changed})


def in_order_of_mismatches(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows in an order in which each gets the answer of the previous row, as TRL pairs
    the rows of a batch.
    """
    other = others([json.dumps(row["prompt"]) for row in rows], seed=42).tolist()
    order = [0]
    while len(order) < len(rows):
        order.append(other.index(order[-1]))
    return [rows[place] for place in order]


def their_step(hf_dir: Path, ref_dir: Path, out_dir: Path) -> tuple[float, dict[str, float], Any]:  # noqa: F811
    """Return TRL's loss, metrics and model with gradients after one batch of all rows."""
    tokenizer = load_tokenizer(hf_dir)
    template = ChatTemplate(tokenizer)
    rows = []
    for row in in_order_of_mismatches(RATED):
        # Texts, to which TRL adds the end-of-turn token; of conversations it would score the newline behind that too.
        prompt = tokenizer.decode(template.encode_prompt(row["prompt"]))
        rows.append({"prompt": prompt, "completion": row["completion"][0]["content"], "label": row["label"]})
    models = {"model": open_hf(hf_dir), "ref_model": open_hf(ref_dir)}
    return trls_step("KTO", out_dir, rows, models, tokenizer, **WEIGHTS)


def test_a_step_is_trls(rated, mesh, tmp_path, hf_dir, ref_dir):  # noqa: F811
    """KL is one number for the batch, however it is cut."""
    common = {"split_dataset_ratio": 0.0, "global_batch_size": 20, "mtp_num_layers": 0}
    args = rated(ref_model=str(ref_dir), micro_batch_size=2, padding_free=True, **common, **WEIGHTS)
    ours, gradients, _ = first_step(args, mesh)
    loss, metrics, model = their_step(hf_dir, ref_dir, tmp_path / "trl")
    assert metrics["kl"] > 0.1  # with the models the other way round it is below 0, which counts as 0
    # Sums of float32 over log-probabilities of about 100, in another order.
    assert ours["loss"] == pytest.approx(loss, rel=2e-5)
    for name in [name for name in ours if name.startswith(("kl", "rewards/", "logps/"))]:
        assert ours[name] == pytest.approx(metrics[name], rel=5e-5, abs=2e-5), name
    check_gradients(gradients, model, 1e-4)


def test_heads_learn_from_good_answers_alone(rated, mesh):
    run = prepare(rated(global_batch_size=16, micro_batch_size=16), mesh)
    (batch,) = run.batches.train(run.rows, Sampler(16, 16, 0, shuffle=False), 0)
    good = batch.extras["desirable"]
    assert (batch.labels_KBS[1, ~good] == -100).all()
    assert (batch.labels_KBS[0] != -100).any(dim=1).all()
    assert (batch.labels_KBS[1, good] != -100).any(dim=1).all()


def test_a_run_learns_and_evaluates(rated, mesh):
    run = train(rated(train_iters=6, lr=3e-3), mesh)
    first, *_, last = metrics(run)
    assert first["kl"] == pytest.approx(0.0, abs=1e-4)  # the model is its own reference, padded otherwise
    assert first["loss"] == pytest.approx(0.5, abs=1e-4)
    assert last["rewards/margins"] > 0.01
    assert 'id="rewards-title"' in write_run_page(run).read_text()


def test_one_question_has_no_other(rated, mesh, tmp_path):
    rows = [{"query": "q", "response": text, "label": text == "a"} for text in ("a", "b", "c")]
    path = tmp_path / "one.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=naming("--loss_type kto --dataset")):
        prepare(rated(dataset=[str(path)]), mesh)


def test_kl_is_the_same_in_packed_rows(rated, mesh, tmp_path, ref_dir):  # noqa: F811
    """A step over all rows, in which answers follow questions of other lengths, is computed with
    and without packing.
    """
    packing = {"packing": True, "sequence_packing_scheduler": "dp_balanced"}
    models = {"ref_model": str(ref_dir), "split_dataset_ratio": 0.0, "mtp_num_layers": 0, "max_length": 192}
    kl = []
    for name, more in {"padded": {"global_batch_size": 20}, "packed": {"packing_length": 192, **packing}}.items():
        args = rated(output_dir=str(tmp_path / name), **models, **more)
        run = prepare(args, mesh)
        if name == "packed":
            args = rated(output_dir=str(tmp_path / "all"), global_batch_size=len(run.rows), **models, **more)
            run = prepare(args, mesh)
        batches = run.batches.train(run.rows, Sampler(len(run.rows), len(run.rows), 0), 0)
        if name == "packed":
            assert 1 < len(batches.companions) < 20
            assert max(batch.tokens_KBS.size(2) for batch in batches.companions) <= 192
        assert sum(batch.num_sequences for batch in batches.companions) == 20
        trainer = training.make_trainer(run, phases.restore(run))
        kl.append(trainer.step(1)["kl"])
    assert kl[0] > 0.1
    assert kl[1] == pytest.approx(kl[0], rel=2e-5)  # float32 sums in another order
