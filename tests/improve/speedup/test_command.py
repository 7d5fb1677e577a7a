"""Test `speedup` before its first step and after its last one."""

import copy
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swiftlite.args.commands import SpeedupArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.info import EngineInfo
from swiftlite.improve import steps
from swiftlite.improve.speedup.budget import CANDIDATE_COST
from swiftlite.improve.speedup.command import NOT_SETTINGS, run
from swiftlite.improve.speedup.state import Progress
from tests.data.templates import ALPACA
from tests.improve.speedup.test_screen import BENCH
from tests.messages import has_line, mentions
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize(
    ("template", "hint"),
    [
        (None, "chat_template.jinja"),
        (ALPACA, "--dataset --self_prompts_share 0"),  # nothing ends a user turn
    ],
)
def test_a_model_without_a_usable_template_is_refused_first(tmp_path, template, hint):
    model = make_tiny_hf(tmp_path / "tiny", "qwen3", with_tokenizer=True)
    model = shutil.copytree(model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    if template:
        (model / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError) as raised:
        run(SpeedupArgs(model=str(model), output_dir=str(tmp_path / "out")))
    assert mentions(raised.value.problem, f"--model {model} chat template")
    assert mentions(raised.value.hint, hint)
    assert not (tmp_path / "out").exists()


def test_too_few_rows_are_refused_before_the_first_step(tmp_path):
    """The refused command stores no settings: the same directory can be used with other options."""
    model = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"query": "{number}"}}\n' * 9 for number in range(47)))
    args = SpeedupArgs(str(model), output_dir=str(tmp_path / "out"), dataset=[str(rows)], self_prompts_share=0.0)
    with pytest.raises(UserError) as raised:
        run(args)
    assert mentions(raised.value.problem, "--dataset 47 48")
    assert mentions(raised.value.hint, "--self_prompts_share 0.5")
    assert not (tmp_path / "out" / "speedup.json").exists()


@pytest.fixture
def complete(tmp_path, monkeypatch) -> SpeedupArgs:
    """Prepare the directory of a command whose steps are all complete, and return its options. llama.cpp is not
    compared.
    """
    monkeypatch.setattr(EngineInfo, "is_installed", property(lambda info: False))
    model = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True)
    args = SpeedupArgs(model=str(model), output_dir=str(tmp_path / "out"), budget="5m", concurrency=[1, 16])
    steps = ("answers", "training", "export", "bench")
    settings = {name: value for name, value in asdict(args).items() if name not in NOT_SETTINGS}
    directory = Path(args.output_dir)
    for name in ("answers", "run", "hf", "bench"):
        (directory / "round-1" / name).mkdir(parents=True)
    Progress(settings, {f"round-1/{step}": 100.0 for step in steps}, rounds=[128]).write(directory)
    for name in ("answers/dataset.jsonl", "train.jsonl", "run/run_report.json", "hf/config.json", "../held_out.jsonl"):
        (directory / "round-1" / name).touch()
    acceptance = {"after": {"generated": {"acceptance_per_position": [0.5, 0.25, 0.1]}}}
    (directory / "round-1/run/acceptance.json").write_text(json.dumps(acceptance))
    (directory / "round-1/bench/bench.json").write_text(json.dumps(BENCH))
    return args


def test_a_complete_command_prints_its_result_again(complete, capsys, caplog):
    caplog.set_level("INFO", logger="swiftlite")
    run(complete)
    printed = capsys.readouterr().out
    assert has_line(printed, "round-1 50.0% 25.0% 10.0%")
    assert has_line(printed, "swiftlite deploy --num_speculative_tokens 2")
    assert has_line(caplog.text, "resuming: 4 7 --budget 5m")
    assert "WARNING" not in caplog.text


def test_an_exceeded_budget_is_logged(complete, caplog, monkeypatch):
    """The training was interrupted after 500 s, and is complete now."""
    progress = json.loads((Path(complete.output_dir) / "speedup.json").read_text())
    progress["seconds"] = {"round-1/answers": 100.0}
    progress["unfinished"] = {"round-1/training": 500.0}
    (Path(complete.output_dir) / "speedup.json").write_text(json.dumps(progress))
    monkeypatch.setattr(steps, "_run", lambda words, keep_time: 0)
    run(complete)
    assert has_line(caplog.text, "WARNING round-1/training 10.0 --budget 5m")


