"""Test the limits of a chat template and of a row: memory and length."""

import mmap
import resource
import threading

import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import RowError, parse_row
from swiftlite.data.sandbox import run_templates_unbounded, running_the_template
from swiftlite.data.template import ChatTemplate
from tests.data.templates import CHATML
from tests.messages import naming

ROW = {"query": "q", "response": "a"}


def with_fault(code: str) -> str:
    """Return a template that runs `code` for one user turn; a simple conversation is rendered without it."""
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
    with pytest.raises(RowError, match=naming("messages:")):
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
    with pytest.raises(RowError, match=naming("messages: 1000 MB")):
        template.encode(parse_row(ROW))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_before < 1_000_000  # kilobytes
    assert resource.getrlimit(resource.RLIMIT_AS) == limits_before


def test_threads_that_overlap_leave_no_limit():
    """The first thread leaves while the second is inside. A limit that remained would end the process later."""
    limits = [resource.getrlimit(resource.RLIMIT_AS)]
    both_are_inside, first_has_left = threading.Barrier(2), threading.Event()

    def run_first() -> None:
        with running_the_template():
            both_are_inside.wait()
        first_has_left.set()

    def run_second() -> None:
        with running_the_template():
            both_are_inside.wait()
            first_has_left.wait()
            limits.append(resource.getrlimit(resource.RLIMIT_AS))

    threads = [threading.Thread(target=run) for run in (run_first, run_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before, inside = limits
    assert inside != before
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_whoever_comes_later_is_given_as_much_as_the_first():
    """Memory that the threads themselves need (stacks, arenas) must not reduce the limit of a later thread.

    A thread that starts with no memory left dies before it can report it, and its creator waits forever.
    """
    with running_the_template(), mmap.mmap(-1, 700_000_000), running_the_template(), mmap.mmap(-1, 700_000_000):
        pass


def test_a_thread_beside_training_sets_no_limit():
    found = []

    def run() -> None:
        run_templates_unbounded()
        with running_the_template():
            found.append(resource.getrlimit(resource.RLIMIT_AS))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [resource.getrlimit(resource.RLIMIT_AS)]


def test_a_template_that_does_so_always_is_refused_at_once(make_tokenizer):
    with pytest.raises(UserError, match=naming("1000 MB")):
        ChatTemplate(make_tokenizer("{{ 'a' * 10**10 }}"))


def test_a_conversation_of_more_than_ten_million_characters_is_a_bad_row(make_tokenizer):
    """Tokenizing 100 million characters would take 50 GB and minutes."""
    template = ChatTemplate(make_tokenizer(CHATML))
    row = {"query": "q " * 5_000_000, "response": "a"}
    with pytest.raises(RowError, match=r"10,000,\d+.* 10,000,000"):
        template.encode(parse_row(row))
    with pytest.raises(RowError, match=naming("10,000,000")):
        template.encode_prompt(parse_row(row).messages)
