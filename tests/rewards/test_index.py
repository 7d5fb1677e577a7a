"""Test the named reward functions, against those of TRL where TRL has them."""

import importlib.metadata
import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest

from swiftlite.base.errors import UserError
from swiftlite.rewards.index import REWARDS, accuracy, check_reward, json_schema, length, think_format
from swiftlite.rewards.settings import RewardSettings
from tests.messages import naming

pytestmark = pytest.mark.usefixtures("fork_server")
SETTINGS = RewardSettings(max_completion_length=100)


def as_messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


FORMATS = {
    "<think>\nreasons\n</think>\nanswer": 1.0,
    "<think></think>": 0.0,
    "<think>reasons</think>\n": 0.0,
    "<think></think>4": 1.0,
    "<think>reasons</think><answer>4</answer>": 1.0,
    "answer": 0.0,
    "<think>reasons": 0.0,
    "reasons</think>answer": 0.0,
    "first <think>reasons</think>answer": 0.0,
    "<think>a<think>b</think>answer": 0.0,
    "<think>a</think>b<think>c</think>": 0.0,
    "": 0.0,
}


def test_format():
    texts = list(FORMATS)
    assert think_format(SETTINGS, completions=texts, prompt_texts=["?"] * len(texts)) == list(FORMATS.values())


def test_format_is_trls():
    rewards: Any = pytest.importorskip("trl.rewards")
    texts = [text for text in FORMATS if not text.rstrip().endswith("</think>")]  # there, an answer is not required
    ours = think_format(SETTINGS, completions=texts, prompt_texts=["?"] * len(texts))
    assert ours == rewards.think_format_reward(as_messages(texts))


def test_format_if_the_template_opens_the_reasoning():
    prompts = ["question\n<think>\n", "question", "<think> question", "<think>"]
    texts = ["reasons</think>answer"] * 3 + ["<think>reasons</think>answer"]
    assert think_format(SETTINGS, completions=texts, prompt_texts=prompts) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("most", "cache"), [(100, 20), (100, 100), (100, 0), (7, 3)])
def test_length_is_trls(most, cache):
    rewards: Any = pytest.importorskip("trl.rewards")
    ids = [[1] * number for number in range(most + 3)]
    settings = RewardSettings(max_completion_length=most, soft_cache_length=cache)
    ours = length(settings, completion_ids=ids)
    theirs = rewards.get_soft_overlong_punishment(most, cache)(ids)
    assert ours == theirs


def test_length_by_default_decreases_over_the_last_fifth():
    ids = [[1] * number for number in (0, 80, 81, 90, 100, 101)]
    assert length(SETTINGS, completion_ids=ids) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        (RewardSettings(), "--reward_funcs length --max_completion_length"),
        (RewardSettings(max_completion_length=10, soft_cache_length=11), "--soft_cache_length 11 10"),
    ],
)
def test_length_requires_valid_lengths(settings, tokens):
    with pytest.raises(UserError, match=naming(tokens)):
        check_reward("length", settings)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "height": {"type": "number", "multipleOf": 0.01},
        "code": {"type": "string", "pattern": "^(a+)+$"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' {"name": "Ada"}\n', 1.0),
        ('Here it is:\n```json\n{"name": "Ada"}\n```\nDone.', 1.0),
        ('<think>{"x": 1}</think>{"name": "Ada"}', 1.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"age": 36}', 0.0),
        ('Here it is: {"name": "Ada"}', 0.0),
        ('{"name": "Ada"', 0.0),
        ('{"name": "Ada", "height": 1.5}', 1.0),
        ('{"name": "Ada", "height": NaN}', 0.0),
        ('{"name": "Ada", "height": 1e999}', 0.0),
        ('{"name": "Ada", "code": "' + "a" * 40 + '!"}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(text, score):
    pytest.importorskip("jsonschema")
    rows = [SCHEMA, json.dumps(SCHEMA), None]
    settings = replace(SETTINGS, answer_timeout=2.0)
    assert json_schema(settings, completions=[text] * 3, schema=rows) == [score, score, None]


@pytest.mark.parametrize("schema", [{"type": "no type"}, "{", {"$ref": "http://localhost:9/schema.json"}])
def test_an_invalid_schema_is_not_scored_as_a_wrong_answer(schema):
    pytest.importorskip("jsonschema")
    with pytest.raises(Exception) as caught:
        json_schema(SETTINGS, completions=["{}"], schema=[schema])
    assert not isinstance(caught.value, OSError), "nothing is downloaded"


def test_accuracy():
    pytest.importorskip("math_verify")
    rows = [
        (r"The sum is \boxed{\frac{1}{3}}.", r"\frac{1}{3}", 1.0),
        (r"The sum is \boxed{\frac{1}{2}}.", r"\frac{1}{3}", 0.0),
        (r"<think>It is \boxed{5}.</think> It is \boxed{4}.", "4", 1.0),
        ("2 + 2 = 4", 4, 1.0),
        ("The answer is 12.", "First 3 * 4.\n#### 12", 1.0),
        ("I do not know.", "12", 0.0),
        ("12", None, None),
        ("12", "#### ", None),
        ("12", "no number", 0.0),
    ]
    texts, references, scores = (list(column) for column in zip(*rows, strict=True))
    assert accuracy(SETTINGS, completions=texts, solution=references) == scores
    assert accuracy(SETTINGS, completions=texts, answer=references) == scores
    assert accuracy(SETTINGS, completions=["3", "4"], solution=["3", None], answer=["5", "4"]) == [1.0, 1.0]


def test_accuracy_is_trls_for_boxed_answers():
    pytest.importorskip("math_verify")
    rewards: Any = pytest.importorskip("trl.rewards")
    answers = [r"\frac{1}{3}", "0.5", r"\sqrt{2}", "x^2 + 1", r"\{1, 2\}", "7"]
    texts = [rf"So it is $\boxed{{{answer}}}$." for answer in answers]
    for shift in range(len(answers)):
        references = [rf"$\boxed{{{answer}}}$" for answer in answers[shift:] + answers[:shift]]
        ours = accuracy(SETTINGS, completions=texts, solution=references)
        assert ours == rewards.accuracy_reward(as_messages(texts), references)
        assert ours == [float(shift == 0)] * len(answers)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(REWARDS, "accuracy", replace(REWARDS["accuracy"], package="no-such-package"))
    with pytest.raises(UserError, match=naming("--reward_funcs accuracy no-such-package pip install")):
        check_reward("accuracy", SETTINGS)


def test_the_packages_of_rewards_have_these_names():
    """The names of the packages are those of their modules, with - instead of _."""
    packages = [reward.package for reward in REWARDS.values() if reward.package]
    assert packages
    for package in packages:
        if importlib.util.find_spec(package.replace("-", "_")):
            assert importlib.metadata.version(package)


def test_code_requires_consent():
    with pytest.raises(UserError, match=naming("--reward_funcs code --allow_code_rewards")):
        check_reward("code", SETTINGS)
    check_reward("code", RewardSettings(allow_code=True))
