"""Test packing as a command: streaming with several layouts and resuming."""

import json
import re
from pathlib import Path

import pytest

from swiftlite.runtime.decisions import DECISION
from tests.e2e.conftest import read_metrics
from tests.messages import has_line, mentions

pytestmark = pytest.mark.gloo

STREAMED = ["--packing", "--max_length", 64, "--packing_length", 96, "--streaming", "--streaming_buffer_size", 8]


BALANCED = ["--sequence_packing_scheduler", "dp_balanced"]
PP2 = ["--pipeline_model_parallel_size", 2]


def stream_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "trainer_state.json").read_text())["stream"]


@pytest.mark.parametrize(
    ("packing", "layouts"),
    [
        ([], {"dp2": ([], 2), "pp2": (PP2, 2)}),
        (BALANCED, {"dp2": ([], 2), "dp2 pp2": (PP2, 4)}),
    ],
    ids=["rows", "dp_balanced"],
)
@pytest.mark.slow
def test_a_streamed_run_is_the_same_at_other_layouts_and_goes_on_bit_for_bit(commands, sft, tmp_path, packing, layouts):
    """The 40 rows of the dataset fill about 13 packed rows.

    The 12 steps use 4 packed rows each, so the file is read more than once.
    """
    options = [*sft, *STREAMED, *packing, "--split_dataset_ratio", 0, "--micro_batch_size", 1]
    options += ["--lr_decay_style", "constant"]
    commands.ok(*options, "--output_dir", tmp_path / "alone")
    for name, (layout, processes) in layouts.items():
        commands.ok(*options, *layout, "--output_dir", tmp_path / name, processes=processes)
        for one, two in zip(read_metrics(tmp_path / "alone"), read_metrics(tmp_path / name), strict=True):
            # Sums over ranks have another order; twelve steps carry their rounding on.
            assert two == pytest.approx(one, rel=1e-4)
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        # One reader or two: they stand at the same sample.
        states = [stream_state(tmp_path / run / "checkpoint-12") for run in ("alone", name)]
        assert states[0] == states[1]

    whole, (layout, processes) = list(layouts.items())[-1]
    stopped = tmp_path / "stopped"
    here = [*options, *layout, "--output_dir", stopped]
    commands.ok(*here, "--train_iters", 8, processes=processes)
    assert stream_state(stopped / "checkpoint-8")["num_read"] >= 8 * 4 - 1  # the row of the last sample is not over
    # The warm-up is a part of the steps: 12 of them from here on.
    resumed = commands.ok(*here, "--resume", processes=processes)
    assert has_line(resumed.stderr, "checkpoint-8")
    assert read_metrics(stopped)[8:] == read_metrics(tmp_path / whole)[8:]


def test_the_options_that_a_bad_row_names_continue_a_streamed_run(commands, sft, tmp_path):
    """The run ends as one over the file without the bad row."""
    rows = [json.dumps({"query": f"What is {i}?", "response": "It is so. " * (i % 4 + 1)}) for i in range(120)]
    files = {"good": rows, "bad": [*rows[:60], "{", *rows[60:]]}
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def command(name: str, *options: object) -> list[object]:
        words = [f"{name}.jsonl" if word.endswith("rows.jsonl") else word for word in sft]
        return [*words, *STREAMED, "--split_dataset_ratio", 0, "--output_dir", tmp_path / name, *options]

    commands.ok(*command("good"), processes=2)
    stopped = commands.run(*command("bad"), processes=2)
    assert stopped.returncode == 1
    assert has_line(stopped.stderr, "bad.jsonl:61 JSON")
    (options,) = set(re.findall(r"--resume --max_bad_rows \d+", stopped.stderr))
    assert (tmp_path / "bad/checkpoint-4").exists()
    commands.ok(*command("bad", *options.split()), processes=2)
    (decision,) = (line for line in read_metrics(tmp_path / "bad") if DECISION in line)
    assert mentions(decision[DECISION], "bad.jsonl:61 JSON")
    steps = [line for line in read_metrics(tmp_path / "bad") if line != decision]
    assert steps == read_metrics(tmp_path / "good")
