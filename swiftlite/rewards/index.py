"""List the reward functions that are available by name. Each is a record; a new one is a function and a line here.

A function returns one number or None per completion. None means that the function does not score the completion, for
example because the row has no reference answer.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.rewards.code_tests import PATIENCE, code, code_block
from swiftlite.rewards.settings import RewardSettings
from swiftlite.rewards.workers import map_in_time

Scores = list[float | None]


@dataclass(frozen=True)
class Reward:
    """A named reward function.

    Attributes:
        function: the function. Its first argument is a `RewardSettings`; the others are arguments of any reward
            function, by name (`rewards/load.py`).
        description: one line for lists of rewards.
        columns: columns of the dataset of which the function requires at least one.
        package: package that the function requires, as in `pip install`.
        seconds: function that returns the time limit of each completion, for a function that enforces one itself.
        check: function that raises a `UserError` if the settings do not permit the function.
    """

    function: Callable[..., Scores]
    description: str
    columns: tuple[str, ...] = ()
    package: str = ""
    seconds: Callable[[RewardSettings], float] = lambda settings: 0.0
    check: Callable[[RewardSettings], None] = lambda settings: None


def check_reward(name: str, settings: RewardSettings) -> None:
    """Check that a function of `REWARDS` can be used.

    Raises:
        UserError: its package is not installed, or the settings do not permit the function.
    """
    reward = REWARDS[name]
    if reward.package and importlib.util.find_spec(reward.package.replace("-", "_")) is None:
        problem = f"--reward_funcs {name}: requires the package {reward.package}, which is not installed"
        raise UserError(problem, f"pip install {reward.package}", exit_code=2)
    reward.check(settings)


def accuracy(
    settings: RewardSettings,
    /,
    completions: Sequence[str],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
) -> Scores:
    """Return 1 if math-verify finds a completion's answer equal to the row's solution, otherwise 0.

    The answer is the last `\\boxed{...}` after `</think>`, or else the last expression. In the reference,
    only the text after `####` counts, if there is one, as in GSM8K. A completion is not scored if its row has no
    reference, or if math-verify finds no expression in the reference; the score is 0 if the comparison takes longer
    than `answer_timeout`.
    """
    nothing = [None] * len(completions)
    pairs = []
    for text, *references in zip(completions, solution or nothing, answer or nothing, strict=True):
        reference = next((each for each in references if each is not None and each == each), "")  # NaN is none
        pairs.append((str(reference).rpartition("####")[2].strip(), _last_box(_answer_of(text))))
    return map_in_time("swiftlite.rewards.equal", "is_equal", pairs, settings.answer_timeout, late=0.0)


def _last_box(text: str) -> str:
    """Return the last `\\boxed{...}` of a text, or the text if it has none, because math-verify joins adjacent ones."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return f"${text[start : end + 1]}$"
    return text


_THINKING = re.compile(r"<think>(?!.*<think>).*?</think>", re.DOTALL)


def think_format(settings: RewardSettings, /, completions: Sequence[str], prompt_texts: Sequence[str]) -> Scores:
    """Return 1 if a completion is `<think>...</think>` followed by an answer, otherwise 0.

    Unlike TRL's `think_format_reward`, `<think>` can be the end of the prompt, because some chat templates append it,
    and there must be an answer.
    """
    scores: Scores = []
    for prompt, text in zip(prompt_texts, completions, strict=True):
        if prompt.rstrip().endswith("<think>"):
            text = "<think>" + text
        thinking = _THINKING.match(text)
        scores.append(float(thinking is not None and bool(text[thinking.end() :].strip())))
    return scores


def length(settings: RewardSettings, /, completion_ids: Sequence[Sequence[int]]) -> Scores:
    """Return the soft punishment of long completions of DAPO (arXiv 2503.14476, equation 13).

    The reward is 0 up to `max_completion_length - soft_cache_length` tokens, then decreases linearly, and is -1 from
    `max_completion_length` tokens on.
    """
    most = settings.max_completion_length
    assert most is not None, "checked by _check_length"
    cache = most // 5 if settings.soft_cache_length is None else settings.soft_cache_length
    scores: Scores = []
    for ids in completion_ids:
        excess = len(ids) - (most - cache)
        if len(ids) > most:
            scores.append(-1.0)
        else:
            scores.append(-excess / cache if excess > 0 else 0.0)
    return scores


def _check_length(settings: RewardSettings) -> None:
    most, cache = settings.max_completion_length, settings.soft_cache_length
    if most is None:
        problem = "--reward_funcs length: requires the length of the longest completion"
        raise UserError(problem, "add --max_completion_length", exit_code=2)
    if cache is not None and not 0 <= cache <= most:
        problem = f"--soft_cache_length {cache} is not between 0 and --max_completion_length {most}"
        raise UserError(problem, "omit it; the default is a fifth of --max_completion_length", exit_code=2)


def json_schema(settings: RewardSettings, /, completions: Sequence[str], schema: Sequence[Any]) -> Scores:
    """Return 1 if a completion is JSON that is valid under the row's schema, otherwise 0.

    The JSON is the last block of code after `</think>`, or the whole text if there is no block. The score is 0 if the
    validation takes longer than `answer_timeout`.

    Raises:
        ValueError: a schema is not JSON, or has a reference to another one.
        jsonschema.SchemaError: a schema is invalid.
    """
    from swiftlite.rewards.schema import check_schema

    schemas = [json.loads(row) if isinstance(row, str) else row for row in schema]
    pairs = []
    for text, row in zip(completions, schemas, strict=True):
        if row is not None:
            check_schema(row)
            pairs.append((code_block(_answer_of(text)), row))
    found = iter(map_in_time("swiftlite.rewards.schema", "fits_schema", pairs, settings.answer_timeout, late=0.0))
    scores: Scores = []
    for row in schemas:
        score = None if row is None else next(found)
        if isinstance(score, str):
            raise ValueError(f"a schema cannot be used: {score}")
        scores.append(score)
    return scores


def _check_code(settings: RewardSettings) -> None:
    if not settings.allow_code:
        problem = "--reward_funcs code: runs Python that the model wrote, with your permissions and network"
        raise UserError(problem, "add --allow_code_rewards, on a machine where this can do no harm", exit_code=2)


def _answer_of(completion: str) -> str:
    """Return a completion without its reasoning, which ends with `</think>`."""
    return completion.rpartition("</think>")[2]


REWARDS = {
    "accuracy": Reward(
        accuracy,
        "1 if the answer equals the row's solution or answer, by math-verify",
        columns=("solution", "answer"),
        package="math-verify",
        seconds=lambda settings: settings.answer_timeout,
    ),
    "format": Reward(think_format, "1 if the completion is <think>...</think> and an answer"),
    "length": Reward(length, "0 to -1 for the last tokens up to --max_completion_length", check=_check_length),
    "json_schema": Reward(
        json_schema,
        "1 if the completion is JSON that is valid under the row's schema",
        columns=("schema",),
        package="jsonschema",
        seconds=lambda settings: settings.answer_timeout,
    ),
    "code": Reward(
        code,
        "the fraction of the row's tests that the completion's Python passes",
        columns=("tests",),
        seconds=lambda settings: settings.code_timeout + PATIENCE,
        check=_check_code,
    ),
}
