"""Test the page of a run with known files."""

import base64
import json

import pytest

from swiftlite.data.images import decode, read_bytes
from swiftlite.report.page import MarkedAnswer, render
from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import run_page, write_run_page
from tests.data.images import data_uri, noise
from tests.messages import mention_each, mentions
from tests.report.files import COUNTS, HOSTILE, tokens, write_run


def parts(section) -> list[str]:
    """Return the names of a section's parts, except its text."""
    return [kind for kind in ("figures", "answers", "tables", "commands") if getattr(section, kind)]


def figures(page) -> dict:
    return {figure.name: figure for section in page.sections for figure in section.figures}


def rollouts(page) -> list[MarkedAnswer]:
    """Return the completions of the last generation."""
    return [answer for section in page.sections if section.figures for answer in section.answers]


def rows(page) -> list[list[str]]:
    """Return the rows of all tables."""
    found = []
    for section in page.sections:
        for table in section.tables:
            found += map(list, table.rows)
    return found


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return run_page(read_run(write_run(tmp_path_factory.mktemp("page") / "run")))


def test_what_matters_comes_first(page):
    assert mentions(page.title, "run")
    assert mentions(page.lead, "43.3 0.0")
    accepted, per_step, engine, loss, *_, time = page.tiles
    assert accepted.value == "0.0\u00a0% → 43.3\u00a0%"
    assert mentions(accepted.note, "13 30 2")
    assert (per_step.value, per_step.note) == ("1.00 → 2.30", "")
    assert mentions(engine.name, "vllm")
    assert engine.value == "43.3\u00a0%"
    assert loss.value == "0.75"
    assert mentions(time.value, "1 15")
    assert mentions(time.note, "6")
    assert list(map(parts, page.sections)) == [
        ["figures"],
        ["answers"],
        ["figures", "tables"],
        ["tables"],
        ["tables", "commands"],
    ]


def test_figures_have_the_numbers_of_the_files(page):
    found = figures(page)
    assert mention_each(found["acceptance"].table.columns, ["", "1", "2", "3"])
    assert found["acceptance"].table.rows[0] == ["0", "50.0\u00a0%", "40.0\u00a0%", "30.0\u00a0%"]  # before training
    assert found["acceptance"].table.rows[-1][:2] == ["6", "85.7\u00a0%"]
    assert len(found["loss"].series) == 2
    assert found["loss"].table.rows[:2] == [["1", "4", ""], ["2", "2", "2.25"]]
    positions = found["positions"].table
    assert positions.columns[1:] == ["after", "before", "vllm"]
    expected = [count / COUNTS.drafts for count in COUNTS.accepted_per_position]
    assert [row[1] for row in positions.rows] == [f"{100 * rate:.1f}\u00a0%" for rate in expected]
    assert [row[0] for row in found["channels"].table.rows] == ["What is it?", "tale"]


def test_the_time_of_a_step_is_divided_into_its_parts(page):
    chart = figures(page)["time"]
    assert chart.series == ["data", "forward", "backward", "optimizer", "checkpoint", "other"]
    without_checkpoint = ["0.25", "0.5", "1", "0.125", "0", "0.125"]
    assert [row[1:] for row in chart.table.rows[:2]] == [without_checkpoint, without_checkpoint]
    assert chart.table.rows[2] == ["3", "0.25", "0.5", "1", "0.125", "4", "0.125"]
    assert ["checkpoint", "8"] in rows(page)


def test_times_of_a_resumed_run_name_their_steps(run):
    path = run / "run_report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"resumed_from": 2}))
    notes = [tile.note for tile in run_page(read_run(run)).tiles if tile.name == "time"]
    assert mention_each(notes, [f"3 {report['steps']}"])


def test_ranks_are_compared_if_there_are_several(run, page):
    assert "ranks" not in figures(page)
    with (run / "metrics.jsonl").open("a") as file:
        ranks = {"time/fastest": 1.0, "time/fastest_rank": 2, "time/slowest": 1.5, "time/slowest_rank": 0}
        file.write(json.dumps({"step": 7, **ranks}) + "\n")
    assert figures(run_page(read_run(run)))["ranks"].table.rows == [["7", "1", "1.5"]]


def test_each_answer_says_how_much_of_it_was_drafted(page):
    (section,) = [each for each in page.sections if each.answers]
    first, second = section.answers
    assert mentions(first.note, "4 7 2")
    assert first.before
    assert mentions(second.note, "0 1")
    assert not second.before


def test_what_became_of_the_rows_and_how_it_was_run(page):
    found = rows(page)
    assert [row[1:] for row in found].count(["7", "5", "2", "99"]) == 2  # of all files, and of each
    assert ["What is it?", "7", "5", "2", "99"] in found
    assert ["rows.jsonl:3: What is it?"] in found
    assert ["--mtp_num_layers", "3"] in found
    assert ["--system", "What is it?"] in found
    assert not [row for row in found if row[0] == "--lr"]
    assert [row[1:] for row in found if mentions(row[0], "random")] == [["2"]]
    (command,) = page.sections[-1].commands
    assert command.startswith("swiftlite megatron sft --model 'a model'")


def test_keys_are_hidden(tmp_path):
    """No option of sft is a key, but a user may have added one to args.json."""
    run = write_run(tmp_path / "run", sft_mock_dataset_config_json={"api_key": "sesame"})
    assert b"sesame" not in write_run_page(run).read_bytes()


