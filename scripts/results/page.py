"""Write docs/en/results.md and docs/zh/results.md from the results of `measure.sh`.

    python scripts/results/page.py out/results

The text is in page.en.md and page.zh.md in this folder; the figures come from the files of the runs.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from swiftlite.base.atomic import atomic_write

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
HEADS = ("own", "unrolled", "gold", "joint")
DOMAIN = "training domain"
TOKENS_PER_STEP = 2048
"""Number of tokens per step: two rows of 1,024 tokens, as set in measure.sh."""


class Acceptance(NamedTuple):
    """The acceptance that vLLM counted for a group of prompts.

    Attributes:
        positions: shares of steps in which the first, the second and the third draft token was accepted.
        length: mean number of tokens per step, including the token that the trunk generates.
    """

    positions: list[str]
    length: str


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def by_category(evaluation: Path) -> dict[str, Acceptance]:
    """Return the acceptance of each channel, in the order of the file. The first is "all"."""
    counted = read(evaluation)["model"]["vllm"]
    found = {}
    for channel, figures in counted.items():
        shares = [f"{share:.0%}" for share in figures["acceptance_per_position"]]
        found[channel] = Acceptance(shares, f"{figures['mean_accepted_length']:.2f}")
    return found


def by_tokens(run: Path) -> dict[int, str]:
    """Return the share of held-out tokens on which head and trunk agree, by the number of tokens trained so far."""
    before = read(run / "acceptance.json")["before"]["teacher_forced"]["acceptance_per_depth"][0]
    shares = {0: f"{before:.1%}"}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "eval_mtp_1_acceptance" in record:
            shares[record["step"] * TOKENS_PER_STEP] = f"{record['eval_mtp_1_acceptance']:.1%}"
    return shares


def speeds(bench: Path) -> dict[int, dict[int, float]]:
    """Return the median of tokens/s, by number of concurrent requests and by number of draft tokens.

    Without drafts, two servers were measured; the result is that of the faster server.
    """
    found: dict[int, dict[int, float]] = {}
    for server in read(bench)["servers"]:
        for result in server["measured"]:
            row = found.setdefault(result["concurrency"], {})
            drafted = server["num_speculative_tokens"]
            row[drafted] = max(result["tokens_per_second"], row.get(drafted, 0.0))
    return found


def figures(out: Path) -> dict[str, Any]:
    """Return the values that the templates use, by name."""
    evaluations = {name: by_category(out / f"{name}-evaluation" / "evaluation.json") for name in HEADS}
    curves = {name: by_tokens(out / name) for name in HEADS}
    bench = read(out / "bench" / "bench.json")
    return {
        "heads": HEADS,
        "domain": DOMAIN,
        "evaluations": evaluations,
        "curves": curves,
        "tokens": sorted(curves["own"]),
        "speeds": speeds(out / "bench" / "bench.json"),
        "steps": read(out / "own" / "run_report.json")["steps"],
        "answers": len((out / "own.jsonl").read_text().splitlines()),
        "versions": read(out / "own" / "run_report.json")["versions"],
        "cpus": bench["machine"]["cpus"],
        "vllm": next(version for name, version in bench["versions"].items() if name.startswith("vllm")),
    }


def render(out: Path, language: str) -> str:
    """Return the page in a language, `en` or `zh`."""
    templates = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True)
    return templates.get_template(f"page.{language}.md").render(figures(out)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output directory of measure.sh")
    args = parser.parse_args()
    for language in ("en", "zh"):
        atomic_write(DOCS / language / "results.md", render(args.out, language).encode())


if __name__ == "__main__":
    main()
