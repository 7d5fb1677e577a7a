"""Write the directory of a run as sft would."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.report import MeasuredPrompts, add_engine_acceptance, add_run_acceptance, add_run_answers
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import write_config

HOSTILE = "<script>alert(1)</script></style><img src=x onerror=alert(1)>{{ 7*7 }}\"'&"
COUNTS = DraftCounts(drafts=10, drafted=30, accepted_per_position=(8, 4, 1))
NOTHING = DraftCounts(drafts=20, drafted=60, accepted_per_position=(0, 0, 0))


def tokens(*described: tuple[str, int] | tuple[str, int, str]) -> list[dict[str, Any]]:
    """Return tokens in the format of drafts.json: text, depth, and a rejected draft."""
    names = ("text", "depth", "refused")
    return [dict(zip(names, token, strict=False)) for token in described]


def write_metrics(run: Path, steps: int) -> None:
    lines = []
    for step in range(1, steps + 1):
        heads = {f"mtp_{depth}_loss": 5.0 / step for depth in (1, 2, 3)}
        heads |= {f"mtp_{depth}_acceptance": 1 - 1 / (step + depth) for depth in (1, 2, 3)}
        line = {"step": step, "loss": 4.0 / step, **heads, "grad_norm": 1.0, "learning_rate": 1e-3 / step}
        line |= {
            "time/step": 2.0,
            "time/data": 0.25,
            "time/forward": 0.5,
            "time/backward": 1.0,
            "time/optimizer": 0.125,
        }
        if step == 3:
            line["time/checkpoint"] = 4.0
        lines.append(line | {"tokens_per_second": 1000.0 + step, "peak_memory_gb": 1.5})
        if step % 2 == 0:
            evaluation = {f"eval_{name}": value for name, value in heads.items()}
            lines.append({"step": step, "eval_loss": 4.5 / step, **evaluation})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    run: Path, *, text: str = "What is it?", steps: int = 6, images: Sequence[Any] = (), **options: Any
) -> Path:
    """Write a finished run with three heads, whose prompts, tokens, channels and options contain `text`.

    Args:
        images: images of each prompt in drafts.json.
    """
    run.mkdir(parents=True)
    write_config(
        SftArgs(model="a model", output_dir=str(run), mtp_num_layers=3, system=text, **options), run / "args.json"
    )
    write_metrics(run, steps)
    path = run / "acceptance.json"
    nothing = MeasuredPrompts(2, NOTHING)
    measured = MeasuredPrompts(2, COUNTS)
    add_run_acceptance(path, "before", [0.5, 0.4, 0.3], nothing, {text: nothing, "tale": nothing})
    add_run_acceptance(path, "after", [0.5, 0.4, 0.3], measured, {text: measured, "tale": measured})
    add_engine_acceptance(path, "vllm", 2, COUNTS)
    written = tokens(("It", 0), (" is", 1), (text, 2), (" so", 3), ("!", 0, text), ("\n", 0, " "), (" end", 1))
    answer: dict[str, Any] = {"prompt": text, "channel": text, "tokens": written}
    if images:
        answer["images"] = list(images)
    add_run_answers(path, "before", [answer])
    add_run_answers(path, "after", [answer, answer | {"tokens": tokens(("No", 0, "Yes"))}])
    counts_of_file = {"rows": 7, "kept": 5, "dropped_bad": 2, "tokens": 99}
    report = {
        "steps": steps,
        "seconds": 75.3,
        "times": {"data": 1.5, "forward": 3.0, "backward": 6.0, "optimizer": 0.75, "other": 0.75, "checkpoint": 8.0},
        "evaluation": {},
        "layout": {"processes": "1"},
        "versions": {"torch": "2"},
        "machine": {"cpus": 2, "gpus": [], "load_average": 0.5},
        "data": {
            "total": counts_of_file,
            "files": {text: counts_of_file},
            "train_samples": 4,
            "val_samples": 1,
            "bad_rows": [f"rows.jsonl:3: {text}"],
            "notes": [text],
        },
        "weights": {"loaded": 35, "initialized": {"a": "random", "b": "random"}, "dropped": []},
        "tensors": {"trained_tensors": 3, "frozen_but_changed": []},
    }
    (run / "run_report.json").write_text(json.dumps(report))
    return run
