"""Test the last lines of the output with given results."""

import pytest

from swiftlite.improve.speedup.screen import answer_lines, best_server, final_lines, other_lines
from swiftlite.improve.speedup.state import Progress
from tests.messages import has_line


def recommendation(concurrency: int, number: int, ratios: list[float]) -> dict:
    return {
        "concurrency": concurrency,
        "num_speculative_tokens": number,
        "ratios": {str(k): ratio for k, ratio in enumerate(ratios, start=1)},
        "reason": "drafts are slower",
        "drift": 0.02,
        "command": f"swiftlite deploy --num_speculative_tokens {number}",
    }


DRAFTS = {"drafted": 50, "accepted": 20, "acceptance_rate": 0.4}


def measured(tokens_per_second: float) -> dict:
    return {
        "tokens_per_second": tokens_per_second,
        "mean_accepted_length": 1.5,
        "answers_equal": 15,
        "drafts": DRAFTS,
    }


BENCH = {
    "options": {"torch_dtype": "bfloat16"},
    "prompts": 16,
    "servers": [
        {"num_speculative_tokens": 0, "measured": [measured(30.0), measured(90.0)]},
        {"num_speculative_tokens": 1, "measured": [measured(36.0), measured(81.0)]},
        {"num_speculative_tokens": 2, "measured": [measured(42.0), measured(72.0)]},
        {"num_speculative_tokens": 0, "measured": [measured(30.6), measured(91.8)]},
    ],
    "recommendations": [recommendation(1, 2, [1.2, 1.4]), recommendation(16, 0, [0.9, 0.8])],
    "schedule_command": None,
}
ACCEPTANCE = {"model": [0.5, 0.3], "round-1": [0.3, 0.1], "round-2": [0.42, 0.2]}
PROGRESS = Progress({}, {"round-1/answers": 60, "round-1/training": 90}, rounds=[128, 500], acceptance=ACCEPTANCE)


def test_everything_is_said():
    channels = {name: [0.5, 0.25] for name in ("all", "code", "self_prompts")}
    lines = final_lines(PROGRESS, "round-2", BENCH, channels)
    text = "\n".join(lines)
    assert has_line(lines[0], "1 1.40x 42.0 30.6 15 of 16")
    assert has_line(lines[1], "1.50 20 of 50 40.0%")
    assert has_line(lines[2], "bfloat16 --torch_dtype float32")
    assert has_line(lines[3], "16 1.00x drafts are slower")
    assert has_line(text, "30.6 1.20x 1.40x 2")
    assert has_line(text, "91.8 0.90x 0.80x 0")
    assert has_line(text, "round-1 30.0% 10.0%")
    assert has_line(text, "round-2 42.0% 20.0%")
    assert has_line(text, "code 50.0% 25.0%")
    assert has_line(text, "swiftlite deploy --num_speculative_tokens 2")
    assert has_line(text, "2 minutes --budget")


def test_rounding_is_named_only_where_it_can_be_the_cause():
    bench = BENCH | {"options": {"torch_dtype": "float32"}}
    text = "\n".join(final_lines(PROGRESS, "round-2", bench, {"all": [0.5, 0.25]}))
    assert has_line(text, "15 of 16")
    assert not has_line(text, "--torch_dtype")


@pytest.mark.parametrize(("speed", "ratio", "is_fastest"), [(57.0, 1.05, True), (40.0, 1.1, True), (40.0, 1.04, False)])
def test_another_engine_can_be_the_fastest(speed, ratio, is_fastest):
    """The server with heads has 1.4 times 30.6 tokens/s."""
    choice = recommendation(1, 3, [1.0]) | {"ratios": {"3": ratio}, "drift": 0.0}
    other = {
        "options": {"model": "a/gguf-q8_0.gguf"},
        "servers": [{"num_speculative_tokens": 0, "measured": [measured(speed)]}],
        "recommendations": [choice],
    }
    text = "\n".join(other_lines(best_server(BENCH), "llama.cpp", other))
    assert has_line(text, f"llama.cpp gguf-q8_0.gguf {speed} {ratio:.2f}x")
    assert has_line(text, "swiftlite deploy --num_speculative_tokens 3") is is_fastest


def test_answers_with_marked_drafts():
    tokens = [{"text": "Yes", "depth": 0}, {"text": ", it", "depth": 1}, {"text": " is", "depth": 2}]
    tokens += [{"text": "\x1b[2J\n", "depth": 0, "refused": "x"}, {"text": "so" * 500, "depth": 1}]
    answers = [{"prompt": "Is it?\x1b[2J\n" + "word " * 100, "channel": "", "tokens": tokens}] * 9
    marked = "\n".join(answer_lines(answers, with_color=False))
    assert marked.count("> Is it? [2J word") == 3
    assert "Yes[, it is] [2J [soso" in marked
    assert "\x1b" not in marked  # a model's answer cannot control the terminal
    assert "Yes\x1b[32m, it is\x1b[0m" in "\n".join(answer_lines(answers, with_color=True))
    assert answer_lines([], with_color=True) == []


def test_one_server_for_every_load_is_preferred():
    bench = BENCH | {"schedule_command": "swiftlite deploy --draft_schedule bench.json"}
    text = "\n".join(final_lines(PROGRESS, "model", bench, {"all": [0.5, 0.25]}))
    assert has_line(text, "swiftlite deploy --draft_schedule bench.json")
    assert not has_line(text, "--num_speculative_tokens")
    assert has_line(text, "--model")


def test_a_busy_machine_is_named():
    """The speed without drafts is that which the ratios refer to, the faster of two measurements."""
    busy = recommendation(1, 0, [0.7, 0.6]) | {"drift": 0.86}
    bench = BENCH | {"recommendations": [busy, recommendation(16, 0, [0.9, 0.8]) | {"drift": -0.05}]}
    text = "\n".join(final_lines(PROGRESS, "round-2", bench, {"all": [0.5, 0.25]}))
    assert has_line(text, "55.8 0.70x 0.60x 0")
    assert has_line(text, "90.0 0.90x 0.80x 0")
    assert has_line(text, "1 1.86x round-2/bench")
    assert "0.95x" not in text


@pytest.mark.parametrize(("num_prompts", "are_few"), [(1, True), (7, False)])
def test_a_measurement_of_few_prompts_is_named(num_prompts, are_few):
    text = "\n".join(final_lines(PROGRESS, "round-2", BENCH | {"prompts": num_prompts}, {"all": [0.5, 0.25]}))
    assert has_line(text, f"{num_prompts} round-2/bench") is are_few
