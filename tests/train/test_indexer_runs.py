"""Test runs that train the indexers of sparse attention: what changes, what is exported, and what a report proves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.args.commands import ExportArgs
from swiftlite.export.run import convert
from tests.tiny import make_tiny_hf
from tests.train.conftest import options_in
from tests.train.test_sft import metrics, train

TOPK = 8


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """Return a model whose indexers select fewer tokens than the rows have."""
    directory = tmp_path_factory.mktemp("sparse") / "hf"
    return make_tiny_hf(directory, "deepseek_v32", depth=1, with_tokenizer=True, dtype=torch.bfloat16, index_topk=TOPK)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("frozen", {}),
        ("joint", {"acceptance_samples": 2, "acceptance_max_new_tokens": 4}),
        ("joint", {"mtp_mode": "heads_only"}),
        ("indexer_only", {"packing": True}),
    ],
    ids=["frozen", "joint", "joint heads_only", "indexer_only packed"],
)
def test_what_a_run_changes(sparse, mesh, tmp_path, mode, options):
    options = {"indexer_mode": mode, "torch_dtype": "bfloat16", "lr": 1e-2, "train_iters": 3, **options}
    run = train(options_in(tmp_path, sparse)(**options), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(tmp_path / "out"), to_hf=True), mesh)
    before, after = (load_file(directory / "model.safetensors") for directory in (sparse, tmp_path / "out"))
    assert after.keys() == before.keys()
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    indexers = {name for name in before if ".indexer." in name}
    if options.get("mtp_mode") == "heads_only":
        indexers = {name for name in indexers if name.startswith("model.layers.2.")}
        assert {name.startswith("model.layers.2.") for name in changed} == {True}
    assert changed & indexers == (set() if mode == "frozen" else indexers)
    assert bool(changed - indexers) == (mode != "indexer_only")
    assert [("indexer_loss" in step) for step in metrics(run) if "loss" in step] == [mode != "frozen"] * 3
    tensors = json.loads((run / "run_report.json").read_text())["tensors"]
    assert tensors["frozen_but_changed"] == tensors["trained_but_unchanged"] == []


def test_indexers_alone_learn(sparse, mesh, tmp_path):
    """Their loss falls, and a resumed run takes the same steps."""
    options = {"indexer_mode": "indexer_only", "lr_decay_style": "constant", "lr_warmup_fraction": 0.0, "lr": 1e-2}
    make = options_in(tmp_path, sparse)
    whole = train(make(**options, train_iters=8, output_dir=str(tmp_path / "whole")), mesh)
    stopped = make(**options, train_iters=4, output_dir=str(tmp_path / "stopped"))
    train(stopped, mesh)
    resumed = train(replace(stopped, train_iters=8, resume=True), mesh)
    steps, again = ([line for line in metrics(run) if "loss" in line] for run in (whole, resumed))
    assert steps == again
    losses = [line["indexer_loss"] for line in steps]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]
