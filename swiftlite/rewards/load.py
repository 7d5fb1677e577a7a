"""Find reward functions by name: in the user's files (`--external_plugins`), then in `rewards/index.py`.

A function at the top level of a user's file is a reward function. It receives keyword arguments, and of these only the
ones that its signature accepts:

    prompts                 messages of each completion's prompt
    prompt_texts            the prompts as the model reads them, with the chat template
    completions             texts of the completions
    completion_ids          token ids of each completion
    step                    number of the optimizer step
    trainer_state           an object with TRL's `global_step`, the number of completed steps
    log_metric              function (name, value) that adds a value to a metric, which is the mean of its values
    any other name          the column of the dataset with this name

All except the last three arguments with a name are lists with one element per completion. A completion is a text; as in
TRL, `completion[0]["content"]` is the text, too. With an annotation such as `completions: list[list[dict]]`, a
completion is a list with one message, as TRL passes it. The function returns one number or None per completion.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from swiftlite.args.config import near
from swiftlite.base.errors import UserError
from swiftlite.rewards.index import REWARDS, check_reward
from swiftlite.rewards.settings import RewardSettings

ARGUMENTS = ("prompts", "prompt_texts", "completions", "completion_ids", "step")
MADE = ("trainer_state", "log_metric")
"""Arguments that the process of the functions makes, with TRL's names."""
NOT_COLUMNS = (*ARGUMENTS, *MADE)
OF_TRL = ("log_extra", "environments")
"""Other arguments of TRL 1.16. They are not columns, so they are not reported as missing ones."""


class Completion(str):
    """A text whose first and last item can also be read as the message that TRL passes for the same completion."""

    def __getitem__(self, index: Any) -> str:
        if index not in (0, -1):
            return super().__getitem__(index)
        message = _Message(self[-1:] if index else self[:1])
        message.turn = {"role": "assistant", "content": str(self)}
        return message


class _Message(str):
    """A character that is also a message."""

    turn: Mapping[str, str]

    def __getitem__(self, key: Any) -> str:
        return self.turn[key] if isinstance(key, str) else super().__getitem__(key)


@dataclass(frozen=True)
class RewardInfo:
    """The description of a reward function, as JSON can represent it.

    Attributes:
        source: file that defines the function, empty for a function of `rewards/index.py`; directory of a reward model,
            or what its server says that it serves.
        is_async: whether the function is a coroutine function.
        named: names of the arguments in the signature.
        takes_all: whether the function also accepts every other name.
        columns: groups of columns of the dataset. The function requires at least one column of each group.
        seconds: time limit of each completion that the function enforces itself; 0 if it has none.
        takes_messages: whether a completion is passed as a list with one message instead of a text.
        option: the option that names the function.
    """

    name: str
    source: str
    is_async: bool
    named: Sequence[str]
    takes_all: bool
    columns: Sequence[Sequence[str]]
    seconds: float = 0.0
    takes_messages: bool = False
    option: str = "--reward_funcs"

    def time_limit(self, timeout: float, num_completions: int) -> float:
        """Return the seconds of a call. If the function limits each completion, the last ones have theirs, too."""
        return timeout + self.seconds * num_completions


@dataclass(frozen=True)
class LoadedReward:
    """A reward function that is ready to be called."""

    info: RewardInfo
    function: Callable[..., Any]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, selected from all available ones."""
        return {name: value for name, value in given.items() if self.info.takes_all or name in self.info.named}


def load_rewards(
    names: Sequence[str], plugins: Sequence[Path], settings: RewardSettings, sources: Sequence[bytes] | None = None
) -> list[LoadedReward]:
    """Import the user's files and return the functions with these names, in this order.

    Args:
        sources: the contents of the files, if they were read before.

    Raises:
        UserError: a name is unknown or given twice, a file cannot be imported, or a function cannot be used.
    """
    num_functions = len(names) - len(settings.reward_models) - len(settings.reward_servers)
    sources = list(map(read_plugin, plugins)) if sources is None else sources
    modules = list(map(import_plugin, plugins, sources))
    rewards = []
    for position, name in enumerate(names):
        if name in names[:position]:
            raise UserError(f"--reward_funcs {name} is given twice", "name each function once", exit_code=2)
        if position >= len(names) - len(settings.reward_servers):
            from swiftlite.rewards.server import open_server  # imports aiohttp

            function, identity = open_server(settings, settings.reward_servers[position - len(names)])
            rewards.append(describe(name, function, identity, option="--reward_server"))
            continue
        if position >= num_functions:
            from swiftlite.rewards.classifier import load_model  # imports torch and transformers

            directory = settings.reward_models[position - num_functions]
            rewards.append(describe(name, load_model(settings, directory), directory, option="--reward_model"))
            continue
        found = [(path, module) for path, module in zip(plugins, modules, strict=True) if name in _functions(module)]
        if len(found) > 1:
            problem = f"--reward_funcs {name}: both {found[0][0]} and {found[1][0]} define this function"
            raise UserError(problem, "rename one of them", exit_code=2)
        if found:
            (path, module) = found[0]
            rewards.append(describe(name, getattr(module, name), str(path)))
        elif name in REWARDS:
            check_reward(name, settings)
            known = REWARDS[name]
            reward = describe(name, partial(known.function, settings), "", optional=known.columns)
            rewards.append(replace(reward, info=replace(reward.info, seconds=known.seconds(settings))))
        else:
            raise _unknown(name, plugins, modules)
    return rewards


def read_plugin(path: Path) -> bytes:
    """Read a user's file.

    Raises:
        UserError: it is not a Python file.
    """
    path = path.expanduser().absolute()
    if not path.is_file() or path.suffix != ".py":
        problem = f"--external_plugins {path}: not a Python file"
        raise UserError(problem, "give the path of a file that ends in .py", exit_code=2)
    return path.read_bytes()


def import_plugin(path: Path, source: bytes) -> ModuleType:
    """Import a user's file. Modules in the same directory can be imported by the file.

    Args:
        source: the content of the file, which may have changed or been deleted since.

    Raises:
        UserError: the file raises an exception; the error contains the traceback.
    """
    path = path.expanduser().absolute()
    name = f"swiftlite_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for example, look up the module of a class
    sys.path.insert(0, str(path.parent))
    try:
        # Not by the loader: its cached bytecode would hide a change within a second that keeps the file's size.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except BaseException as error:  # also sys.exit()
        lines = traceback_of(error)
        problem = f"--external_plugins {path}: the file cannot be imported\n{lines}"
        raise UserError(problem, "fix the cause above; `python FILE` shows it as well", exit_code=2) from None
    return module


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error as text, without the frames that call the user's code."""
    start = error.__traceback__
    while start is not None and _calls_the_user(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start)).rstrip()


