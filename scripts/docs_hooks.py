"""What mkdocs.yml cannot say about the site: pages of the API, anchors of headings, and what reads otherwise in the
repository: links that leave `docs/`, pipes in tables.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "swiftlite"
API = ROOT / "docs" / "api"


def on_config(config: Any) -> Any:
    """Write a page for each room, put them into the navigation, and give headings their anchors."""
    sentences = rooms()
    table = [f"| [{room}]({room}.md) | {sentence} |" for room, sentence in sentences.items()]
    _write(API / "index.md", "\n".join(["# API", "", "| room | what it is |", "|---|---|", *table]))
    for room in sentences:
        _write(API / f"{room}.md", f"# {room}\n\n::: swiftlite.{room}")
    for item in config.nav:
        if "API" in item:
            item["API"] = ["api/index.md", *(f"api/{room}.md" for room in sentences)]
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page as the site shows it.

    The link to the other language goes, since the site has one at the top of every page. A link to a file outside of
    `docs/` becomes the file's name. In a table's code `a\\|b` becomes `a|b`, since the site wants no backslash there.
    """
    markdown = re.sub(r"^\[(?:中文|English)\]\(\.\./\w+/[\w-]+\.md\)\n", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^]]+)\]\(\.\./\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
    lines = []
    for line in markdown.split("\n"):
        if line.startswith("|"):
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
        lines.append(line)
    return "\n".join(lines)


def rooms() -> dict[str, str]:
    """The rooms of the package, folders and single modules, each with the first paragraph of its docstring."""
    found = {}
    for path in sorted(PACKAGE.iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix != ".py" or not file.exists() or path.name.startswith("__"):
            continue
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        found[path.stem] = " ".join(docstring.partition("\n\n")[0].split())
    return found


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading in any language, as where the repository is read: `What a head computes?` is
    `what-a-head-computes`.
    """
    words = re.sub(r"[^\w\- ]", "", heading.lower()).strip()
    return words.replace(" ", separator)


def _write(path: Path, text: str) -> None:
    """Write a page unless it is so already, since `mkdocs serve` builds again whenever a file changes."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text + "\n":
        path.write_text(text + "\n", encoding="utf-8")
