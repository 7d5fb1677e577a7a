"""Test the documentation: both languages have the same structure, links lead to a target, and all
commands are valid.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from swiftlite.args.docs import options
from swiftlite.cli.installed import TESTED
from swiftlite.cli.planned import planned_command
from swiftlite.cli.table import find

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs" / "en").glob("*.md"))
PAIRS = {name: (ROOT / "docs" / "en" / name, ROOT / "docs" / "zh" / name) for name in PAGES}
PAIRS |= {name: (ROOT / f"{name}.md", ROOT / f"{name}_zh.md") for name in ("README", "SECURITY")}
TEXTS = [path for pair in PAIRS.values() for path in pair]
SCRIPTS = [*sorted(ROOT.glob("examples/*.sh")), *sorted(ROOT.glob("scripts/quickstart/*.sh"))]


def outline(text: str) -> list[str]:
    """Return what must not differ between languages: headings by depth, table rows by columns, bullets, code lines."""
    found, in_code = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        elif in_code or line.startswith("    "):
            found.append(line)
        elif heading := re.match(r"#+ ", line):
            found.append(heading[0])
        elif line.startswith("|"):
            found.append(f"row of {line.count('|')}")
        elif line.startswith("- "):
            found.append("bullet")
    return found


def commands(text: str) -> list[list[str]]:
    """Return every `swiftlite ...` command line of a page or script as words. Continuation lines are joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    before = r"^(?:\s*|show_and_run |[A-Z_]+=\S+ )"
    lines = re.findall(
        before + r"swiftlite ((?:megatron \w+|export|infer|regenerate|deploy|bench|doctor|evaluate|speedup)\b.*)$",
        text,
        re.MULTILINE,
    )
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_releases_it_was_run_with(language):
    lines = (ROOT / "docs" / language / "contributing.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| Python |")) + 2
    shown = [line for line in lines[first : first + len(TESTED) + 1] if line]
    assert shown == [f"| {' | '.join(value or '-' for value in row)} |" for row in TESTED]


def test_both_languages_have_the_same_pages():
    assert sorted(path.name for path in (ROOT / "docs" / "zh").glob("*.md")) == PAGES


def test_the_site_leads_to_every_page():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]  # without mkdocs' tags
    shown = []
    for item in nav:
        pages = item if isinstance(item, str) else next(iter(item.values()))
        shown += [pages] if isinstance(pages, str) else pages
    assert sorted(shown) == sorted([*PAGES, "api/index.md"])


@pytest.mark.parametrize("name", PAIRS)
def test_both_languages_have_the_same_sections_tables_and_code(name):
    english, chinese = (outline(path.read_text(encoding="utf-8")) for path in PAIRS[name])
    assert english == chinese


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    dead = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not dead


@pytest.mark.parametrize("path", [*TEXTS, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_shown_have_only_options_that_exist(path):
    for words in commands(path.read_text(encoding="utf-8")):
        command, rest = find(words)
        if command.words == "doctor":
            command = planned_command(command, rest)
        known = options(command.args_class)
        flags = [word[2:].split("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
        assert [flag for flag in flags if flag not in known] == []


@pytest.mark.parametrize("name", ["README.md", "scripts/quickstart/model.sh", "scripts/quickstart/tiny.sh"])
def test_readme_and_quickstart_show_the_main_job(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = [find(words)[0].words for words in commands(text)]
    if not name.endswith("tiny.sh"):  # a random model has nothing to say, so it cannot write prompts
        assert shown.pop(0) == "speedup"
    if not name.endswith("model.sh"):
        assert shown[:3] == ["megatron sft", "export", "infer"]