def test_a_run_that_was_stopped_has_a_page_as_well(run):
    (run / "run_report.json").unlink()
    acceptance = json.loads((run / "acceptance.json").read_text())
    (run / "acceptance.json").write_text(json.dumps({"depths": 3, "before": acceptance["before"]}))
    (run / "drafts.json").write_text("half of a fi")
    page = run_page(read_run(run))
    assert mentions(page.lead, "0.0 6")
    assert list(map(parts, page.sections)) == [["figures"], ["figures"], ["tables", "commands"]]
    assert write_run_page(run).is_file()


def test_an_empty_directory_has_a_page_too(tmp_path):
    empty = run_page(read_run(tmp_path))
    assert empty.lead
    assert list(empty.tiles) == []
    assert write_run_page(tmp_path) == tmp_path / "run_report.html"


def test_the_same_files_make_the_same_page(run):
    assert write_run_page(run).read_bytes() == write_run_page(run).read_bytes()


def test_a_page_of_a_long_run_is_small(tmp_path):
    run = write_run(tmp_path / "run", steps=5_000)
    assert write_run_page(run).stat().st_size < 600_000


def test_images_are_encoded_again(tmp_path):
    """A file may contain anything, such as an image of another format, or an address."""
    original = data_uri(noise(300, 200))
    svg = "data:image/svg+xml;base64," + base64.b64encode(b"<svg onload='alert(1)'/>").decode()
    stored = [original, None, svg, "https://example.org/a.png", "a.png", 3, "data:image/png;base64,AAAA"]
    page = run_page(read_run(write_run(tmp_path / "run", images=stored)))
    first, *others = page.sections[1].answers[0].images
    assert others == [None] * 6
    assert first is not None
    assert first.startswith("data:image/jpeg;base64,")
    assert decode(read_bytes(first)).size == (256, 171)
    html = render(page).decode()
    assert first in html
    assert original not in html
    assert "example.org" not in html
    assert "svg+xml" not in html
    assert html.count('<p class="note">Image') == 12


def test_rollouts_are_shown(run):
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    more = {"reward": 0.5, "rewards/right/mean": 0.5, "rollout/acceptance_1": 0.25, "entropy": 1.5, "teacher_kl": 2.0}
    evaluated = {"step": 2, "eval_reward": 0.7, "eval_rewards/right/mean": 0.7, "eval_completions/mean_length": 3.0}
    more_lines = [*(line | more for line in lines), evaluated]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in more_lines))
    (run / "rollouts").mkdir()
    line = {"prompt": "p" * 300, "completion": HOSTILE, "scores": [None, 1.0], "advantage": -0.5}
    (run / "rollouts" / "000000.jsonl").write_text("not json\n")
    (run / "rollouts" / "000001.jsonl").write_text((json.dumps(line) + "\n") * 20)
    page = run_page(read_run(run))
    assert {"reward", "rollout_acceptance", "entropy", "teacher_kl"} <= set(figures(page))
    held_out = {
        name for name, figure in figures(page).items() if any(mentions(each, "held out") for each in figure.series)
    }
    assert {"reward", "length"} <= held_out
    assert not {"rollout_acceptance", "teacher_kl"} & held_out
    assert any(mentions(tile.name, "held-out reward") for tile in page.tiles)
    shown = rollouts(page)
    assert len(shown) == 12
    assert len(shown[0].prompt) < 210
    assert [token["text"] for token in shown[0].tokens] == [HOSTILE]
    assert mentions(shown[0].note, "scored 1 -0.5")
    assert HOSTILE.encode() not in render(page)
    (run / "rollouts" / "000001.jsonl").write_text("not json\n")
    assert not rollouts(run_page(read_run(run)))


def test_accepted_drafts_of_rollouts_are_marked(run):
    """A long completion is shown from its end."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "reward": 0.5}) + "\n")
    (run / "rollouts").mkdir()
    line = {"prompt": "asked", "completion": "It is so", "scores": [1.0], "advantage": 0.5}
    marked = tokens(("It", 0), (" is", 1), (HOSTILE, 2))
    lines = [line | {"tokens": marked}, line | {"tokens": marked * 1000}, line | {"tokens": marked[:1]}, line]
    (run / "rollouts" / "000000.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = run_page(read_run(run))
    short, long, *plain = rollouts(page)
    assert short.tokens == marked
    assert mentions(short.note, "1 0.5 2 3")
    assert mentions(long.note, "2000 3000")
    assert len(long.tokens) < 500
    assert long.tokens[-3:] == marked
    assert [token["text"] for each in plain for token in each.tokens] == ["It is so"] * 2
    assert HOSTILE.encode() not in render(page)


def test_rollouts_without_rewards_are_shown(run):
    """Only some steps of `megatron gkd` have completions."""
    metrics = run / "metrics.jsonl"
    first, *others = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [first | {"completions/mean_length": 7.5}, *others]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "rollouts").mkdir()
    line = {"prompt": "asked", "completion": "answered", "scores": [], "advantage": 0.0}
    (run / "rollouts" / "000000.jsonl").write_text(json.dumps(line) + "\n")
    page = run_page(read_run(run))
    assert "length" in figures(page)
    assert [(each.prompt, each.note) for each in rollouts(page)] == [("asked", "")]
