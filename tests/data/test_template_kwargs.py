"""Test that variables of a chat template have the effect that they have in transformers."""

import json

import pytest

from swiftlite.cli.main import main
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.template import ChatTemplate, load_tokenizer
from tests.data.templates import CHATML, CHATML_GENERATION
from tests.messages import mentions
from tests.tiny import make_tiny_tokenizer

SHOWN = "{% macro shown() %}{{ value is defined }} {{ value | default('-') | tojson }}{% endmacro %}"
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
VALUES = [True, None, -1, 2.5e20, 'it\'s "q" %} \\n \n é 😀 {{ x }}', [], {"a b": [1, None, {"c": False}]}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the directory of a tokenizer with a template."""

    def directory(chat_template):
        path = tmp_path_factory.mktemp("tokenizer")
        tokenizer = make_tiny_tokenizer()
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(path)
        return path

    return directory


@pytest.mark.parametrize("value", VALUES)
def test_texts_equal_those_of_transformers(saved, value):
    """The value is read in a macro, in a loop and between turns."""
    source = SHOWN + "\n{{- shown() }}{% for m in messages %}{{ value | tojson }}{% endfor %}" + CHATML
    directory = saved(source)
    expected = load_tokenizer(directory).apply_chat_template(MESSAGES, tokenize=False, value=value)
    found = ChatTemplate(load_tokenizer(directory, False, {"value": value}))
    assert found.render(MESSAGES, None) == expected
    assert json.dumps(value)[:3] in expected


@pytest.mark.parametrize("start", ["\n", " ", "\n  \n"])
def test_white_space_at_the_beginning_stays(saved, start):
    directory = saved(start + CHATML)
    expected = load_tokenizer(directory).apply_chat_template(MESSAGES, tokenize=False, a=1, b="x")
    found = ChatTemplate(load_tokenizer(directory, False, {"a": 1, "b": "x"}))
    assert found.render(MESSAGES, None) == expected


def test_trained_turns_are_located(saved):
    """Those of `{% generation %}` blocks are rendered by another function."""
    directory = saved(CHATML_GENERATION.replace("m.content + '<", "prefix + m.content + '<"))
    template = ChatTemplate(load_tokenizer(directory, False, {"prefix": "so: "}))
    sample = template.encode(parse_row({"messages": MESSAGES}))
    trained = sample.labels[sample.labels != -100].tolist()
    assert template.decode(trained) == "so: a<|im_end|>"


def test_each_of_several_templates_has_the_variables(saved):
    directory = saved({"default": CHATML + "{{ value }}", "tool_use": "{{ tools | length }}{{ value }}" + CHATML})
    template = ChatTemplate(load_tokenizer(directory, False, {"value": "set"}))
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert template.render(MESSAGES, None).endswith("set")
    assert template.render(MESSAGES, [tool]).startswith("1set")


def test_a_variable_that_the_template_does_not_use_is_named(saved, caplog):
    load_tokenizer(saved(CHATML + "{{ enable_thinking }}"), False, {"enable_thinking": False, "enable_thinkin": 1})
    (record,) = caplog.records
    assert mentions(record.getMessage(), "--chat_template_kwargs enable_thinkin")


@pytest.mark.parametrize("command", ["infer", "deploy", "evaluate", "bench", "speedup", "regenerate", "megatron sft"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"a": ', "--chat_template_kwargs"),
        ("[1]", "--chat_template_kwargs"),
        ('{"messages": 1}', "--chat_template_kwargs 'messages'"),
        ('{"not a name": 1}', "--chat_template_kwargs 'not a name'"),
        ('{"if": 1}', "--chat_template_kwargs 'if'"),
        ('{"true": 1}', "--chat_template_kwargs 'true'"),
        ('{"a": Infinity}', "--chat_template_kwargs"),
    ],
)
def test_values_that_cannot_be_set(capsys, command, given, message):
    assert main([*command.split(), "--model", "m", "--chat_template_kwargs", given]) != 0
    assert mentions(capsys.readouterr().err, message)
