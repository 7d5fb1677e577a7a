"""Test `messages.py`: it finds whole names in any order, and ignores everything else."""

import pytest

from tests.messages import answers_equal, has_line, mention_each, mentions, naming

MESSAGE = "swiftlite: --lr_decay_style of run/train.jsonl:2: 0.5 is above\n    use 12, 'a' or -3."


@pytest.mark.parametrize("tokens", ["--lr_decay_style 12", "12 0.5", "train.jsonl:2", "run/train.jsonl", "'a' -3"])
def test_tokens_that_a_message_names(tokens):
    assert mentions(MESSAGE, tokens)


@pytest.mark.parametrize("tokens", ["--lr", "lr_decay_style", "5", "0", "2 1", "3", "rain.jsonl", "12 13", "'b'"])
def test_tokens_that_it_does_not(tokens):
    assert not mentions(MESSAGE, tokens)


def test_tokens_of_one_line():
    assert has_line(MESSAGE, "0.5 --lr_decay_style")
    assert has_line(MESSAGE, "-3 12")
    assert not has_line(MESSAGE, "0.5 12")


def test_no_tokens():
    with pytest.raises(AssertionError):
        naming("")


def test_a_text_for_each():
    problems = [("--lr 2 is above 1", "use 0.5"), ("--seed", "")]
    assert mention_each(problems, ["--lr 0.5", "--seed"])
    assert not mention_each(problems, ["--lr 0.5"])
    assert not mention_each(problems, ["--seed", "--lr 0.5"])
    assert mention_each(["1 of 2"], ["2 1"])


def test_only_the_verdict_of_the_comparison_counts():
    written = "swiftlite: 4 of 4 answers are in answers.jsonl\n"
    assert answers_equal(f"swiftlite: answers equal: 4 of 4\n{written}", 4)
    assert not answers_equal(f"swiftlite: answers equal: 3 of 4; 1 differ\n{written}", 4)
    assert not answers_equal(written, 4)
