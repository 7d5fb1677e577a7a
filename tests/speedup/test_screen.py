"""Test the last lines of the output with given results."""

from swiftlite.speedup.screen import final_lines
from swiftlite.speedup.state import Progress
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


BENCH = {
    "servers": [{"measured": [{"tokens_per_second": 30.0}, {"tokens_per_second": 90.0}]}],
    "recommendations": [recommendation(1, 2, [1.2, 1.4]), recommendation(16, 0, [0.9, 0.8])],
    "schedule_command": None,
}
ACCEPTANCE = {"model": [0.5, 0.3], "round-1": [0.3, 0.1], "round-2": [0.42, 0.2]}
PROGRESS = Progress({}, [128, 500], {"round-1/answers": 60, "round-1/training": 90}, acceptance=ACCEPTANCE)


def test_everything_is_said():
    channels = {name: [0.5, 0.25] for name in ("all", "code", "self_prompts")}
    lines = final_lines(PROGRESS, "round-2", BENCH, channels)
    text = "\n".join(lines)
    assert "16" in lines[0]  # where drafts do not pay off comes first
    assert has_line(text, "30.6 1.20x 1.40x 2")
    assert has_line(text, "91.8 0.90x 0.80x 0")
    assert has_line(text, "round-1 30.0% 10.0%")
    assert has_line(text, "round-2 42.0% 20.0%")
    assert has_line(text, "code 50.0% 25.0%")
    assert has_line(text, "swiftlite deploy --num_speculative_tokens 2")
    assert has_line(text, "2 minutes --budget")


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
