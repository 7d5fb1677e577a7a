"""Test conversations with the process of the user's code and an engine that answers as it is told."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.data.rows.prompt import TURNS
from swiftlite.data.sample import make_sample
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.engine import Completion, Sampling
from swiftlite.rollouts.conversations import Conversations, Drawn, EpisodeProcess, number_of
from swiftlite.rollouts.turns import Turns
from tests.data.templates import CHATML
from tests.messages import naming
from tests.rollouts.test_turns import template_of

SECONDS = 1.0
LENGTH = 300
TOOLS = '''
def lookup(key: str) -> str:
    """
    Look up a key.

    Args:
        key: The key.
    """
    return "v" * int(key)
'''
FUNCTIONS = """
import asyncio, os, time

async def twice(messages, generate, other):
    answer = await generate(messages, max_tokens=len(other))
    messages = [*messages, answer, {"role": "user", "content": f"{other}?"}]
    await asyncio.sleep(0.01 * (3 - len(other)))  # the last episode asks first
    return [*messages, await generate(messages)]

async def forever(messages, generate):
    while True:
        messages = [*messages, await generate(messages), {"role": "user", "content": "more"}]

async def refuses_to_end(messages, generate):
    while True:
        try:
            messages = [*messages, await generate(messages), {"role": "user", "content": "more"}]
        except BaseException:
            pass

async def once(messages, generate):
    return [*messages, await generate(messages)]

async def one_in_two(messages, generate):
    messages = await once(messages, generate)
    assert messages[0]["content"] != "q1", "my reason"
    return messages

async def raises(messages, generate): raise ValueError("my reason")
async def leaves(messages, generate): raise SystemExit(3)
async def exits(messages, generate): os._exit(3)
async def exits_later(messages, generate):
    await generate(messages)
    os._exit(3)
async def blocks(messages, generate): time.sleep(1000)
async def awaits(messages, generate): await asyncio.sleep(1000)
async def nothing(messages, generate): await generate(messages)
async def silent(messages, generate): return messages
async def other(messages, generate):
    await generate(messages)
    return [{"role": "user", "content": "other"}]
async def changed(messages, generate):
    answer = await generate(messages)
    answer["content"] += "!"
    return await once([*messages, answer, {"role": "user", "content": "more"}], generate)
async def repeats(messages, generate):
    await generate(messages)
    return await once(messages, generate)
async def first(messages, generate): return await once([{"role": "system", "content": "s"}, *messages], generate)
async def early(messages, generate): return await once([*messages, {"role": "user", "content": "more"}], generate)
async def together(messages, generate): await asyncio.gather(generate(messages), generate(messages))
async def cancels(messages, generate):
    if messages[0]["content"] == "q1": await asyncio.sleep(0.3)  # the other one ends while this one has not asked
    try:
        await asyncio.wait_for(generate(messages), 0.001)
    except TimeoutError:
        return messages
async def number(messages, generate): return await generate(messages, max_tokens=0)
async def unnamed(messages, generate):
    messages = [*messages, await generate(messages), {"content": "more"}]
    return [*messages, await generate(messages)]
async def bytes(messages, generate): return await generate([b"q"])

