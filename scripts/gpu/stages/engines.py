"""The promise: heads that were trained here are counted in every engine that is installed, in float32 and bfloat16.

In float32 an engine's answers are the same with drafts and without, and its own counter accepts what the training run
had said. In bfloat16 a draw between two tokens may fall otherwise, so there shares are compared.
"""

import json
import re
import shutil
from importlib.util import find_spec

from commands import make_served, swiftlite
from result import Results, Settings

from swiftlite.engines.index import ENGINES

# Two standard errors of a share, counted over the 400 drafts that 32 answers have.
BOUND = 0.05


def run(settings: Settings, results: Results) -> None:
    shutil.rmtree(settings.work_dir / "served", ignore_errors=True)  # of a run before this one
    run_dir, _ = make_served(settings)
    counted = json.loads((run_dir / "acceptance.json").read_text())["after"]["generated"]
    results.add("the run: drafts accepted", shown(counted), counted["accepted"] > 0, "some")
    for name, info in ENGINES.items():
        if find_spec(info.package) is None:
            results.add(name, "not installed")
        elif name == "sglang" and settings.device == "cpu":
            results.add(name, "its kernels need a GPU")
        else:
            for dtype in ("float32", "bfloat16") if settings.device == "cuda" else ("float32",):
                serve(settings, results, name, dtype, counted)


def serve(settings: Settings, results: Results, engine: str, dtype: str, counted: dict) -> None:
    """One engine over the held-out questions, with drafts and without."""
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
        results.add(name, str(error), False, "ends well")
        return
    found = json.loads(acceptance.read_text())["engines"][engine]
    if dtype == "float32":
        counts = ("drafted", "accepted")
        is_same = all(found[count] == counted[count] for count in counts)
        results.add(f"{name}: drafts accepted", shown(found), is_same, "what the run said")
        same, total = answers_equal(said)
        results.add(f"{name}: answers equal to those without drafts", f"{same} of {total}", same == total, "all")
    else:
        difference = abs(found["acceptance_rate"] - counted["acceptance_rate"])
        results.add(f"{name}: drafts accepted", shown(found), difference <= BOUND, f"the run's share to {BOUND}")
    results.add(f"{name}: speed over none", speed_up(said))


def shown(counts: dict) -> str:
    return f"{counts['accepted']} of {counts['drafted']} ({counts['acceptance_rate']:.1%})"


def answers_equal(said: str) -> tuple[int, int]:
    found = re.search(r"answers equal: (\d+) of (\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 1)


def speed_up(said: str) -> str:
    """The line of `infer --compare` on speed."""
    found = re.search(r"speculation is ([\d.]+x)", said)
    return found[1] if found else "not said"
