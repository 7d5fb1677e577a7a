"""Test rewards against what a long run meets: forged, slow and unusual completions, and functions of users."""

import json
from dataclasses import replace
from datetime import date, datetime

import pyarrow
import pyarrow.parquet
import pytest

from swiftlite import rules
from swiftlite.base.errors import UserError
from swiftlite.data.rows.prompt import parse_prompt
from swiftlite.data.sample import make_sample
from swiftlite.rewards.code_limits import landlock_version
from swiftlite.rewards.code_tests import code
from swiftlite.rewards.index import accuracy
from swiftlite.rewards.process import RewardProcess
from swiftlite.rewards.settings import RewardSettings
from swiftlite.rewards.workers import num_processes
from swiftlite.rollouts.draw import columns_in, columns_of, omitted_in
from tests.messages import mentions, naming
from tests.rewards.programs import CHEATS, CHEATS_OF_TESTS, NEEDS_LANDLOCK, RIGHT, TESTS
from tests.tiny import make_tiny_hf
from tests.train.completions import metrics, policy_options, train

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_passes_no_test_has_no_reward(name):
    if name in NEEDS_LANDLOCK and landlock_version() < 6:
        pytest.skip("requires Landlock of Linux 6.12")
    settings = RewardSettings(allow_code=True, code_timeout=2.0)
    program = "f = lambda n: 7\n" + CHEATS[name]
    assert code(settings, completions=[program], tests=[TESTS]) == [0.0]


@pytest.mark.parametrize("name", CHEATS_OF_TESTS)
def test_a_program_does_not_answer_for_what_a_test_uses(name):
    settings = RewardSettings(timeout=300.0, allow_code=True, code_timeout=60.0)
    program, tests = CHEATS_OF_TESTS[name]
    for test in tests:  # one by one, because a program that has ended passes no later test
        assert code(settings, completions=[program], tests=[[test]]) == [0.0]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_has_the_whole_reward(name):
    settings = RewardSettings(timeout=300.0, allow_code=True, code_timeout=60.0)
    program, tests = RIGHT[name]
    assert code(settings, completions=[program], tests=[tests]) == [1.0]


REFERENCES = [
    r"(3, 5)",
    r"\left( 3, \frac{\pi}{2} \right)",
    r"3\sqrt{13}",
    "6 - 5i",
    "1,2",
    "p - q",
    r"\pi",
    r"\sqrt{51}",
]
REFERENCES += [
    "x^2+1",
    "[1,2)",
    r"\{3,5\}",
    "B",
    r"\text{Evelyn}",
    r"\text{(C)}",
    r"\$18.90",
    "42",
    r"\frac{14}{3}",
    "0.5",
]
REFERENCES += [r"10\%", r"90^\circ", "1,000", r"\frac12", "x = 3", "2^{10}", "-7", r"\infty", r"(-\infty, 2]", "1 : 2"]
REFERENCES += [
    r"\text{east}",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    "$18.90",
    "10 cm",
    r"5\text{ cm}",
    "Evelyn",
    "no solution",
]


def test_a_verbatim_answer_is_right():
    texts = [f"It is $\\boxed{{{reference}}}$." for reference in REFERENCES]
    assert accuracy(RewardSettings(), completions=texts, answer=REFERENCES) == [1.0] * len(REFERENCES)
    delimited = [f"So $\\boxed{{{reference}}}$." for reference in REFERENCES]
    assert accuracy(RewardSettings(), completions=texts, solution=delimited) == [1.0] * len(REFERENCES)
    shifted = REFERENCES[1:] + REFERENCES[:1]
    assert sum(map(bool, accuracy(RewardSettings(), completions=texts, answer=shifted))) == 0


def test_a_part_of_the_reference_is_not_right():
    texts = [r"\boxed{5}", r"\boxed{3}", r"\boxed{2}", r"\boxed{1}"]
    references = ["(3, 5)", r"3\sqrt{13}", "2^{10}", "x^2+1"]
    assert accuracy(RewardSettings(), completions=texts, answer=references) == [0.0] * 4


def test_the_last_box_counts():
    texts = [r"\boxed{11} no wait \boxed{12}", r"$\boxed{11}$ or $\boxed{\frac{12}{1}}$", r"\boxed{12} \boxed{11"]
    assert accuracy(RewardSettings(), completions=texts, answer=["12"] * 3) == [1.0] * 3
    assert accuracy(RewardSettings(), completions=texts[:2], answer=["11"] * 2) == [0.0] * 2


