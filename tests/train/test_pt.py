"""Test `megatron pt` in one process: packed text of the standard library against transformers on each document."""

import heapq
import inspect
import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swiftlite.args.commands import PtArgs
from swiftlite.data.sample import IGNORED
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.train.pairs import open_hf
from tests.train.prepared import prepare


@pytest.fixture
def options(hf_dir, tmp_path):
    """Return the options of a run of 4 steps over two long texts and some short ones."""
    texts = [inspect.getsource(module)[:1500] for module in (heapq, textwrap)]
    texts += [f"{name} is a function of heapq." for name in heapq.__all__]
    rows = tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    usual = PtArgs(
        model=str(hf_dir),
        dataset=[str(rows)],
        val_dataset=[str(rows)],
        output_dir=str(tmp_path / "run"),
        torch_dtype="float32",
        max_length=96,
        packing_length=192,
        global_batch_size=4,
        train_iters=4,
        lr=1e-3,
        lr_decay_style="constant",
        acceptance_samples=3,
        acceptance_max_new_tokens=2,
        report_to=[],
    )
    return lambda **changed: replace(usual, **changed)


def train(args: PtArgs, mesh) -> tuple[phases.Run, float]:
    """Return the finished run, and its evaluation before the first step."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)
    before = trainer.evaluate(0)["eval_loss"]
    phases.finish(run, phases.fit(run, trainer, state.step, training.make_held_out(run)))
    return run, before


def test_packed_documents_learn_as_each_alone(options, mesh):
    run, before = train(options(train_iters=1), mesh)
    rows = [{sample.source for sample in row} for row in run.rows]
    assert max(map(len, rows)) >= 3
    pieces = [sample.source for sample in run.data.train]
    assert max(map(pieces.count, pieces)) > 5  # the long texts

    model = open_hf(Path(run.args.model))
    loss, num_labels = 0.0, 0
    for sample in run.data.val:
        with torch.no_grad():
            logits = model(torch.tensor(sample.input_ids[None], dtype=torch.long)).logits[0]
        labels = torch.tensor(sample.labels[1:], dtype=torch.long)
        loss += torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum", ignore_index=IGNORED).item()
        num_labels += int((labels != IGNORED).sum())
    # Sums over some 1,000 labels, in another order.
    assert before == pytest.approx(loss / num_labels, rel=1e-5)

    measured = json.loads((run.output_dir / "acceptance.json").read_text())
    assert list(measured) == ["depths", "before", "after"]
    prompts = training.make_held_out(run).prompts
    assert [len(prompt) for prompt in prompts] == [48, 48, len(run.data.val[-8]) // 2]  # half of the first piece
    assert prompts[1].text.startswith(inspect.getsource(textwrap)[:20])
