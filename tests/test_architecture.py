"""Test which packages import which, as docs/en/architecture.md specifies."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import swiftlite
from swiftlite.engines.index import ENGINES

ROOT = Path(swiftlite.__file__).parent
# Lower levels first; names on one level do not know each other.
LEVELS = (
    {"base"},
    {"args", "bridge"},
    {"hub", "methods"},
    {"data"},
    {"families"},
    {"gguf", "plan"},
    {"runtime"},
    {"launch", "model", "rewards", "store"},
    {"acceptance"},
    {"engines", "report"},
    {"serve", "train"},
    {"improve", "rollouts", "rules"},
    {"cli", "export"},
)
MEGATRON = ("runtime", "model", "acceptance", "train", "bridge/placement.py")
DECLARED = ("bridge/join.py", "bridge/encoding/quantization.py", "bridge/rows.py")  # what families declare with
WITHOUT_TORCH = (
    "base",
    "report/table.py",
    "runtime/environment.py",
    "args",
    "methods",
    "hub",
    *DECLARED,
    "families",
    "gguf/types.py",
    "launch",
    "plan",
    "rewards",
    "rules",
    "store",
    "cli",
)
NAMES = ("plan/facts.py", "families/resolved.py", "cli/fetch.py", "cli/doctor.py")  # they become directories here
INDEXES = ("engines/index.py", "families/serving/index.py")  # an engine's name leads to what is known of it
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def level(part: str) -> int:
    return next(number for number, names in enumerate(LEVELS) if part in names)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Return the dotted names of all imports of a file, including imports inside functions."""
    names = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            # `from swiftlite.launch import launch` names a module in its second half.
            names += [f"{node.module}.{name.name}" for name in node.names]
    return tuple(names)


def importing(files: Iterable[Path], is_wrong: Callable[[str], bool]) -> list[str]:
    """Return the files and their imports that are wrong."""
    return [f"{file} imports {name}" for file in files for name in imports(file) if is_wrong(name)]


def test_imports_point_down_only():
    known = set().union(*LEVELS)
    for file in FILES:
        own = file.parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        for name in imports(file):
            other = f"{name}.".split(".")[1]
            if name.startswith("swiftlite.") and other in known and other != own:
                assert level(other) < level(own), f"{file} imports {name}"


def test_only_some_import_megatron():
    files = [file for file in FILES if not str(file).startswith(MEGATRON)]
    assert importing(files, lambda name: name.split(".")[0] == "megatron") == []


def test_a_model_is_handed_in():
    asked = ("swiftlite.hub.model.local_model", "swiftlite.hub.model.description_of")
    assert importing([file for file in FILES if str(file) not in NAMES], lambda name: name in asked) == []


def test_groups_are_handed_in():
    files = [file for file in FILES if file.parts[0] != "runtime"]
    assert importing(files, lambda name: "parallel_state" in name) == []


def test_what_answers_before_torch_needs_no_heavy_library():
    """Excluded are the launcher process, the conversion of GGUF files, and the process of reward models."""
    excluded = ("launch/elastic.py", "launch/nodes.py", "hub/gguf.py", "rewards/classifier.py")
    files = [file for file in FILES if str(file).startswith(WITHOUT_TORCH) and str(file) not in excluded]
    heavy = ("torch", "transformers", "megatron", "vllm")
    assert importing(files, lambda name: name.split(".")[0] in heavy) == []


def decisions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that are compared, used for a lookup, or used as a key."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield node
        elif isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)


def test_nothing_is_decided_by_the_name_of_an_engine():
    """Decisions use the engine's `EngineInfo` (swiftlite/engines/info.py)."""
    found = []
    for file in [file for file in FILES if str(file) not in INDEXES]:
        for decision in decisions(tree(file)):
            constants = [node.value for node in ast.walk(decision) if isinstance(node, ast.Constant)]
            found += [f"{file}: {value}" for value in constants if value in ENGINES]
    assert found == []


PACKAGES = {path.name for path in ROOT.iterdir() if path.is_dir()}
PATH_IN_TEXT = re.compile(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+\.py)")
MODULE_IN_TEXT = re.compile(r"`([a-z_]+)\.([a-z_0-9]+)\.[A-Za-z_]")


def test_what_texts_refer_to_is_there():
    """References such as `engines/index.py` and `plan.layout.states_sent` must be valid after a file has moved."""
    lost = []
    for file in FILES:
        text = (ROOT / file).read_text()
        places = (ROOT, ROOT.parent, ROOT / file.parent, (ROOT / file).parents[1])
        for path in PATH_IN_TEXT.findall(text):
            if not any((place / path).exists() for place in places):
                lost.append(f"{file}: {path}")
        for package, module in MODULE_IN_TEXT.findall(text):
            base = ROOT / package / module
            if package in PACKAGES and not base.is_dir() and not base.with_suffix(".py").exists():
                lost.append(f"{file}: {package}.{module}")
    assert lost == []
