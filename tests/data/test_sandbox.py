"""What a chat template, and a row, may do to the machine."""

import resource

import pytest

from swiftlite.data.conversation import RowError, parse_row
from swiftlite.data.template import ChatTemplate
from swiftlite.errors import UserError
from tests.data.templates import CHATML

ROW = {"query": "q", "response": "a"}


def with_fault(code: str) -> str:
    """A template that does something for one user turn; a plain exchange passes."""
    fault = "{% if m.content == 'q' %}" + code + "{% endif %}"
    return "{% for m in messages %}" + fault + "{{ m.role }}:{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    "code",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(m) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_of_python(make_tokenizer, code):
    template = ChatTemplate(make_tokenizer(with_fault(code)))
    with pytest.raises(RowError, match="the chat template fails: "):
        template.encode(parse_row(ROW))


@pytest.mark.parametrize(
    "code",
    [
        "{{ 'a' * n }}",
        "{{ 'a'.center(n) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ (range(99999) | list) * 99999 }}",
    ],
)
def test_a_template_does_not_take_all_memory(make_tokenizer, code):
    most_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits_before = resource.getrlimit(resource.RLIMIT_AS)
    template = ChatTemplate(make_tokenizer(with_fault("{% set n = 10**10 %}" + code)))
    with pytest.raises(RowError, match="messages: the chat template wants more than 1000 MB of memory"):
        template.encode(parse_row(ROW))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_before < 1_000_000  # kilobytes
    assert resource.getrlimit(resource.RLIMIT_AS) == limits_before


def test_a_template_that_does_so_always_is_refused_at_once(make_tokenizer):
    with pytest.raises(UserError, match=r"cannot render a plain exchange: .*more than 1000 MB"):
        ChatTemplate(make_tokenizer("{{ 'a' * 10**10 }}"))


def test_a_conversation_of_more_than_ten_million_characters_is_a_bad_row(make_tokenizer):
    """Tokenized, one of 100 million would take 50 GB and minutes."""
    template = ChatTemplate(make_tokenizer(CHATML))
    row = {"query": "q " * 5_000_000, "response": "a"}
    with pytest.raises(RowError, match=r"they are 10,000,\d+ characters long, and a row may have 10,000,000"):
        template.encode(parse_row(row))
    with pytest.raises(RowError, match="a row may have 10,000,000"):
        template.encode_prompt(parse_row(row).messages)
