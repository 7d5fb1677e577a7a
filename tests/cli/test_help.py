"""Test that `--help`, and the pages made from it, contain every option with its text."""

import runpy
from pathlib import Path

import pytest

from swiftlite.args.docs import options
from swiftlite.cli.help import command_help, default_text, overview, placeholder
from swiftlite.cli.table import commands

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(ROOT / "scripts" / "gen_options_doc.py"))


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.words)
def test_help_is_complete(command):
    text = " ".join(command_help(command).split())
    for option in options(command.args_class, command.choices()).values():
        assert f"--{option.name} {placeholder(option.type)} {option.doc}" in text


def test_help_leaves_out_what_the_command_rejects():
    dpo = next(command for command in commands() if command.words == "megatron dpo")
    assert "  --streaming [" not in command_help(dpo)
    assert "  --packing [" in command_help(dpo)
    assert "  --streaming [" in command_help(commands()[0])


def test_help_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert [line for line in command_help(commands()[0]).splitlines() if len(line) > 70] == []


def test_defaults_are_as_they_would_be_typed():
    known = options(commands()[0].args_class)
    texts = {
        name: default_text(known[name])
        for name in ("adam_beta1", "adam_eps", "clip_grad", "resume", "seed", "mtp_mode")
    }
    assert texts == {
        "adam_beta1": "0.9",
        "adam_eps": "1e-8",
        "clip_grad": "1",
        "resume": "false",
        "seed": "42",
        "mtp_mode": "joint",
    }


def test_overview_lists_every_command():
    for command in commands():
        assert f"swiftlite {command.words} " in overview()
        assert command.line in overview()
    assert "swiftlite export" not in overview("megatron ")


def test_every_text_is_translated(generator):
    texts, table = set(generator["english_texts"]()), generator["translations"]()
    assert texts - set(table) == set(), "add these to docs/zh/options.yaml"
    assert set(table) - texts == set(), "remove these from docs/zh/options.yaml, no option says so any more"
    untranslated = [
        text for text, chinese in table.items() if not any("\u4e00" <= char <= "\u9fff" for char in chinese)
    ]
    assert [text for text in untranslated if "AdamW" not in text] == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_are_up_to_date(generator, language):
    page = (ROOT / "docs" / language / "options.md").read_text(encoding="utf-8")
    assert page == generator["page"](language), "run python scripts/gen_options_doc.py"


@pytest.mark.parametrize("name", ["families", "tensors"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_of_families_are_up_to_date(monkeypatch, language, name):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = runpy.run_path(str(ROOT / "scripts" / f"gen_{name}_doc.py"))
    page = (ROOT / "docs" / language / f"{name}.md").read_text(encoding="utf-8")
    assert page == script["page"](language), f"run python scripts/gen_{name}_doc.py"