def test_a_slow_answer_costs_only_its_own_score():
    texts = [r"\boxed{11}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(10^{9})!}", r"\boxed{11}"]
    with RewardProcess(["accuracy"], [], RewardSettings(timeout=10.0, answer_timeout=1.0)) as process:
        scored = process.score([[]] * 4, texts, [[1]] * 4, {"answer": ["11"] * 4}, 1)
    assert scored.failures == []
    assert scored.rewards == [[1.0, 0.0, 0.0, 1.0]]


def test_programs_at_the_end_of_a_generation_are_scored():
    completions = ["while True: pass"] * num_processes() + ["f = lambda n: n + 1"] * 2
    number = len(completions)
    settings = RewardSettings(timeout=5.0, allow_code=True, code_timeout=2.5)
    with RewardProcess(["code"], [], settings) as process:
        scored = process.score(
            [[]] * number, completions, [[1]] * number, {"tests": [["assert f(1) == 2"]] * number}, 1
        )
    assert scored.failures == []
    assert scored.rewards == [[0.0] * num_processes() + [1.0] * 2]


def test_the_digest_is_that_of_the_executed_file(tmp_path):
    """Also if the file has changed or is missing when a child that ended is replaced."""
    plugin = tmp_path / "rewards.py"
    plugin.write_text("import os\ndef f(completions, step): return os._exit(1) if step == 1 else [1.0]\n")
    with RewardProcess(["f"], [plugin]) as process:
        before = process.identity
        plugin.write_text("def f(completions): return [2.0]\n")
        assert process.score([[]], ["a"], [[1]], {}, 0).rewards == [[1.0]]
        plugin.unlink()
        assert process.score([[]], ["a"], [[1]], {}, 1).rewards == [[None]]
        assert process.score([[]], ["a"], [[1]], {}, 2).rewards == [[1.0]]
        assert process.identity == before


def test_a_function_that_changes_its_arguments_does_not_affect_others(tmp_path):
    plugin = tmp_path / "rewards.py"
    plugin.write_text("""
def a(completions, answer):
    completions[0] += "!"
    answer[0].append(1)
    return [len(text) for text in completions]
async def b(completions, answer): return a(completions, answer)
def c(completions, answer): return [len(each) for each in completions + answer]
""")
    with RewardProcess(["a", "b", "c"], [plugin]) as process:
        scored = process.score([[]] * 2, ["x", "y"], [[1]] * 2, {"answer": [[], []]}, 1)
    assert scored.rewards[:2] == [[2, 1], [2, 1]]
    assert "returned 4 values" in scored.failures[0]


OF_TRL = """
import re
import numpy as np

def contents(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match("so", content) else 0.0 for content in contents]

def last(prompts, completions, answer, log_extra=None, log_metric=None):
    for prompt, completion in zip(prompts, completions):
        assert prompt[-1]["role"] == "user" and completion[-1]["role"] == "assistant"
    return [float(completion[-1]["content"] == text) for completion, text in zip(completions, answer)]

def texts(completions, **kwargs):
    return [float(text[:1] == "s" and text == "so" and text[1] + text[-1] == "oo") for text in completions]

def state(completions, trainer_state, **kwargs): return [trainer_state.global_step] * len(completions)
def extra(completions, log_extra): return [0.0] * len(completions)
def rooms(completions, environments): return [0.0] * len(completions)

def lists(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    roles = [[message["role"] for message in completion] for completion in completions]
    assert roles == [["assistant"]] * 3 and all(isinstance(completion, list) for completion in completions)
    return [len(message["content"]) for completion in completions for message in completion]

def metric(completions: "List[List[dict]]", *, log_metric, **kwargs):
    for completion in completions:
        log_metric("length", len(completion[0]["content"]))
    return [0.0] * len(completions)

async def another(completions, log_metric=None):
    log_metric("length", np.float32(11))
    log_metric("other", 2)
    return [None] * len(completions)

def unnamed(completions, log_metric): log_metric(3, 1.0)
def infinite(completions, log_metric): log_metric("length", float("inf"))
def fails(completions, log_metric):
    log_metric("lost", 1.0)
    raise ValueError
"""


