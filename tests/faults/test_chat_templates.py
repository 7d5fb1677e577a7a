"""Test that, whatever a chat template does, a row is encoded or reported. Templates are untrusted programs."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from transformers import PreTrainedTokenizerFast

from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.template import ChatTemplate
from tests.data.templates import CHATML, train_bytes
from tests.faults.fuzzing import answer, fuzz

ROWS = [
    {"query": "q", "response": "a"},
    {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]
        * 2
    },
    {"query": "q", "response": "a", "system": "s", "tools": [{"function": {"name": "get"}}]},
]
# No number is raised to a large power here: that takes no memory to speak of, and for ever.
expressions = st.recursive(
    st.sampled_from(
        "m m.content m.role m['x'] m.x.y messages tools loop.index0 1 0 -1 'a' [] {} none true undefined eos_token "
        "range(9) range(10**9) 'a'*10**10 cycler(1) namespace(a=1) m.content.index('z') m.content[9] m.__class__ "
        "raise_exception('no') strftime_now('%Y') forever(1) lipsum joiner()".split()
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+ - / // % ** ~ == < in is and or".split()), inner).map(" ".join),
        st.tuples(
            inner,
            st.sampled_from("tojson length first last list trim upper int float sort join safe items abs min".split()),
        ).map(" | ".join),
        st.tuples(st.just("("), inner, st.just(")")).map("".join),
    ),
    max_leaves=4,
)
statements = st.one_of(
    expressions.map(lambda code: "{{ " + code + " }}"),
    expressions.map(lambda code: "{% if " + code + " %}x{% endif %}"),
    expressions.map(lambda code: "{% for i in " + code + " %}y{% endfor %}"),
    expressions.map(lambda code: "{% set z = " + code + " %}"),
    expressions.map(lambda code: "{% generation %}{{ " + code + " }}{% endgeneration %}"),
    st.sampled_from(["{{ m.role }}:{{ m.content }}\n", "{%- break %}", "{% include 'x' %}", "{{", "%}", "<|im_end|>"]),
    st.text(max_size=3),
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=train_bytes(), eos_token="<|endoftext|>")


def assert_every_row_is_encoded_or_bad(tokenizer: PreTrainedTokenizerFast, chat_template: str) -> None:
    tokenizer.chat_template = chat_template
    template = answer(ChatTemplate, tokenizer)
    if template is None:
        return
    for row in ROWS:
        encoded = ConversationEncoder(template, 2048, "delete")(parse_row(row, source="rows.jsonl:1"))
        assert encoded.samples or encoded.bad is not None
        conversation = parse_row(row, source="rows.jsonl:1").prompt()
        answer(template.encode_prompt, conversation.messages, conversation.tools)


@fuzz
@given(pieces=st.lists(statements, max_size=4), place=st.integers(0, 4))
@example(pieces=["{% if m.content == 'q' %}{{ 1 // 0 }}{% endif %}"], place=1)
@example(pieces=["{% if m.content == 'q' %}{{ range(10**9) | list }}{% endif %}"], place=1)
@example(pieces=["{% if m.content == 'q' %}{{ forever(1) }}{% endif %}"], place=1)
@example(pieces=["{% if m.content == 'q' %}{{ m.content.index('z') }}{% endif %}"], place=1)
@example(pieces=["{% if m.content == 'q' %}{{ '%q' % {} }}{% endif %}"], place=1)
def test_any_template(tokenizer, pieces, place):
    said = "{{ m.role }}:{{ m.content }}<|im_end|>\n"
    body = "".join([*pieces[:place], said, *pieces[place:]])
    macro = "{% macro forever(n) %}{{ forever(n) }}{% endmacro %}"
    assert_every_row_is_encoded_or_bad(tokenizer, macro + "{% for m in messages %}" + body + "{% endfor %}")


@fuzz
@given(data=st.data())
def test_any_damage_to_a_template(tokenizer, data):
    text = CHATML
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(text)))
        text = (
            text[:begin] + data.draw(st.text("{}%-|. m'n+", max_size=3)) + text[begin + data.draw(st.integers(0, 6)) :]
        )
    assert_every_row_is_encoded_or_bad(tokenizer, text)
