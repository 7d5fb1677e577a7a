"""Test the computation of results with small examples."""

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer
from swiftlite.serve.bench.results import ConcurrencyResult, Round, choose
from tests.messages import mentions


def answer(text: str = "a", num_tokens: int = 5, first: float = 0.1, seconds: float = 0.5) -> Answer:
    return Answer(text, num_tokens, first, seconds)


def test_figures_of_a_server_at_one_concurrency():
    rounds = [
        Round([answer("a", 5, 0.1, 0.5), answer("b", 1, 0.3, 0.3)], 0.5),  # 12 tokens/s, 100 ms per token
        Round([answer("a", 5, 0.2, 1.0), answer("b", 1, 0.4, 0.4)], 1.0),  # 6 tokens/s, 200 ms per token
        Round([answer("a", 5, 0.5, 1.7), answer("c", 1, 0.5, 0.5)], 2.0),  # 3 tokens/s, 300 ms per token
    ]
    measured = ConcurrencyResult(2, rounds, DraftCounts(8, 16, (6, 2)), 0.5)
    figures = measured.to_json([answer("a"), answer("b", 1)])
    assert figures["tokens_per_second"] == 6
    assert figures["tokens_per_second_of_rounds"] == [12, 6, 3]
    assert figures["tokens_per_round"] == 6
    # Of 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, and of the three answers with more than one token.
    assert figures["time_to_first_token_ms"] == pytest.approx({"p50": 350, "p90": 500})
    assert figures["time_per_token_ms"] == pytest.approx({"p50": 200, "p90": 280})
    assert figures["answers_equal"] == 1  # "b" was "c" once
    assert figures["mean_accepted_length"] == 2
    assert figures["drafts"]["accepted"] == 8


def test_steps_without_drafts_count_as_steps():
    """After the first token, 100 steps gave 120 tokens, and 10 of the steps had drafts from the text."""
    measured = ConcurrencyResult(1, [Round([answer("a", 121)], 1.0)], DraftCounts(10, 30, (9, 7, 4)), 0.0)
    assert measured.mean_accepted_length == 1.2


def test_answers_differ_by_text_and_by_tokens():
    measured = ConcurrencyResult(1, [Round([answer("a", 5), answer("b", 5)], 1.0)], None, 0.0)
    assert measured.num_equal([answer("a", 5), answer("b", 6)]) == 1
    assert measured.num_equal([answer("c", 5), answer("b", 5)]) == 1


def test_without_drafts_or_with_single_tokens_there_is_less_to_say():
    figures = ConcurrencyResult(1, [Round([answer(num_tokens=1)], 1.0)], None, 0.0).to_json([answer()])
    assert figures["drafts"] is None
    assert figures["mean_accepted_length"] == 1.0
    assert figures["time_per_token_ms"] is None


@pytest.mark.parametrize(
    ("speeds", "last", "chosen", "reason"),
    [
        ({1: [150, 151, 152], 2: [120, 121, 122]}, [100, 100, 100], 1, "1.51x"),
        ({1: [120, 121, 122], 2: [150, 151, 152]}, [100, 100, 100], 2, "1.51x"),
        ({1: [80, 80, 80], 2: [90, 90, 90]}, [100, 100, 100], 0, "0.90x"),
        # Faster, and by less than the machine became faster by itself.
        ({1: [110, 110, 110]}, [115, 115, 115], 0, "0.96x"),
        ({1: [104, 104, 104]}, [103, 95, 120], 0, "1 1.01x"),
        # Faster on the whole, and not in every round; 2 is slower than 1, and surely faster than nothing.
        ({1: [50, 160, 170], 2: [120, 120, 120]}, [100, 100, 100], 2, "1.20x"),
    ],
)
def test_the_choice(speeds, last, chosen, reason):
    choice = choose([100, 100, 100], speeds, last, {1: 2.0, 2: 3.0})
    assert choice.num_speculative_tokens == chosen
    assert mentions(choice.reason, reason)
    assert choice.drift == pytest.approx(last[0] / 100 - 1)


def test_one_slow_round_of_many_does_not_hide_a_gain():
    plain = [100.0] * 12
    assert choose(plain, {1: [150.0] * 11 + [50.0]}, plain, {1: 2.0}).num_speculative_tokens == 1


def test_nothing_is_faster_by_more_than_its_accepted_length():
    """These values were measured with random heads on a machine that other processes slowed down."""
    first, last = [38.8, 111.4, 60.2, 54.5, 38.5], [19.9, 44.2, 29.6, 22.8, 37.8]
    speeds = {1: [87.8, 84.8, 94.9, 94.3, 88.8]}
    choice = choose(first, speeds, last, {1: 1.0})
    assert choice.num_speculative_tokens == 0
    assert mentions(choice.reason, "1.00")
    assert choose(first, speeds, last, {1: 3.0}).num_speculative_tokens == 1