def _calls_the_user(file: str) -> bool:
    return file in (__file__, str(Path(__file__).with_name("child.py"))) or file.startswith("<frozen importlib")


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the callable objects at the top level of a module, except those with a leading underscore."""
    return {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}


def describe(
    name: str,
    function: Callable[..., Any],
    source: str,
    optional: Collection[str] = (),
    option: str = "--reward_funcs",
    own: Sequence[str] = NOT_COLUMNS,
) -> LoadedReward:
    """Read the arguments of a function from its signature.

    Args:
        optional: columns of which the function requires at least one. If empty, it requires each column that is an
            argument without a default.
        option: the option that names the function, for errors.
        own: names of the arguments that are not columns.

    Raises:
        UserError: the function is a class, or cannot be called with keyword arguments.
    """
    usage = f"def {name}({'completions' if own is NOT_COLUMNS else ', '.join(own)}, **columns)"
    if inspect.isclass(function):
        problem = f"{option} {name}: {name} in {source} is a class"
        raise UserError(problem, f"define a function: {usage}", exit_code=2)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        problem = f"{option} {name}: {name} in {source} has no signature"
        raise UserError(problem, f"define a function: {usage}", exit_code=2) from None
    required = [item for item in parameters if item.default is item.empty]
    unnamed = [item.name for item in required if item.kind == item.POSITIONAL_ONLY]
    if unnamed:
        problem = f"{option} {name}: the argument {unnamed[0]} in {source} is positional-only"
        raise UserError(problem, "arguments are passed by name; remove the / from the signature", exit_code=2)
    unsupported = [item.name for item in required if item.name in OF_TRL]
    if unsupported:
        problem = f"{option} {name}: the argument {unsupported[0]} in {source} is only passed by TRL"
        hint = f"remove it from the signature, or give it a default: {unsupported[0]}=None"
        raise UserError(problem, hint, exit_code=2)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    columns = [(item.name,) for item in required if item.kind in by_name and item.name not in own]
    named = tuple(item.name for item in parameters if item.kind in by_name)
    takes_all = any(item.kind == item.VAR_KEYWORD for item in parameters)
    is_async = inspect.iscoroutinefunction(function)
    is_async |= inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004, of an object
    info = RewardInfo(
        name=name,
        source=source,
        is_async=is_async,
        named=named,
        takes_all=takes_all,
        columns=(tuple(optional),) if optional else tuple(columns),
        takes_messages=any(item.name == "completions" and _is_list_of_lists(item.annotation) for item in parameters),
        option=option,
    )
    return LoadedReward(info, function)


def _is_list_of_lists(annotation: Any) -> bool:
    """Return whether an annotation, which can be a text, is a list of lists."""
    return inspect.formatannotation(annotation).replace("typing.", "").strip("'\"").lower().startswith("list[list")


def _unknown(name: str, plugins: Sequence[Path], modules: Sequence[ModuleType]) -> UserError:
    known = set(REWARDS)
    for module in modules:
        own = _functions(module).items()
        known |= {key for key, value in own if getattr(value, "__module__", "") == module.__name__}
    if close := near(name, known):
        hint = f"did you mean {close}?"
    elif plugins:
        hint = f"define a function {name} in {plugins[0]}, or use one of {', '.join(sorted(known))}"
    else:
        hint = f"use one of {', '.join(sorted(known))}, or define {name} in a file and add --external_plugins FILE.py"
    return UserError(f"--reward_funcs {name}: unknown function", hint, exit_code=2)
