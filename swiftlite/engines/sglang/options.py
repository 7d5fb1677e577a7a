"""Derive SGLang's speculative options from the checkpoint, and detect its silent errors.

Facts of SGLang 0.5.23: the class of the draft comes from a table by architecture, independent of config.json, and an
unknown architecture becomes its own draft (`plugin.py` adds some). The three numbers must be set together: steps alone
is a TypeError, topk alone an AssertionError."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swiftlite.atomic import atomic_write, check_writable
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.served_model import fed_otherwise, log_fed_otherwise, require_heads
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.errors import UserError
from swiftlite.families.resolved import HfModel
from swiftlite.heads.draft_vocab import TOKEN_MAP_FILE


def depth_problem(model: HfModel, num_steps: int | None = None) -> str | None:
    """Return why SGLang would not draft with the checkpoint's heads; None if it would.

    Args:
        num_steps: number of draft tokens per step; None means one per head that SGLang runs.
    """
    known = SGLANG.convention_for(model.family)
    depth = model.heads.layers
    if depth > 1 and known.heads == "one":
        return f"SGLang's {known.draft} refuses a checkpoint with {depth} MTP heads; it takes one"
    if depth > 1 and known.heads == "last":
        return (
            f"SGLang's {known.draft} loads all {depth} MTP heads into one place: the last one would draft every token, "
            f"and it was trained for token {depth}"
        )
    if depth > 1 and (num_steps or 1) > 1:
        return f"SGLang's {known.draft} runs the first of {depth} MTP heads at all {num_steps} steps; use 1"
    return None


def speculative_options(
    model: HfModel, num_tokens: int | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """SGLang's four options of drafting by their names: those given, else what the checkpoint has.

    Args:
        num_tokens: to draft per step, in a chain; None is what the heads were trained for, or what `given` says.
        given: the options of these four that the user gave.

    Raises:
        UserError: the heads are not whole, or SGLang would draft with something else.
    """
    require_heads(model)
    log_fed_otherwise(model, SGLANG)
    given = given or {}
    num_steps = given.get("speculative_num_steps", num_tokens)
    problem = depth_problem(model, num_steps)
    if problem:
        raise UserError(problem, "serve it with --infer_backend vllm")
    if num_steps is None:
        num_drafting = SGLANG.convention_for(model.family).num_drafting(model.heads.layers)
        num_steps = model.heads.drafts if num_drafting == model.heads.layers else num_drafting
    return {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": num_steps + 1,
        **_token_map(model),
        **given,
    }


def schedule_options(schedule: DraftSchedule, bench_json: Path) -> dict[str, Any]:
    """Return SGLang's options for an adaptive number of draft tokens, and write its file next to bench.json.

    SGLang selects among the candidates of the nearest smaller number of requests by the recent acceptance; here each
    number has one candidate, the fastest.

    Raises:
        UserError: the file cannot be written.
    """
    if schedule.is_constant:
        return {}
    path = bench_json.with_suffix(".sglang.json")
    slots = {str(begin): {"candidate_steps": [number]} for begin, number in schedule.numbers.items()}
    check_writable("--draft_schedule", path.parent)
    atomic_write(path, json.dumps(slots).encode() + b"\n")
    return {"speculative_adaptive": True, "speculative_adaptive_config": str(path.absolute())}


def _token_map(model: HfModel) -> dict[str, str]:
    """SGLang's option for heads with a draft vocabulary.

    Raises:
        UserError: the file that `export` writes for it is not there, or is another model's.
    """
    if not model.heads.draft_vocab:
        return {}
    path = model.directory / TOKEN_MAP_FILE
    if not path.is_file() or tuple(torch.load(path, weights_only=True)) != model.heads.draft_vocab:
        raise UserError(f"{path} is not the draft vocabulary that config.json has", "export the run again")
    return {"speculative_token_map": str(path.absolute())}


def known_report(model: HfModel) -> LoadReport:
    """Return the known facts about SGLang's draft classes, for machines without SGLang."""
    known = SGLANG.convention_for(model.family)
    problem = depth_problem(model)
    note = fed_otherwise(model, SGLANG)
    return LoadReport(
        engine="sglang 0.5.23, as known to swiftlite; it is not installed here, so its loader was not run",
        target=(model.config.get("architectures") or [None])[0],
        draft=known.draft if model.heads.layers else None,
        num_mtp_heads=model.heads.layers,
        num_drafting=known.num_drafting(model.heads.layers),
        verdict="nothing known speaks against it",
        problems=[problem] if problem else [],
        notes=[note] if note else [],
    )


def is_on_cpu() -> bool:
    """Whether SGLang is installed here and computes on the CPU."""
    return SGLANG.is_installed and not torch.accelerator.is_available()


def drawing_problem() -> str | None:
    """Return why this SGLang verifies drafts incorrectly at a temperature above 0."""
    return "SGLang on a CPU would verify drafts greedily" if is_on_cpu() else None


def cpu_variables() -> dict[str, str]:
    """Environment variables without which SGLang looks for a GPU."""
    return {"SGLANG_USE_CPU_ENGINE": "1"} if is_on_cpu() else {}


def cpu_options(drafts: bool) -> dict[str, Any]:
    """Options that SGLang needs on a CPU."""
    if not is_on_cpu():
        return {}
    # Graphs are compiled for minutes. Without AMX it would take torch's attention, which cannot verify drafts; this one
    # runs there too.
    backend = "intel_amx" if drafts else None
    return {
        "device": "cpu",
        "disable_cuda_graph": True,
        "max_total_tokens": 32768,  # with keys and values in memory at once; of itself it takes most of the machine's
        "prefill_attention_backend": backend,
        "decode_attention_backend": backend,
    }