def sync(messages, generate): return messages
async def without_generate(messages): return messages
"""


class ScriptedEngine:
    """Answers each prompt as a function of its text, and remembers what it was asked."""

    num_speculative_tokens = 1

    def __init__(self, template: ChatTemplate, reply: Callable[[str], str]):
        self.template = template
        self.reply = reply
        self.asked: list[tuple[list[list[int]], Sampling]] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: Any = None) -> list[Completion]:
        prompts = [list(prompt) for prompt in prompts]
        self.asked.append((prompts, sampling))
        completions = []
        for prompt in prompts:
            ids = [*self.template.tokenize(self.reply(self.template.decode(prompt))), self.template.end_token_id or 0]
            kept = ids[: sampling.max_new_tokens]
            reason = "stop" if kept == ids else "length"
            completions.append(Completion(kept, reason, [-1.0] * len(kept), [1] * len(kept)))
        return completions

    def draft_counts(self) -> DraftCounts:
        number = len(self.asked)
        return DraftCounts(10 * number, 10 * number, (4 * number + 2 * max(number - 1, 0),))

    def close(self) -> None:
        pass


@contextmanager
def conversations(
    directory: Path, reply: Callable[[str], str], function: str | None = None, max_turns: int = 8
) -> Iterator[Callable[..., Drawn]]:
    """Yield a function that draws conversations of two prompts, q1 and q2."""
    path = directory / "code.py"
    path.write_text(FUNCTIONS if function else TOOLS)
    template = template_of(CHATML)
    engine = ScriptedEngine(template, reply)
    end = template.end_token_id or 0
    sampling = Sampling(LENGTH, temperature=1.0, log_p=True, stop_token_ids=(end,))
    prompts = []
    for text in ("q1", "q2"):
        messages = [{"role": "user", "content": text}]
        ids = template.encode_prompt(messages)
        prompts.append(make_sample(ids, np.zeros(len(ids))).with_extras(**{TURNS: json.dumps(messages)}))
    columns = {"other": ["a", "bc"], "unused": [None, {"a": 1}]}
    with EpisodeProcess(function, None if function else str(path), [str(path)], SECONDS) as process:
        drawing: Any = Conversations(process, Turns(template, process.schemas, (end,)), max_turns)
        draw: Any = lambda number=10: drawing.draw(engine, sampling, prompts, columns, number)  # noqa: E731
        draw.engine, draw.prompts, draw.process = engine, prompts, process
        yield draw


def texts(drawn: Drawn) -> list[list[str]]:
    """Return the parts of each completion: generated ones, and between them others."""
    template, found = template_of(CHATML), []
    for completion, mask in zip(drawn.completions, drawn.is_generated, strict=True):
        cuts = np.flatnonzero(np.diff(np.array(mask).astype(int))) + 1
        parts = np.split(np.array(completion.token_ids), cuts)
        found.append([template.decode(part.tolist()) for part in parts])
    return found


def call(key: str) -> str:
    return f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{key}"}}}}</tool_call>'


def reply_with_calls(prompt: str) -> str:
    """Call once for q1, and not for q2."""
    if "q2" in prompt:
        return "no call"
    return "done" if "<|im_start|>tool" in prompt else call("3") + call("x")


def test_tools_are_called_and_their_results_are_not_generated(tmp_path):
    with conversations(tmp_path, reply_with_calls) as draw:
        drawn = draw()
    (called, between, answer), alone = texts(drawn)
    assert called == call("3") + call("x") + "<|im_end|>"
    assert answer == "done<|im_end|>"
    assert alone == ["no call<|im_end|>"]
    assert "\n<|im_start|>tool\nvvv<|im_end|>\n<|im_start|>tool\n{'error': " in between
    assert between.endswith("<|im_end|>\n<|im_start|>assistant\n")
    first, _ = drawn.completions
    mask = np.array(drawn.is_generated[0])
    assert np.array_equal(np.isnan(first.log_p or []), ~mask)
    assert [depth == 1 for depth in first.draft_depths or []] == mask.tolist()
    assert drawn.figures["tools/call_frequency"] == 1.0
    assert drawn.figures["tools/failure_frequency"] == 0.5
    assert drawn.figures["rollout/turns"] == 1.5
    # The first batch accepts 4 of 10 drafts, the later ones 6.
    assert drawn.figures["rollout/acceptance_1_after_tool"] == 0.6
    assert drawn.counts == DraftCounts(20, 20, (10,))
    (prompts, _), (later, _) = draw.engine.asked
    assert later == [prompts[0] + first.token_ids[: -len(template_of(CHATML).tokenize("done")) - 1]]


def test_random_numbers_depend_on_completion_and_turn(tmp_path):
    """Not on which other conversations go on, nor on the order in which they ask."""
    with conversations(tmp_path, reply_with_calls) as draw:
        draw()
        assert [sampling.numbers for _, sampling in draw.engine.asked] == [(10, 11), (number_of(10, 1),)]
    with conversations(tmp_path, lambda prompt: "ab", "twice") as draw:
        drawn = draw()
        numbers = [sampling.numbers for _, sampling in draw.engine.asked]
    assert numbers == [(10, 11), (number_of(10, 1), number_of(11, 1))]
    # The limit of the first answer is 1 token for q1 and 2 for q2.
    assert [parts[0] for parts in texts(drawn)] == ["a", "ab"]
    assert [parts[1] for parts in texts(drawn)] == [
        f"<|im_end|>\n<|im_start|>user\n{other}?<|im_end|>\n<|im_start|>assistant\n" for other in ("a", "bc")
    ]
    assert drawn.figures["rollout/failures"] == 0
    assert "tools/call_frequency" not in drawn.figures


@pytest.mark.parametrize(
    ("key", "max_turns", "is_truncated"), [("3", 3, False), ("3", 99, True), ("9999", 99, True), ("3", 1, False)]
)
def test_limits_end_a_conversation(tmp_path, key, max_turns, is_truncated):
    """A result that does not fit is dropped, and an answer is cut."""
    with conversations(tmp_path, lambda prompt: call(key), max_turns=max_turns) as draw:
        drawn = draw()
    for completion, mask in zip(drawn.completions, drawn.is_generated, strict=True):
        assert (completion.finish_reason == "length") == is_truncated
        assert len(completion.token_ids) == len(mask) <= LENGTH
        assert mask[-1]
    assert all(sampling.max_new_tokens <= LENGTH for _, sampling in draw.engine.asked)
    if not is_truncated:
        assert drawn.figures["rollout/turns"] == max_turns
    assert drawn.figures["rollout/failures"] == 0


@pytest.mark.parametrize("function", ["forever", "refuses_to_end"])
def test_a_function_without_an_end_is_ended(tmp_path, function):
    with conversations(tmp_path, lambda prompt: "a", function, max_turns=3) as draw:
        for _ in range(2):
            drawn = draw()
            assert [mask.count(True) for mask in drawn.is_generated] == [6, 6]
            assert drawn.figures["rollout/failures"] == 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "ValueError my reason code.py"),
        ("leaves", "SystemExit"),
        ("exits", "exit code 3"),
        ("exits_later", "exit code 3"),
        ("blocks", "1 seconds --tool_timeout"),
        ("awaits", "1 seconds --tool_timeout"),
        ("nothing", "NoneType list"),
        ("silent", "generate"),
        ("other", "message 0 user"),
        ("changed", "message 1 assistant"),
        ("repeats", "message 1 assistant"),
        ("first", "message 0 user"),
        ("early", "messages of the prompt"),
        ("together", "generate"),
        ("cancels", "--rollout_func"),
        ("number", "max_tokens 0"),
        ("unnamed", "role"),
        ("bytes", "JSON"),
    ],
)
def test_a_function_that_fails_three_times_ends_the_run(tmp_path, function, words):
    """Until then its completions have no labels. Each of them has tokens."""
    with conversations(tmp_path, lambda prompt: "abc", function) as draw:
        for _ in range(2):
            drawn = draw()
            assert not any(map(any, drawn.is_generated))
            assert all(completion.token_ids for completion in drawn.completions)
            assert drawn.figures["rollout/failures"] == 2
        with pytest.raises(UserError, match=naming(f"--rollout_func {function} 3 --resume {words}")):
            draw()


def test_a_failed_conversation_does_not_change_the_others(tmp_path):
    with conversations(tmp_path, lambda prompt: "abc", "one_in_two") as draw:
        for _ in range(4):
            drawn = draw()
            assert list(map(any, drawn.is_generated)) == [False, True]
            assert drawn.figures["rollout/failures"] == 1


@pytest.mark.parametrize("function", ["sync", "without_generate", "missing"])
def test_an_unsuitable_function_is_refused_at_the_start(tmp_path, function):
    with (
        pytest.raises(UserError, match=naming(f"--rollout_func {function} generate")),
        conversations(tmp_path, lambda prompt: "", function),
    ):
        pass


def test_columns_of_the_function_are_checked(tmp_path):
    with conversations(tmp_path, lambda prompt: "", "twice") as draw:
        draw.process.check_columns(["other"], "--dataset", {})
        with pytest.raises(UserError, match=naming("--rollout_func twice --val_dataset other answer")):
            draw.process.check_columns(["answer"], "--val_dataset", {})
        with pytest.raises(UserError, match=naming("messages")):
            draw.process.check_columns(["other", "messages"], "--dataset", {})
