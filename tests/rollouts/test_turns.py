"""Test the tokens between two answers, and the tool calls of answers, with published chat templates and small ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import RowError
from swiftlite.data.template import ChatTemplate
from swiftlite.rollouts.turns import Turns, call_of
from tests.data.templates import CHATML, GLM, QWEN3, train_bytes
from tests.messages import naming
from tests.tiny import make_tiny_tokenizer

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
USER = {"role": "user", "content": "What is k?"}
CALLED = '<tool_call>\n{"name": "lookup", "arguments": {"key": "k"}}\n</tool_call>'
CALL = call_of("lookup", {"key": "k"})
RESULT = {"role": "tool", "name": "lookup", "content": 'it is\n"v"'}


def template_of(chat_template: str) -> ChatTemplate:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bytes(), eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    return ChatTemplate(tokenizer)


def published(name: str) -> ChatTemplate:
    """Return the chat template of a published model, which TRL contains."""
    trl: Any = pytest.importorskip("trl")
    return template_of((Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text())


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3_instruct_2507"])
@pytest.mark.parametrize("ends", [True, False])
def test_tokens_between_answers_are_those_of_the_whole_conversation(name, ends):
    """Also if the model ended its answer with another token than the template, or was truncated."""
    template = published(name)
    turns = Turns(template, [LOOKUP], ())
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    expected = template.encode_prompt([USER, called, RESULT, RESULT], [LOOKUP])
    prompt = template.encode_prompt([USER], [LOOKUP])
    end = template.end_token_id
    assert end is not None
    answer = template.tokenize(CALLED) + [end] * ends
    assert [*prompt, *answer, *turns.after(answer[-1], [RESULT, RESULT])] == expected


def test_thinking_of_earlier_turns_is_kept():
    """Qwen3's template removes it from earlier turns, so a rendered conversation would not continue what was
    generated."""
    template = published("qwen3")
    turns = Turns(template, [], ())
    follow = {"role": "user", "content": "And l?"}
    text = template.decode(turns.after(-1, [follow]))
    assert text == "<|im_end|>\n<|im_start|>user\nAnd l?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALLED, [CALL]),
        (f"I look it up.\n{CALLED}\n{CALLED}", [CALL, CALL]),
        ('<tool_call>{"name": "lookup"}', [call_of("lookup", {})]),
        ('<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', [call_of("f", "[1]")]),
        ("<tool_call>{'name': 'lookup'}</tool_call>", "JSON"),
        ("<tool_call>" + "[" * 100_000, "JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "name"),
        ("<tool_call></tool_call>", "JSON"),
        ("no call", None),
    ],
)
def test_calls_are_read(text, calls):
    template = template_of(QWEN3.replace("{%- set ns", "{{ tools | tojson }}{%- set ns", 1))
    turns = Turns(template, [LOOKUP], (template.end_token_id or 0,))
    message = turns.message([*template.tokenize(text), template.end_token_id or 0], [])
    assert message["content"] == text.partition("<tool_call>")[0].strip()
    if isinstance(calls, str):
        assert calls in message["tool_calls"][0]["error"]
    else:
        assert message.get("tool_calls") == calls
    json.dumps(message)


def test_a_response_template_of_the_tokenizer_is_used():
    trl: Any = pytest.importorskip("trl.chat_template_utils")
    template = published("qwen3")
    trl.add_response_schema(template.tokenizer)
    assert template.tokenizer.response_template is not None
    turns = Turns(template, [LOOKUP], (template.end_token_id or 0,))
    ids = [*template.tokenize(f"Well.\n{CALLED}"), template.end_token_id or 0]
    message = turns.message(ids, template.encode_prompt([USER], [LOOKUP]))
    assert message == {"role": "assistant", "content": "Well.", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("chat_template", "words"),
    [
        (make_tiny_tokenizer().chat_template, "tool lookup"),
        (GLM, "--tools turns"),
        (CHATML.replace("<tool_call>", "<call>"), "--tools format"),
    ],
)
def test_a_template_without_tools_is_refused(chat_template, words):
    with pytest.raises(UserError, match=naming(words)):
        Turns(template_of(chat_template), [LOOKUP], ())


def test_a_template_that_drops_a_role_is_refused():
    """Messages of users are possible, those of tools are not."""
    drops = CHATML.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'tool' %}")
    turns = Turns(template_of(drops), [], ())
    with pytest.raises(RowError, match=naming("tool")):
        turns.after(-1, [RESULT])
