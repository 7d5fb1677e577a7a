"""Measure what drafts gain in vLLM, by shape of the model, draft tokens, acceptance and concurrent requests.

Weights are random, and vLLM accepts drafts at a given rate (its synthetic acceptance), so that nothing is trained. A
head drafts all tokens of a step, one after the other. The most decisive cases are first, because the stage can be
stopped. On a CPU, where vLLM has no synthetic acceptance, drafts are verified.
"""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, repeat
from operator import mul

from commands import make_rows, swiftlite
from result import Results, Settings
from sparse import make_sparse

from swiftlite.serve.bench.report import BENCH_JSON

# Compiling takes longer than the measurement; graphs decide the time of a step with one request.
ENGINE = {"load_format": "dummy"}
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
BOUND = 0.1
"""Largest difference of the measured number of tokens per step from that of the acceptance."""


@dataclass(frozen=True)
class Case:
    """One start of `bench`.

    Attributes:
        shape: name in `trainees.SHAPES`.
        acceptance: rate at which a draft token is accepted if all tokens before it are.
        drafts: number of draft tokens in a step, at each of which the acceptance is the same.
    """

    shape: str
    acceptance: float
    drafts: int = 1

    @property
    def name(self) -> str:
        name = f"{self.shape}, acceptance {self.acceptance:g}"
        return f"{name}, {self.drafts} draft tokens" if self.drafts > 1 else name

    @property
    def rates(self) -> list[float]:
        """Share of steps in which the first, the first two, ... draft tokens are accepted."""
        return list(accumulate(repeat(self.acceptance, self.drafts), mul))


CASES = (
    Case("8B", 0.7),
    Case("1.7B", 0.7),
    Case("8B", 0.9),
    Case("8B", 0.8, drafts=3),
    Case("1.7B", 0.9),
    Case("1.7B", 0.8, drafts=3),
    Case("8B", 0.5),
)


def run(settings: Settings, results: Results) -> None:
    if find_spec("vllm") is None:
        results.add("vllm", "not installed")
        return
    names = settings.selected(case.name for case in CASES)
    for case in CASES[:1] if settings.tiny else CASES:
        if case.name in names:
            measure(case, settings, results)


def measure(case: Case, settings: Settings, results: Results) -> None:
    """Run `bench` for a case, and add its figures for each number of requests."""
    data = settings.work_dir / "data"
    if not (data / "val.jsonl").exists():
        make_rows(data)
    out = settings.output_dir / f"drafts-{CASES.index(case)}"
    is_cuda = settings.device == "cuda"
    engine, config = ENGINE, {"method": "mtp"}
    if is_cuda:
        engine = ENGINE | GRAPHS
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": case.rates}
    sizes = ["--concurrency", "1,2", "--max_prompts", 2, "--max_new_tokens", 8]
    if not settings.tiny:
        sizes = ["--concurrency", "1,8,32", "--max_prompts", 32, "--max_new_tokens", 128]
    words = ["bench", "--model", make_sparse(settings, case.shape), "--output_dir", out, "--max_model_len", 4096]
    words += ["--val_dataset", data / "val.jsonl", "--num_speculative_tokens", f"0,{case.drafts}"]
    words += ["--rounds", 1, *sizes]
    words += ["--vllm_engine_kwargs", json.dumps(engine), "--vllm_speculative_config", json.dumps(config)]
    try:
        swiftlite(*words, log=settings.output_dir / f"drafts-{CASES.index(case)}.log")
    except RuntimeError as error:
        results.add(case.name, str(error), False, "a figure")
        return
    report(case, json.loads((out / BENCH_JSON).read_text()), results, is_cuda)


def report(case: Case, found: dict, results: Results, is_synthetic: bool) -> None:
    """Add a line for each number of requests, from the content of bench.json."""
    measured = {server["num_speculative_tokens"]: server["measured"] for server in found["servers"]}
    expected = 1 + sum(case.rates)
    for plain, drafting, chosen in zip(measured[0], measured[case.drafts], found["recommendations"], strict=True):
        ratio = chosen["ratios"][str(case.drafts)]
        length, speeds = drafting["mean_accepted_length"], [each["tokens_per_second"] for each in (plain, drafting)]
        value = f"{ratio:.2f}x, {speeds[0]:,.0f} to {speeds[1]:,.0f} tokens/s, {length:.2f} tokens per step"
        passed, demanded = None, ""
        if is_synthetic:
            passed, demanded = abs(length - expected) <= BOUND, f"{expected:.2f} tokens per step"
        results.add(f"{case.name}, {plain['concurrency']} requests", value, passed, demanded)
