"""Test the phases of a run. Each is called separately, as another command would."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.log import logger
from swiftlite.data.dataset import Data, DataReport
from swiftlite.data.sample import Sample
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.runtime.agreement import digest
from swiftlite.store.manifest import MANIFEST_FILE, write_manifest
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.engines.eagle3_reference import add_drafter
from tests.messages import has_line, mentions, naming
from tests.tiny import make_tiny_hf
from tests.train.prepared import prepare
from tests.untimed import untimed


def train(args, mesh) -> Path:
    """Run all phases in order; return the run's directory."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)
    outcome = phases.fit(run, trainer, state.step, training.make_held_out(run))
    assert outcome.stopped_by == 0
    phases.report(run, outcome)
    return run.output_dir


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [untimed(line) for line in lines]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_each_phase_writes_its_own_files(options, mesh, pages):
    run = prepare(options(save_steps=2, acceptance_samples=2, acceptance_max_new_tokens=4), mesh)
    assert not run.output_dir.exists()
    assert (len(run.data.train), len(run.data.val), run.schedule.steps) == (16, 4, 4)

    state = phases.restore(run)
    assert state.step == 0
    assert names(run.output_dir) == {"source", "args.json"}

    trainer = training.make_trainer(run, state)
    outcome = phases.fit(run, trainer, 0, training.make_held_out(run))
    checkpoints = {"checkpoint-2", "checkpoint-4"}
    measured = {"acceptance.json", "drafts.json"}
    assert names(run.output_dir) == {"source", "args.json", "metrics.jsonl", *measured, *checkpoints}
    lines = metrics(run.output_dir)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]  # an evaluation after steps 2 and 4
    assert lines[-1] == {"step": 4, **outcome.evaluation}

    phases.report(run, outcome)
    report = json.loads((run.output_dir / "run_report.json").read_text())
    assert report["steps"] == 4
    assert report["evaluation"] == outcome.evaluation
    assert report["tensors"]["trained_but_unchanged"] == []
    num_parameters = len(list(run.train_state.chunks[0].parameters()))
    assert report["weights"] == {"loaded": num_parameters, "initialized": {}, "dropped": []}
    acceptance = json.loads((run.output_dir / "acceptance.json").read_text())
    assert list(acceptance) == ["depths", "before", "after"]
    assert report["versions"]["megatron-core"] == version("megatron-core")
    assert report["layout"]["processes"] == "1"
    page = (run.output_dir / "run_report.html").read_text()
    assert "What is " in page  # a prompt
    assert mentions(page, str(report["data"]["train_samples"]))


def test_a_page_that_cannot_be_written_fails_no_run(options, mesh, tmp_path, pages, caplog):
    (tmp_path / "run/run_report.html").mkdir(parents=True)
    logger.propagate = True
    run = train(options(), mesh)
    assert (run / "run_report.json").is_file()
    assert has_line(caplog.text, "run_report.html IsADirectoryError")


def test_a_resumed_run_takes_the_steps_of_an_unbroken_one(options, mesh, tmp_path):
    constant = {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0, "torch_dtype": "bfloat16"}
    unbroken = train(options(output_dir=str(tmp_path / "unbroken"), **constant), mesh)
    stopped = options(output_dir=str(tmp_path / "stopped"), train_iters=2, **constant)
    train(stopped, mesh)
    resumed = train(replace(stopped, train_iters=4, resume=True), mesh)
    steps = [[line for line in metrics(run) if "loss" in line] for run in (unbroken, resumed)]
    assert steps[0] == steps[1]


def change_a_row(args, hf_dir):
    """Change the text of one row, which may be held out."""
    path = Path(args.dataset[0])
    path.write_text(path.read_text().replace("What is 3 plus 3?", "How much are 3 and 3?"))


def add_a_row(args, hf_dir):
    """Add a row, so that the held-out rows are drawn again."""
    with Path(args.dataset[0]).open("a") as file:
        file.write('{"query": "Who?", "response": "Nobody."}\n')


def change_the_template(args, hf_dir):
    path = hf_dir / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", " <|im_end|>"))


