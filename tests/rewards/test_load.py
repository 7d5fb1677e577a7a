"""Test which functions are found, and how functions that cannot be used are reported."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftlite.base.errors import UserError
from swiftlite.rewards.load import load_rewards
from swiftlite.rewards.settings import RewardSettings
from tests.messages import naming

SETTINGS = RewardSettings(max_completion_length=10)


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a user's file."""

    def write(source: str, name: str = "rewards.py") -> Path:
        file = tmp_path / name
        file.write_text(textwrap.dedent(source))
        return file

    return write


def test_a_users_function_takes_precedence(plugin):
    file = plugin("def length(completions):\n    return [7 for _ in completions]")
    (reward,) = load_rewards(["length"], [file], SETTINGS)
    assert reward.function(completions=["a"]) == [7]
    assert reward.info.source == str(file)
    (reward,) = load_rewards(["length"], [], SETTINGS)
    assert reward.function(completion_ids=[[1]]) == [0.0]
    assert reward.info.source == ""


def test_arguments_follow_the_signature(plugin):
    file = plugin(
        """
        import functools

        def some(completions, solution, *, step, difficulty=1): ...
        def every(completions, **columns): ...
        async def waits(prompts): ...
        class _Waits:
            async def __call__(self, prompts): ...
        waits_too = _Waits()
        partly = functools.partial(some, difficulty=2)
        """
    )
    names = ["some", "every", "waits", "waits_too", "partly"]
    some, every, waits, waits_too, partly = load_rewards(names, [file], SETTINGS)
    given = {name: name for name in ("prompts", "completions", "completion_ids", "step", "solution", "other")}
    assert set(some.arguments(given)) == {"completions", "solution", "step"}
    assert every.arguments(given) == given
    assert [reward.info.is_async for reward in (some, every, waits, waits_too)] == [False, False, True, True]
    assert some.info.columns == (("solution",),)
    assert set(some.info.named) == {"completions", "solution", "step", "difficulty"}
    assert not some.info.takes_all
    assert set(every.info.named) == {"completions"}
    assert every.info.takes_all
    assert every.info.columns == ()
    assert set(partly.arguments(given)) == {"completions", "solution", "step"}


def test_named_functions_require_columns():
    pytest.importorskip("jsonschema")
    format_reward, schema = load_rewards(["format", "json_schema"], [], SETTINGS)
    assert format_reward.info.columns == ()
    assert schema.info.columns == (("schema",),)
    assert set(schema.info.named) == {"completions", "schema"}


@pytest.mark.parametrize(
    ("names", "tokens"),
    [
        (["lenght"], "--reward_funcs lenght length"),
        (["shortnes"], "--reward_funcs shortnes shortness"),
        (["quite_different"], "--reward_funcs quite_different rewards.py shortness accuracy"),
        (["length", "length"], "--reward_funcs length"),
        (["Reward"], "--reward_funcs Reward rewards.py def"),
        (["by_position"], "--reward_funcs by_position texts rewards.py"),
        (["_hidden"], "--reward_funcs _hidden"),
    ],
)
def test_functions_that_cannot_be_used(plugin, names, tokens):
    file = plugin(
        """
        from math import sqrt
        class Reward: ...
        def by_position(texts, /): ...
        def shortness(completions): ...
        def _hidden(completions): ...
        """
    )
    with pytest.raises(UserError, match=naming(tokens)) as caught:
        load_rewards(names, [file], SETTINGS)
    assert caught.value.exit_code == 2


def test_without_a_file_the_option_for_files_is_named():
    with pytest.raises(UserError, match=naming("--reward_funcs quite_different --external_plugins json_schema")):
        load_rewards(["quite_different"], [], SETTINGS)


def test_a_name_in_two_files(plugin):
    files = [plugin("def same(completions): ...", name) for name in ("a.py", "b.py")]
    with pytest.raises(UserError, match=naming(f"--reward_funcs same {files[0]} {files[1]}")):
        load_rewards(["same"], files, SETTINGS)


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("import math\nmath.sqrt(-1)", "rewards.py ValueError math.sqrt(-1)"),
        ("import no_such_module", "rewards.py ModuleNotFoundError no_such_module"),
        ("def broken(:", "rewards.py SyntaxError"),
        ("raise SystemExit(3)", "rewards.py SystemExit"),
    ],
)
def test_a_file_that_cannot_be_imported(plugin, source, tokens):
    with pytest.raises(UserError, match=naming(f"--external_plugins {tokens}")) as caught:
        load_rewards([], [plugin(source)], SETTINGS)
    assert "importlib" not in str(caught.value), "the traceback starts in the user's file"


@pytest.mark.parametrize("name", ["missing.py", "rewards.txt", "."])
def test_a_file_that_is_not_python(plugin, tmp_path, name):
    plugin("", "rewards.txt")
    with pytest.raises(UserError, match=naming("--external_plugins .py")):
        load_rewards([], [tmp_path / name], SETTINGS)


def test_a_file_can_import_its_neighbours_and_define_dataclasses(plugin):
    plugin("WORTH = 3", "neighbour_of_rewards.py")
    file = plugin(
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from neighbour_of_rewards import WORTH

        @dataclass
        class Result:
            worth: int

        def worth(completions):
            return [Result(WORTH).worth for _ in completions]
        """
    )
    (reward,) = load_rewards(["worth"], [file], SETTINGS)
    assert reward.function(completions=["a", "b"]) == [3, 3]