def test_another_concurrency_runs_only_bench_again(complete, monkeypatch):
    """Its time is added to that of the first run."""
    path = Path(complete.output_dir) / "speedup.json"
    ran = []
    monkeypatch.setattr(steps, "_run", lambda words, keep_time: ran.append(words) or 0)
    run(complete)
    assert not ran
    run(replace(complete, concurrency=[4]))
    (words,) = ran
    assert words[0] == "bench"
    assert mentions(" ".join(words), "--concurrency 4 --max_prompts")
    progress = json.loads(path.read_text())
    assert progress["seconds"]["round-1/bench"] >= 100
    assert progress["unfinished"] == {}


@pytest.mark.parametrize(("ratio", "is_faster"), [(1.5, True), (1.3, False)])
def test_the_faster_of_two_drafters_is_recommended(complete, capsys, caplog, ratio, is_faster):
    """By its ratio to the server without drafts, also if the machine was slower during its measurement."""
    directory = Path(complete.output_dir)
    args = replace(complete, drafter="auto", budget="45m")
    progress = json.loads((directory / "speedup.json").read_text())
    progress["settings"]["drafter"] = "auto"
    progress["seconds"]["round-1/training"] = 2000.0  # no second round
    progress["seconds"] |= {f"dspark/{step}": 100.0 for step in ("training", "export", "bench")}
    (directory / "speedup.json").write_text(json.dumps(progress))
    for name in ("run", "hf", "bench"):
        (directory / "dspark" / name).mkdir(parents=True)
    for name in ("run/run_report.json", "hf/config.json"):
        (directory / "dspark" / name).touch()
    acceptance = {"after": {"generated": {"acceptance_per_position": [0.4, 0.3, 0.2, 0.1, 0.05]}}}
    (directory / "dspark/run/acceptance.json").write_text(json.dumps(acceptance))
    bench = copy.deepcopy(BENCH)
    for server in bench["servers"]:
        server["measured"][0]["tokens_per_second"] /= 10
    bench["recommendations"][0]["ratios"]["2"] = ratio
    for choice in bench["recommendations"]:
        choice["command"] = "swiftlite deploy --model dspark/hf"
    (directory / "dspark/bench/bench.json").write_text(json.dumps(bench))
    run(args)
    printed = capsys.readouterr().out
    assert has_line(printed, "dspark 40.0% 30.0% 20.0% 10.0% 5.0%")
    assert has_line(printed, "round-1 50.0% 25.0% 10.0%")
    assert has_line(printed, "swiftlite deploy --model dspark/hf") is is_faster
    assert has_line(caplog.text, "dspark 0 of 1 rounds")  # as after a larger budget


def test_a_small_budget_has_no_second_drafter(complete, capsys, caplog):
    caplog.set_level("INFO", logger="swiftlite")
    progress = json.loads((Path(complete.output_dir) / "speedup.json").read_text())
    progress["settings"]["drafter"] = "auto"
    (Path(complete.output_dir) / "speedup.json").write_text(json.dumps(progress))
    run(replace(complete, drafter="auto"))
    assert has_line(caplog.text, "--drafter auto MTP heads --budget 5m 45m")
    assert has_line(capsys.readouterr().out, "swiftlite deploy --num_speculative_tokens 2")


def test_a_budget_that_suffices_for_two_drafters_is_named(complete, caplog):
    caplog.set_level("INFO", logger="swiftlite")
    progress = json.loads((Path(complete.output_dir) / "speedup.json").read_text())
    progress["settings"]["drafter"] = "auto"
    progress["seconds"]["round-1/training"] = 2000.0  # no second round
    (Path(complete.output_dir) / "speedup.json").write_text(json.dumps(progress))
    run(replace(complete, drafter="auto", budget="46m"))
    line = next(line for line in caplog.text.splitlines() if "dspark" in line)
    minutes = int(line.rpartition("--budget ")[2].split("m")[0])
    assert minutes * 60 > (1 + CANDIDATE_COST) * 2000


def test_another_engine_that_fails_is_named(complete, capsys, caplog, monkeypatch):
    monkeypatch.setattr(EngineInfo, "is_installed", property(lambda info: True))
    monkeypatch.setattr("swiftlite.improve.speedup.plan.sees_gpu", lambda: False)
    monkeypatch.setattr(steps, "_run", lambda words, keep_time: 1)
    unfinished = Path(complete.output_dir) / "llamacpp" / "bench" / "bench.json"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_text(json.dumps({"recommendations": []}))  # of a bench that ended after its first server
    run(complete)
    assert has_line(caplog.text, "WARNING llama.cpp llamacpp/export 1")
    assert has_line(capsys.readouterr().out, "swiftlite deploy --num_speculative_tokens 2")
