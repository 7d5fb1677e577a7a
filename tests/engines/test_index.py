"""Test that every name in an `EngineInfo` exists."""

import ast
import importlib.util
import tomllib
from pathlib import Path

import pytest

from swiftlite.engines.index import ENGINES

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TARGETS = ("adapter", "server", "client", "dry_load", "known_report", "drafting_problem")


@pytest.mark.parametrize("name", ENGINES)
def test_a_record_is_found_by_its_name(name):
    assert ENGINES[name].name == name


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("target", TARGETS)
def test_what_a_record_names_is_there(name, target):
    """Files are read and not imported, because the engine may not be installed."""
    if not getattr(ENGINES[name], target):
        return
    module, _, attribute = getattr(ENGINES[name], target).partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert attribute in {getattr(node, "name", None) for node in ast.parse(Path(spec.origin).read_text()).body}


@pytest.mark.parametrize("name", ENGINES)
def test_options_begin_with_the_engine_s_name(name):
    info = ENGINES[name]
    assert [option for option in info.option_names if not option.startswith(f"{name}_")] == []
    if info.options_class is not None:
        assert info.kwargs_option in info.option_names


def test_plugins_are_those_of_the_package():
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    plugins = {info.plugin.group: info.plugin.entry_point for info in ENGINES.values() if info.plugin}
    assert plugins == {group: points["swiftlite"] for group, points in groups.items()}
