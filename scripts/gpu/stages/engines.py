"""Serve trained heads with every installed engine, in float32 and bfloat16, and compare the acceptance.

In float32, an engine's answers must be equal with and without drafts, and its number of accepted drafts must equal that
of the training run. In bfloat16, rounding decides between tokens of equal probability, so only the acceptance rates are
compared. The same holds for llama.cpp in float32, whose heads read another state at the first token of a prompt
(docs/en/upstream.md).
"""

import json
import re
import shutil
from importlib.util import find_spec

from commands import make_served, swiftlite
from result import Results, Settings

from swiftlite.engines.index import ENGINES

# Two standard errors of a rate over the 400 drafts of 32 answers.
BOUND = 0.05


def run(settings: Settings, results: Results) -> None:
    shutil.rmtree(settings.work_dir / "served", ignore_errors=True)  # files of an earlier run
    run_dir, _ = make_served(settings)
    counted = json.loads((run_dir / "acceptance.json").read_text())["after"]["generated"]
    results.add("training run: drafts accepted", shown(counted), counted["accepted"] > 0, "more than 0")
    for name, info in ENGINES.items():
        if find_spec(info.package) is None:
            results.add(name, "not installed")
        elif name == "sglang" and settings.device == "cpu":
            results.add(name, "its kernels require a GPU")
        else:
            dtypes = ["float32"]
            if settings.device == "cuda":
                dtypes.append("bfloat16")
            for dtype in dtypes:
                serve(settings, results, name, dtype, counted)


def serve(settings: Settings, results: Results, engine: str, dtype: str, counted: dict) -> None:
    """Generate answers to the held-out questions with one engine, with and without drafts; add the results."""
    name, out, work = f"{engine} {dtype}", settings.output_dir, settings.work_dir
    acceptance = out / f"acceptance_{engine}_{dtype}.json"
    shutil.copy(work / "served_run" / "acceptance.json", acceptance)
    answers = out / f"answers_{engine}_{dtype}.jsonl"
    answers.unlink(missing_ok=True)
    words = ["infer", "--model", work / "served", "--infer_backend", engine, "--torch_dtype", dtype, "--compare"]
    words += ["--val_dataset", work / "data" / "val.jsonl", "--max_new_tokens", 48, "--speculative", "mtp"]
    try:
        said = swiftlite(*words, "--result_path", answers, "--acceptance_json", acceptance, log=out / f"{name}.log")
    except RuntimeError as error:
        results.add(name, str(error), False, "exit code 0")
        return
    found = json.loads(acceptance.read_text())["engines"][engine]
    if dtype == "float32" and engine != "llamacpp":
        counts = ("drafted", "accepted")
        is_same = all(found[count] == counted[count] for count in counts)
        results.add(f"{name}: drafts accepted", shown(found), is_same, "as in the training run")
    else:
        difference = abs(found["acceptance_rate"] - counted["acceptance_rate"])
        results.add(
            f"{name}: drafts accepted", shown(found), difference <= BOUND, f"rate of the training run within {BOUND}"
        )
    if dtype == "float32":
        same, total = answers_equal(said)
        results.add(f"{name}: answers equal to those without drafts", f"{same} of {total}", same == total, "all")
    results.add(f"{name}: speedup", speed_up(said))


def shown(counts: dict) -> str:
    return f"{counts['accepted']} of {counts['drafted']} ({counts['acceptance_rate']:.1%})"


def answers_equal(said: str) -> tuple[int, int]:
    found = re.search(r"answers equal: (\d+) of (\d+)", said)
    if found is None:
        return 0, 1
    return int(found[1]), int(found[2])


def speed_up(said: str) -> str:
    """Return the speed-up that `infer --compare` has printed."""
    found = re.search(r"speculation is ([\d.]+x)", said)
    if found is None:
        return "not in the output"
    return found[1]
