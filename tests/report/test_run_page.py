"""The page of a run: what it says of files whose content is known."""

import json

import pytest

from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import run_page, write_run_page
from tests.report.files import COUNTS, write_run


def titles(page) -> list[str]:
    return [section.title for section in page.sections]


def figures(page) -> dict:
    return {figure.name: figure for section in page.sections for figure in section.figures}


def tables(page) -> dict:
    return {table.title: table for section in page.sections for table in section.tables}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_what_matters_comes_first(run):
    page = run_page(read_run(run))
    assert page.title == "Run: run"
    assert page.lead == (
        "Of the tokens that the heads draft on held-out prompts, the model accepts 43.3\u00a0%, more than the "
        "0.0\u00a0% before training."
    )
    found = {tile.name: (tile.value, tile.note) for tile in page.tiles}
    assert found["drafts accepted"] == ("0.0\u00a0% → 43.3\u00a0%", "13 of 30 drafted tokens, 2 prompts")
    assert found["tokens per step"] == ("1.00 → 2.30", "")
    assert found["accepted in vllm"][0] == "43.3\u00a0%"
    assert found["held-out loss"][0] == "0.75"
    assert found["time"] == ("1 min 15 s", "6 steps")
    assert titles(page) == ["Acceptance", "Who wrote each token", "Training", "Rows", "The run"]


def test_figures_have_the_numbers_of_the_files(run):
    found = figures(run_page(read_run(run)))
    assert found["acceptance"].table.columns == ["step", "depth 1", "depth 2", "depth 3"]
    assert found["acceptance"].table.rows[0] == ["0", "50.0\u00a0%", "40.0\u00a0%", "30.0\u00a0%"]  # before training
    assert found["acceptance"].table.rows[-1][:2] == ["6", "85.7\u00a0%"]
    assert found["loss"].series == ["training", "held out"]
    assert found["loss"].table.rows[:2] == [["1", "4", ""], ["2", "2", "2.25"]]
    positions = found["positions"].table
    assert positions.columns == ["position", "after", "before", "vllm"]
    expected = [count / COUNTS.drafts for count in COUNTS.accepted_per_position]
    assert [row[1] for row in positions.rows] == [f"{100 * rate:.1f}\u00a0%" for rate in expected]
    assert [row[0] for row in found["channels"].table.rows] == ["What is it?", "tale"]


def test_each_answer_says_how_much_of_it_was_drafted(run):
    (section,) = [each for each in run_page(read_run(run)).sections if each.answers]
    first, second = section.answers
    assert first.note == "4 of 7 tokens are accepted drafts; 2 drafts were refused"
    assert first.before
    assert second.note == "0 of 1 tokens are accepted drafts; 1 drafts were refused"
    assert not second.before


def test_what_became_of_the_rows_and_how_it_was_run(run):
    page = run_page(read_run(run))
    found = tables(page)
    assert found["What became of every row"].rows == [
        ["all files", "7", "5", "2", "99"],
        ["What is it?", "7", "5", "2", "99"],
    ]
    assert found["Malformed rows"].rows == [["rows.jsonl:3: What is it?"]]
    changed = dict(found["Options that are not the defaults"].rows)
    assert (changed["--mtp_num_layers"], changed["--system"]) == ("3", "What is it?")
    assert "--lr" not in changed
    assert found["Tensors at the start; run_report.json has their names"].rows[1] == ["initialised, random", "2"]
    (command,) = page.sections[-1].commands
    assert command.startswith("swiftlite megatron sft --model 'a model'")


def test_keys_are_hidden(tmp_path):
    """No option of sft is one; an args.json that somebody has written may hold one."""
    run = write_run(tmp_path / "run", sft_mock_dataset_config_json={"api_key": "sesame"})
    assert b"sesame" not in write_run_page(run).read_bytes()


def test_a_run_that_was_stopped_has_a_page_as_well(run):
    (run / "run_report.json").unlink()
    acceptance = json.loads((run / "acceptance.json").read_text())
    (run / "acceptance.json").write_text(json.dumps({"depths": 3, "before": acceptance["before"]}))
    (run / "drafts.json").write_text("half of a fi")
    page = run_page(read_run(run))
    assert page.lead == (
        "Before training, the model accepted 0.0\u00a0% of the tokens drafted on held-out prompts. This run is not "
        "finished: it has taken 6 steps."
    )
    assert titles(page) == ["Acceptance", "Training", "The run"]
    assert write_run_page(run).is_file()


def test_an_empty_directory_has_a_page_too(tmp_path):
    page = run_page(read_run(tmp_path))
    assert page.lead.startswith("Acceptance of drafts was not measured in this run.")
    assert write_run_page(tmp_path) == tmp_path / "run_report.html"


def test_the_same_files_make_the_same_page(run):
    assert write_run_page(run).read_bytes() == write_run_page(run).read_bytes()


def test_a_page_of_a_long_run_is_small(tmp_path):
    run = write_run(tmp_path / "run", steps=20_000)
    assert write_run_page(run).stat().st_size < 600_000