def test_a_run_does_not_resume_over_other_data(options, mesh, hf_dir):
    args = options(train_iters=2)
    train(args, mesh)
    kept = {path: path.read_bytes() for path in (Path(args.dataset[0]), hf_dir / "chat_template.jinja")}
    for change, named in ((change_a_row, "--dataset"), (add_a_row, "--dataset"), (change_the_template, "tokenizer")):
        change(args, hf_dir)
        with pytest.raises(UserError, match=naming(f"--resume checkpoint-2 {named}")):
            prepare(replace(args, train_iters=4, resume=True), mesh)
        for path, content in kept.items():
            path.write_bytes(content)
    prepare(replace(args, train_iters=4, resume=True), mesh)
    path = Path(args.output_dir) / "checkpoint-2/trainer_state.json"
    state = json.loads(path.read_text())
    del state["data"], state["version"]
    path.write_text(json.dumps(state))  # as the first releases wrote it
    (path.parent / "SHA256SUMS").unlink()
    prepare(replace(args, train_iters=4, resume=True), mesh)
    run = prepare(replace(args, train_iters=1, resume=True), mesh)
    with pytest.raises(UserError, match=naming("checkpoint-2 1")):
        phases.restore(run)


def test_a_moved_dataset_is_accepted_and_compared_by_content(options, mesh):
    args = options(train_iters=2)
    train(args, mesh)
    path = Path(args.dataset[0])
    moved = path.with_name("moved.jsonl")
    path.rename(moved)
    again = replace(args, train_iters=4, resume=True, dataset=[str(moved)])
    train(again, mesh)
    change_a_row(again, None)
    with pytest.raises(UserError, match=naming("--resume checkpoint-4 --dataset")):
        prepare(again, mesh)


def test_a_stream_resumes_over_rows_that_it_has_not_read(options, mesh):
    args = options(train_iters=2, streaming=True, split_dataset_ratio=0.0, streaming_buffer_size=4)
    path = Path(args.dataset[0])
    path.write_text(path.read_text() * 3)
    train(args, mesh)
    moved = path.with_name("moved.jsonl")
    path.rename(moved)
    again = replace(args, train_iters=4, resume=True, dataset=[str(moved)])
    add_a_row(again, None)
    train(again, mesh)
    assert [line["step"] for line in metrics(Path(args.output_dir)) if "loss" in line] == [1, 2, 3, 4]
    again = replace(again, train_iters=5)
    change_a_row(again, None)
    run = prepare(again, mesh)
    with pytest.raises(UserError, match=naming(f"--dataset {moved}")):
        training.make_trainer(run, phases.restore(run))


@pytest.mark.slow
def test_a_stream_of_an_earlier_release_does_not_resume_over_longer_files(options, mesh):
    args = options(train_iters=2, streaming=True, split_dataset_ratio=0.0)
    train(args, mesh)
    path = Path(args.output_dir) / "checkpoint-2/trainer_state.json"
    state = json.loads(path.read_text())
    del state["stream"]["files"]
    sizes = [Path(args.dataset[0]).stat().st_size]
    state["data"]["rows"] = digest({"held out": state["data"]["rows"], "sizes": sizes})
    path.write_text(json.dumps(state))
    (path.parent / MANIFEST_FILE).unlink()
    write_manifest(path.parent, {})
    again = replace(args, train_iters=4, resume=True)
    prepare(again, mesh)
    add_a_row(args, None)
    with pytest.raises(UserError, match=naming("--resume --dataset")):
        prepare(again, mesh)


def test_heads_alone_learn_and_the_report_proves_it(options, mesh):
    run = train(options(mtp_mode="heads_only"), mesh)
    tensors = json.loads((run / "run_report.json").read_text())["tensors"]
    assert tensors["trunk_sha256_before"] == tensors["trunk_sha256_after"]
    assert tensors["frozen_but_changed"] == tensors["trained_but_unchanged"] == []
    assert tensors["trained_tensors"] > 0
    assert tensors["frozen_tensors"] > 0


