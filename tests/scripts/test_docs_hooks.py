"""Test the conversion of the repository's pages to the site."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import swiftlite
import swiftlite.data

PACKAGE = Path(swiftlite.__file__).parent


@pytest.fixture
def hooks(load_script):
    return load_script("docs_hooks")


def test_every_room_has_a_page(hooks):
    files = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert set(hooks.rooms()) == {name for name in files if not name.startswith("__")}
    assert hooks.rooms()["data"] == " ".join((swiftlite.data.__doc__ or "").split())


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("What a head computes", "what-a-head-computes"),
        ("FLOPs, tokens/s, MFU", "flops-tokenss-mfu"),
        ("一个头起草多个 token", "一个头起草多个-token"),
        ("`doctor --engine`: what would be loaded?", "doctor---engine-what-would-be-loaded"),
    ],
)
def test_anchors_are_those_of_the_repository_s_pages(hooks, heading, expected):
    assert hooks.anchor(heading, "-") == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[中文](../zh/mtp.md)", ""),
        ("[English](../en/add-a-family.md)", ""),
        ("[SLURM](../../examples/slurm.sbatch) has one", "SLURM (`examples/slurm.sbatch`) has one"),
        ("[Serving](serving.md#live-weights)", "[Serving](serving.md#live-weights)"),
        (r"| `--x` | `a\|b` | this \| that |", r"| `--x` | `a|b` | this \| that |"),
        (r"    sed 's/a\|b/`c\|d`/'", r"    sed 's/a\|b/`c\|d`/'"),
    ],
)
def test_what_reads_otherwise_on_the_site(hooks, line, expected):
    assert adapted(hooks, line + "\n", "en/page.md").removesuffix("\n") == expected


def test_the_api_is_only_in_the_english_site(hooks):
    text = "# data\n\n::: swiftlite.data"
    assert adapted(hooks, text, "api/data.md", "en") == text
    assert '"../../api/data.html"' in adapted(hooks, text, "api/data.md", "zh")


def adapted(hooks, text: str, uri: str, language: str = "en") -> str:
    """Return the text of a page in the site of a language."""
    file = SimpleNamespace(src_uri=uri, name=Path(uri).stem)
    config = SimpleNamespace(plugins={"i18n": SimpleNamespace(current_language=language)})
    return hooks.on_page_markdown(text, page=SimpleNamespace(file=file), config=config)
