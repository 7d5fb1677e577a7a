"""Test `swiftlite report` from the command line to the file."""

import pytest

from swiftlite.cli.main import main
from swiftlite.report.comparison import comparison_page
from tests.messages import has_line, mentions
from tests.report.files import write_run
from tests.report.test_page import Reader


def text_of(path) -> str:
    return " ".join(Reader(path.read_bytes()).texts)


def test_one_run_gets_its_page_again(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert (run / "run_report.html").is_file()
    other = tmp_path / "other.html"
    other.write_bytes((run / "run_report.html").read_bytes() + b"<!-- older -->")  # a page may take the place of one
    assert main(["report", "--runs", str(run), "--output", str(other)]) == 0
    assert (tmp_path / "other.html").read_bytes() == (run / "run_report.html").read_bytes()


def test_several_runs_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "first")
    write_run(tmp_path / "second", steps=8, lr=1e-3)
    assert main(["report", "first", "second"]) == 0
    assert mentions(text_of(tmp_path / "runs.html"), "2 first second")
    page = comparison_page([tmp_path / "first", tmp_path / "second"])
    (figures,), (options,) = page.sections[0].tables, page.sections[1].tables
    assert options.rows == [["--lr", "(unset)", "0.001"]]
    assert figures.rows[0][1:] == ["6", "8"]
    assert ["43.3\u00a0%", "43.3\u00a0%"] in [row[1:] for row in figures.rows]
    curves = {figure.name: figure for figure in page.sections[2].figures}
    assert curves["loss"].series == ["first", "second"]
    assert curves["loss"].table.rows[-1] == ["8", "", "0.5"]


def test_runs_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "run")
    page = comparison_page([tmp_path / "a/run", tmp_path / "b/run"])
    assert [tile.name for tile in page.tiles] == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "--runs"),
        (["nowhere"], "--runs nowhere"),
        (["run/args.json"], "--runs run/args.json"),
        (["."], "--runs . args.json"),
        (["run", "run/"], "--runs"),
        (["run", "--output", "run"], "--output run"),
        (["run", "--output", "no/where.html"], "--output no/where.html no"),
        (["run", "--output", "/dev/null"], "--output /dev/null"),
        (["run", "--output", "run/args.json"], "--output run/args.json"),
        (["run", "--outptu", "x"], "--outptu --output"),
    ],
)
def test_what_cannot_be_reported(tmp_path, monkeypatch, capsys, argv, problem):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert main(["report", *argv]) == 2
    assert mentions(capsys.readouterr().err, problem)


def test_files_that_somebody_else_has_written_are_named(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "run_report.json").write_text('{"data": {"total": 3}}')
    assert main(["report", str(run)]) == 1
    assert mentions(capsys.readouterr().err, f"--runs {run}")
    assert not (run / "run_report.html").exists()


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "run_report.html").mkdir()
    assert main(["report", str(run)]) == 1
    assert mentions(capsys.readouterr().err, "run_report.html directory")


def test_damaged_files_are_named_and_left_out(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "run_report.json").write_text('{"steps": ')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": ')
    (run / "drafts.json").write_text('{"before": ')
    assert main(["report", str(run)]) == 0
    warned = capsys.readouterr().err
    assert has_line(warned, f"{run / 'run_report.json'}")
    assert has_line(warned, f"{run / 'metrics.jsonl'} 1")
    assert has_line(warned, f"{run / 'drafts.json'}")
    assert (run / "run_report.html").is_file()
