"""Define hooks of mkdocs that create the API pages, set the anchors of headings, and adapt pages to the site.

Pages are adapted because links to files outside of `docs/`, and pipes in tables, are written differently in the
repository and on the site.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "swiftlite"
API = ROOT / "docs" / "api"


def on_config(config: Any) -> Any:
    """Write a page for each package and module, add the pages to the navigation, and set the anchors of headings."""
    sentences = rooms()
    table = [f"| [{room}]({room}.md) | {sentence} |" for room, sentence in sentences.items()]
    _write(API / "index.md", "\n".join(["# API", "", "| room | what it is |", "|---|---|", *table]))
    for room in sentences:
        _write(API / f"{room}.md", f"# {room}\n\n::: swiftlite.{room}")
    for page in API.glob("*.md"):
        if page.stem not in ("index", *sentences):  # of a module that was removed or renamed
            page.unlink()
    for item in config.nav:
        if "API" in item:
            item["API"] = ["api/index.md", *(f"api/{room}.md" for room in sentences)]
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page's text for the site.

    The API is in English, so only the English site has its pages; others link to them. They take most of the time.
    The link to the page in the other language is removed, because the site has such a link at the top of every page.
    Links to files outside of `docs/` are replaced by the names of the files. In code in tables, `a\\|b` becomes `a|b`.
    """
    if page.file.src_uri.startswith("api/") and config.plugins["i18n"].current_language != "en":
        return f'# {page.file.name}\n\n<a href="../../api/{page.file.name}.html">English</a>'
    markdown = re.sub(r"^\[(?:中文|English)\]\(\.\./\w+/[\w-]+\.md\)\n", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\[([^]]+)\]\(\.\./\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
    lines = []
    for line in markdown.split("\n"):
        if line.startswith("|"):
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line)
        lines.append(line)
    return "\n".join(lines)


def rooms() -> dict[str, str]:
    """Return the first paragraph of the docstring of each package and module directly in `swiftlite`, by name."""
    found = {}
    for path in sorted(PACKAGE.iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix != ".py" or not file.exists() or path.name.startswith("__"):
            continue
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        found[path.stem] = " ".join(docstring.partition("\n\n")[0].split())
    return found


def anchor(heading: str, separator: str) -> str:
    """Return the anchor of a heading in any language, as on GitHub.

    For example, `What a head computes?` becomes `what-a-head-computes`.
    """
    words = re.sub(r"[^\w\- ]", "", heading.lower()).strip()
    return words.replace(" ", separator)


def _write(path: Path, text: str) -> None:
    """Write a page if its content has changed, because `mkdocs serve` builds the site again
    whenever a file is written.
    """
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text + "\n":
        path.write_text(text + "\n", encoding="utf-8")