@pytest.mark.slow
def test_a_run_without_steps_measures_and_saves_the_initialized_heads(options, mesh):
    """`--train_iters 0` exports heads that are only fitted: there is nothing to compare, so they are measured once."""
    args = options(mtp_mode="heads_only", train_iters=0, acceptance_samples=2, acceptance_max_new_tokens=4)
    run = train(args, mesh)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-0"]
    assert set(json.loads((run / "acceptance.json").read_text())) == {"depths", "after"}
    assert [line["step"] for line in metrics(run)] == [0]
    tensors = json.loads((run / "run_report.json").read_text())["tensors"]
    assert tensors["trained_but_unchanged"]
    saved = (run / "checkpoint-0").stat().st_mtime_ns
    assert train(replace(args, resume=True), mesh) == run
    assert [line["step"] for line in metrics(run)] == [0]
    assert (run / "checkpoint-0").stat().st_mtime_ns == saved
    train(replace(args, resume=True, train_iters=2), mesh)
    assert set(json.loads((run / "acceptance.json").read_text())) == {"depths", "before", "after"}


def test_heads_that_config_does_not_promise_are_not_dropped_in_silence(options, mesh, hf_dir):
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=naming("config.json --mtp_num_layers 0 num_nextn_predict_layers")):
        prepare(options(), mesh)
    run = prepare(options(mtp_num_layers=0), mesh)
    assert run.plan.heads.layers == 0
    assert any(key.startswith("mtp.") for key in run.train_state.weights_report.dropped)


def test_heads_that_are_grafted_come_from_the_other_model(options, mesh, tmp_path):
    base = make_tiny_hf(tmp_path / "base", "qwen3", depth=1, with_tokenizer=True, seed=1)
    run = prepare(options(mtp_init="graft", mtp_graft_from=str(base)), mesh)
    (chunk,) = run.train_state.chunks
    found = chunk.state_dict()["mtp.layers.0.eh_proj.weight"]
    expected = load_file(base / "model.safetensors")["mtp.fc.weight"]
    assert found.equal(expected)


def test_samples_longer_than_the_positions_of_the_model_are_counted(options, mesh, hf_dir, caplog):
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    logger.propagate = True
    prepare(options(), mesh)
    assert has_line(caplog.text, "16 16 --max_length 8")


def test_a_long_rejected_answer_is_counted(hf_dir, caplog):
    def make(length: int) -> Sample:
        tokens = np.zeros(length, np.int32)
        return Sample(tokens, tokens, np.zeros(length, np.float32))

    short, long = make(4), make(100)
    hf_model = resolve(hf_dir)
    hf_model.config["max_position_embeddings"] = 64
    data = Data([short, replace(short, others=(long,))], [], [], DataReport(), "")
    logger.propagate = True
    training.warn_of_long_samples(data, hf_model)
    assert has_line(caplog.text, "1 2 --max_length 64")


def test_mock_samples_that_are_too_long_are_named(options, mesh, tmp_path):
    mock = {"mode": "file", "path": str(tmp_path / "lengths.csv")}
    (tmp_path / "lengths.csv").write_text("16\n40\n")
    with pytest.raises(UserError, match=naming("40 --max_length 32")):
        prepare(options(sft_mock_dataset_config_json=mock, max_length=32, dataset=[]), mesh)


def test_a_run_that_removes_a_drafter_is_exported_without_it(options, mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "model", "llama", with_tokenizer=True, num_hidden_layers=4)
    trunk = load_file(model / "model.safetensors").keys()
    mcore, drafted = tmp_path / "mcore", tmp_path / "drafted"
    convert(ExportArgs(model=str(add_drafter(model, "3.1", [0, 2, 3])), output_dir=str(mcore), to_mcore=True), mesh)
    convert(ExportArgs(model=str(mcore), output_dir=str(drafted), to_hf=True), mesh)
    assert (drafted / "draft" / "model.safetensors").is_file()
    run = train(options(model=str(drafted), mtp_num_layers=0, train_iters=1), mesh)
    for mtp in ("keep", "strip"):
        out = tmp_path / mtp
        convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True, mtp=mtp), mesh)
        assert load_file(out / "model.safetensors").keys() == trunk
        assert resolve(out).heads == Heads()
        assert not (out / "draft").exists()
