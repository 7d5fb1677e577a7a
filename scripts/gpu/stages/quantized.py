"""Quantize a model with a trained head, serve it with vLLM, and compare acceptance with that of the decoded weights.

The engine transformers computes with the numbers that the codes stand for, and is the reference. vLLM may also round
activations, so only acceptance rates are compared. If vLLM built a module of the head otherwise than the files have it,
no draft would be accepted.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from commands import make_served, swiftlite
from result import Results, Settings

from stages.engines import BOUND, shown

FORMATS = {
    "fp8": ["--quant_method", "fp8"],
    "fp8-block": ["--quant_method", "fp8", "--quant_block", 128],
    "int8": ["--quant_method", "rtn", "--quant_bits", 8],
    "int4": ["--quant_method", "rtn", "--quant_bits", 4, "--group_size", 128],
    "nvfp4": ["--quant_method", "nvfp4"],
}
"""Options of `export` by format."""
ON_CPU = ("int8",)
"""Formats for a machine without a GPU, to check that the stage runs."""
AT_ONCE = {"cuda": 5, "cpu": 1}
"""Number of cases that run at the same time, by device. Most of their time, processes start and compile kernels."""
SHARED_GPU = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
"""Options of vLLM with which several engines fit on one GPU. With the second option vLLM does not measure free memory,
which the other engines change."""


def run(settings: Settings, results: Results) -> None:
    if find_spec("vllm") is None:
        results.add("vllm", "not installed")
        return
    _, model = make_served(settings)
    names = settings.selected(FORMATS)
    if settings.device == "cpu":
        names = [name for name in names if name in ON_CPU]
    with ThreadPoolExecutor(AT_ONCE[settings.device]) as threads:
        cases = product(names, ("keep", "block"))
        list(threads.map(lambda case: compare(settings, results, model, *case), cases))  # raises their errors


def compare(settings: Settings, results: Results, model: Path, name: str, heads: str) -> None:
    """Quantize the model with one format, and add the acceptance of both engines.

    Args:
        heads: value of --quant_heads.
    """
    label = f"{name}, --quant_heads {heads}"
    directory = settings.work_dir / f"quantized_{name}_{heads}"
    shutil.rmtree(directory, ignore_errors=True)  # files of an earlier run
    words = ["export", "--model", model, "--output_dir", directory, "--quant_heads", heads, *FORMATS[name]]
    try:
        swiftlite(*words, log=settings.output_dir / f"export_{name}_{heads}.log")
        expected = accepted(settings, directory, "transformers")
        found = accepted(settings, directory, "vllm")
    except RuntimeError as error:
        results.add(label, str(error), False, "exit code 0")
        return
    difference = abs(found["acceptance_rate"] - expected["acceptance_rate"])
    demanded = f"rate of {shown(expected)} within {BOUND}"
    results.add(f"{label}: drafts accepted", shown(found), difference <= BOUND, demanded)


def accepted(settings: Settings, model: Path, engine: str) -> dict:
    """Return the draft counts of an engine for the held-out questions."""
    acceptance = settings.output_dir / f"acceptance_{model.name}_{engine}.json"
    shutil.copy(settings.work_dir / "served_run" / "acceptance.json", acceptance)
    words = ["infer", "--model", model, "--infer_backend", engine, "--torch_dtype", "bfloat16", "--speculative", "mtp"]
    words += ["--val_dataset", settings.work_dir / "data" / "val.jsonl", "--max_new_tokens", 48]
    if settings.device == "cuda" and engine == "vllm":
        words += ["--vllm_engine_kwargs", json.dumps(SHARED_GPU)]
    log = settings.output_dir / f"infer_{model.name}_{engine}.log"
    swiftlite(*words, "--acceptance_json", acceptance, log=log)
    return json.loads(acceptance.read_text())["engines"][engine]