def test_functions_of_trl_read_messages(tmp_path):
    plugin = tmp_path / "rewards.py"
    plugin.write_text(OF_TRL)
    prompts = [[{"role": "user", "content": "q"}]] * 3
    with RewardProcess(["contents", "last", "texts"], [plugin]) as process:
        scored = process.score(prompts, ["so", "", "x"], [[1]] * 3, {"answer": ["so", "", "y"]}, 1)
    assert scored.failures == []
    assert scored.rewards == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_functions_of_trl_get_messages_the_step_and_metrics(tmp_path):
    plugin = tmp_path / "rewards.py"
    plugin.write_text(OF_TRL)
    prompts = [[{"role": "user", "content": "q"}]] * 3
    names = ("lists", "state", "metric", "another", "unnamed", "infinite", "fails")
    with RewardProcess(names, [plugin]) as process:
        for step in (1, 2):
            scored = process.score(prompts, ["so", "", "x"], [[1]] * 3, {}, step)
            assert scored.rewards == [[2, 0, 1], [step - 1] * 3, [0, 0, 0], *[[None] * 3] * 4]
            assert scored.metrics == {"length": (2 + 0 + 1 + 11) / 4, "other": 2}
            unnamed, infinite, fails = scored.failures
    assert mentions(unnamed, "unnamed log_metric(3, 1.0)")
    assert mentions(infinite, "infinite log_metric('length', inf)")
    assert mentions(fails, "fails ValueError")


def test_rewards_of_trl_itself(tmp_path):
    pytest.importorskip("trl")
    plugin = tmp_path / "rewards.py"
    plugin.write_text("from trl.rewards import think_format_reward")
    texts = ["<think>a</think>b", "b"]
    with RewardProcess(["think_format_reward"], [plugin]) as process:
        scored = process.score([[]] * 2, texts, [[1]] * 2, {}, 1)
    assert scored.rewards == [[1.0, 0.0]]


@pytest.mark.parametrize(("name", "argument"), [("extra", "log_extra"), ("rooms", "environments")])
def test_arguments_of_trls_trainer_are_named_at_the_start(tmp_path, name, argument):
    plugin = tmp_path / "rewards.py"
    plugin.write_text(OF_TRL)
    with pytest.raises(UserError, match=naming(f"--reward_funcs {name} {argument} {plugin} {argument}=None")):
        RewardProcess([name], [plugin]).__enter__()


def test_rows_with_values_that_json_does_not_have_are_used(tmp_path):
    """Only a function that names such a column cannot be used."""
    row = {"query": "q", "answer": "1", "day": date(2026, 1, 1), "raw": b"x", "rate": float("nan"), "step": 3}
    extras = parse_prompt(row).extras
    prompts = [replace(make_sample([1, 2], [0.0, 0.0]), extras=extras)]
    assert columns_in(prompts) == ["answer", "rate", "step"]
    assert omitted_in(prompts) == {"day": "date", "raw": "bytes"}
    plugin = tmp_path / "rewards.py"
    plugin.write_text("def f(answer, completions, **columns): return [len(columns)]\ndef g(day=None): return [0]\n")
    with RewardProcess(["f"], [plugin]) as process:
        process.check_columns(columns_in(prompts), omitted=omitted_in(prompts))
        columns = columns_of(prompts, columns_in(prompts))
        assert process.score([[]], ["a"], [[1]], columns, 1).rewards == [[7.0]]
    with (
        RewardProcess(["g"], [plugin]) as process,
        pytest.raises(UserError, match=naming("--reward_funcs g --dataset day date")),
    ):
        process.check_columns(columns_in(prompts), omitted=omitted_in(prompts))


def test_a_run_passes_the_end_of_the_prompt_and_ignores_unused_columns(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=0, with_tokenizer=True)
    template = model / "chat_template.jinja"
    config = json.loads((model / "tokenizer_config.json").read_text())
    text = template.read_text() if template.exists() else config["chat_template"]
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    template.write_text(text + "{% if add_generation_prompt %}<think>\n{% endif %}")
    plugin = tmp_path / "rewards.py"
    plugin.write_text("def f(prompt_texts, **columns): return [text.endswith('<think>\\n') for text in prompt_texts]\n")
    options = policy_options(model, tmp_path)
    rows = [
        {"query": f"What is {n}?", "when": datetime(2026, 1, n + 1), "rate": float("nan"), "step": n} for n in range(6)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    args = options(reward_funcs=["f"], external_plugins=[str(plugin)], dataset=[str(tmp_path / "rows.parquet")])
    rules.check(args, 1)
    (line,) = metrics(train(args, mesh))
    assert line["rewards/f/mean"] == 1.0
