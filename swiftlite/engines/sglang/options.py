"""Derive SGLang's speculative options from the checkpoint, and detect errors that SGLang does not report.

SGLang 0.5.23 selects the draft class by the architecture only. For an unknown architecture, it uses the target as the
draft model (`plugin.py` adds architectures). The three numbers (steps, topk, draft tokens) must be set together: SGLang
raises a TypeError if only the steps are set, and an AssertionError if only topk is set.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swiftlite.base.draft_vocab import TOKEN_MAP_FILE
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, Heads
from swiftlite.base.json_file import read_json
from swiftlite.bridge.hf_config import DRAFT_FOLDER, HEADS_FILE
from swiftlite.bridge.rows import HfConfig
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.quantized_heads import check_quantized_heads
from swiftlite.engines.served_model import check_draft_folder, fed_otherwise, log_fed_otherwise, require_heads
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.families import Family, eagle3, gemma4_assistant
from swiftlite.families.dflash import DSPARK
from swiftlite.families.drafters import BLOCKS
from swiftlite.families.layer_types import KINDS
from swiftlite.families.mamba import Mamba2
from swiftlite.families.resolved import HfModel

MAMBA_GROUPS = 8
"""Number of groups of Mamba-2 that SGLang 0.5.23 uses: it reads `mamba_n_groups`, not `n_groups`."""


def trunk_problem(model: HfModel) -> str | None:
    """Return why SGLang would not compute the trunk as trained; None if it would."""
    kinds = model.family.architecture(model.config).attentions
    groups = {kind.groups for kind in kinds if isinstance(kind, Mamba2)}
    if groups <= {MAMBA_GROUPS}:
        return None
    return f"SGLang takes {MAMBA_GROUPS} for n_groups, but config.json has {max(groups - {MAMBA_GROUPS})}"


def check_trunk(model: HfModel) -> None:
    """Check that SGLang computes the trunk as trained, and on this machine.

    Raises:
        UserError: it does not.
    """
    problem = trunk_problem(model)
    if problem is None and is_recurrent(model) and is_on_cpu():
        problem = f"SGLang does not run the recurrent layers of {model.family.name} without a GPU"
    if problem:
        raise UserError(problem, "use --infer_backend transformers or llamacpp")


def is_recurrent(model: HfModel) -> bool:
    """Return whether the trunk has recurrent layers, which SGLang computes on GPUs only."""
    return any(kind.is_recurrent for kind in model.family.architecture(model.config).attentions)


def depth_problem(model: HfModel, num_tokens: int | None = None) -> str | None:
    """Return why SGLang would not draft with the checkpoint's heads; None if it would.

    Args:
        num_tokens: number of draft tokens per step; None means one for each head that SGLang can run.
    """
    if model.heads.kind != MTP:
        return _drafter_problem(model, num_tokens)
    if (model.directory / HEADS_FILE).is_file():
        return f"SGLang does not read heads in {DRAFT_FOLDER}/; train them with --draft_for sglang"
    known = SGLANG.convention_for(model.family)
    depth = model.heads.layers
    if known.drafts_once and (num_tokens or 1) > 1:
        return f"SGLang's {known.draft} drafts one token per step, not {num_tokens}; use 1 draft token"
    if depth > 1 and known.heads == "one":
        return f"SGLang's {known.draft} supports one MTP head, but the checkpoint has {depth}"
    if depth > 1 and known.heads == "last":
        return (
            f"SGLang's {known.draft} overwrites all {depth} MTP heads with the last one, which was trained for token "
            f"{depth}, and drafts every token with it"
        )
    if known.heads == "each" and (num_tokens or model.heads.drafts) > depth:
        steps = num_tokens or model.heads.drafts
        return f"SGLang's {known.draft} runs one of {depth} MTP heads at each of {steps} steps; use {depth} or less"
    if depth > 1 and known.heads == "first" and (num_tokens or 1) > 1:
        steps = f"all {num_tokens} steps"
        return f"SGLang's {known.draft} runs the first of {depth} MTP heads at {steps}; use 1 draft token"
    return None


def why_no_drafts(family: Family, hf_config: HfConfig) -> str:
    """Return why SGLang does not draft with the drafter that config.json declares; empty if it does, and for MTP heads
    (`depth_problem`)."""
    heads, trunks = Heads.from_config(hf_config), family.drafter(hf_config).sglang_trunks
    if heads.kind == MTP:
        return ""
    if not trunks:
        return f"SGLang is not supported for the drafter {heads.kind!r}"
    if family.name not in trunks:
        return f"SGLang is not supported for the drafter {heads.kind!r} of {family.name}, only of {', '.join(trunks)}"
    if heads.kind == gemma4_assistant.KIND and not gemma4_assistant.reads_last_layers(hf_config):
        return f"SGLang drafts with an assistant only if the last two of layer_types are {' and '.join(KINDS)}"
    if heads.kind in BLOCKS and heads.draft_vocab:
        return f"SGLang does not read the draft vocabulary of the drafter {heads.kind!r}; train it with --draft_vocab 0"
    return ""


def _drafter_problem(model: HfModel, num_tokens: int | None) -> str | None:
    """Return why SGLang would not draft with a drafter other than MTP heads; None if it would."""
    kind = model.heads.kind
    if problem := why_no_drafts(model.family, model.config):
        return problem
    if kind in BLOCKS:
        return _block_problem(model, num_tokens)
    own = model.directory / DRAFT_FOLDER / "config.json"
    # SGLang would leave the output layer of older exports random.
    is_old = kind == eagle3.KIND and own.is_file() and "eagle_config" not in read_json(own)
    if is_old or not own.is_file():
        return f"{model.directory}/{DRAFT_FOLDER} is not for SGLang; export the run again: swiftlite export --to_hf"
    return None


def _block_problem(model: HfModel, num_tokens: int | None) -> str | None:
    """Return why SGLang would not draft with a block drafter; None if it would."""
    kind, most = model.heads.kind, model.heads.drafts
    if num_tokens is not None and num_tokens > most:
        return f"the drafter {kind!r} drafts at most {most} tokens per step, not {num_tokens}; use {most} or less"
    if SGLANG.requires_gpu(kind):
        return f"SGLang does not draft with the drafter {kind!r} without a GPU"
    return None


def draft_folder(model: HfModel) -> Path | None:
    """Return the directory from which SGLang reads the drafter; None for MTP heads, which it reads with the trunk."""
    return None if model.heads.kind == MTP else model.directory / DRAFT_FOLDER


def draft_model_options(model: HfModel, num_tokens: int) -> dict[str, Any]:
    """Return SGLang's options for the kind of drafter, its files, and the number of draft tokens per step."""
    kind, folder = model.heads.kind, draft_folder(model)
    options: dict[str, Any] = {"speculative_algorithm": "NEXTN"}
    if folder is not None:
        method = model.family.drafter(model.config).sglang_method or kind
        options = {"speculative_algorithm": method.upper(), "speculative_draft_model_path": str(folder.absolute())}
    if kind == DSPARK:  # otherwise the number must be that of the drafter's config.json
        options["speculative_dspark_block_size"] = num_tokens
    # The last number counts the token that is verified as well.
    numbers = {"num_steps": num_tokens, "eagle_topk": 1, "num_draft_tokens": num_tokens + 1}
    if kind in BLOCKS:  # all tokens in one step
        numbers["num_steps"] = 1
    return options | {f"speculative_{name}": number for name, number in numbers.items()}


def speculative_options(
    model: HfModel, num_tokens: int | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return SGLang's speculative options: the values that the user set, otherwise values that fit the checkpoint.

    Args:
        num_tokens: number of draft tokens per step, in a chain; None means the number in `given`, or the number that
            the heads were trained for.
        given: the options that the user set.

    Raises:
        UserError: the heads are incomplete, or SGLang would not draft with them.
    """
    require_heads(model, SGLANG.drafters)
    check_quantized_heads(model, SGLANG)
    log_fed_otherwise(model, SGLANG)
    given = given or {}
    # The user's number of steps also decides which heads are run, so it is checked like --num_speculative_tokens.
    num_tokens = given.get("speculative_num_steps", num_tokens)
    if problem := depth_problem(model, num_tokens):
        raise UserError(problem, "use --infer_backend vllm")
    if folder := draft_folder(model):
        check_draft_folder(folder)
    if num_tokens is None:
        num_tokens = _trained_tokens(model)
    return {**draft_model_options(model, num_tokens), **_token_map(model), **given}


def _trained_tokens(model: HfModel) -> int:
    """Return the number of draft tokens per step that the heads were trained for and SGLang can run."""
    if model.heads.kind != MTP:
        return model.heads.drafts
    known = SGLANG.convention_for(model.family)
    num_drafting = known.num_drafting(model.heads.layers)
    if num_drafting == model.heads.layers and not known.drafts_once:
        return model.heads.drafts
    return num_drafting


def schedule_options(schedule: DraftSchedule, bench_json: Path) -> tuple[dict[str, Any], dict[Path, str]]:
    """Return SGLang's options for an adaptive number of draft tokens, and the text of a file that SGLang reads, by
    path.

    Each entry of the file has a minimum number of running requests and a list of numbers of draft tokens. SGLang uses
    the last entry whose minimum is reached, and selects from its list by recent acceptance. Here each list has only the
    fastest number. The file is written next to bench.json.
    """
    if schedule.is_constant:
        return {}, {}
    path = bench_json.with_suffix(".sglang.json").absolute()
    slots = {str(begin): {"candidate_steps": [number]} for begin, number in schedule.numbers.items()}
    return {"speculative_adaptive": True, "speculative_adaptive_config": str(path)}, {path: json.dumps(slots)}


def _token_map(model: HfModel) -> dict[str, str]:
    """Return the option with which SGLang runs heads with a draft vocabulary.

    Raises:
        UserError: the file that `export` writes for this option is missing, or belongs to another model.
    """
    if not model.heads.draft_vocab or model.heads.kind != MTP:  # other drafters have an output layer of their own
        return {}
    path = model.directory / TOKEN_MAP_FILE
    if not path.is_file() or tuple(torch.load(path, weights_only=True)) != model.heads.draft_vocab:
        raise UserError(f"{path} does not contain the draft vocabulary in config.json", "export the run again")
    return {"speculative_token_map": str(path.absolute())}


def known_report(model: HfModel) -> LoadReport:
    """Return a load report for a machine without SGLang, from known facts about SGLang's draft classes."""
    draft, num_mtp_heads, num_drafting = model.heads.kind, 0, 0
    if model.heads.kind == MTP:
        draft, num_mtp_heads = None, model.heads.layers
    if num_mtp_heads:
        known = SGLANG.convention_for(model.family)
        draft, num_drafting = known.draft, known.num_drafting(num_mtp_heads)
    return LoadReport(
        engine="sglang 0.5.23 (not installed: its loaders were not run)",
        target=(model.config.get("architectures") or [None])[0],
        draft=draft,
        num_mtp_heads=num_mtp_heads,
        num_drafting=num_drafting,
        verdict="no known problem",
        problems=list(filter(None, [trunk_problem(model), depth_problem(model)])),
        notes=list(filter(None, [fed_otherwise(model, SGLANG)])),
    )


def is_on_cpu() -> bool:
    """Return whether SGLang is installed and computes on the CPU."""
    return SGLANG.is_installed and not torch.accelerator.is_available()


def drawing_problem() -> str | None:
    """Return why the installed SGLang verifies drafts incorrectly at a temperature above 0; None if it verifies
    correctly.
    """
    if not is_on_cpu():
        return None
    return "SGLang on a CPU verifies drafts greedily"


def cpu_variables() -> dict[str, str]:
    """Return the environment variables that let SGLang run without a GPU."""
    if not is_on_cpu():
        return {}
    return {"SGLANG_USE_CPU_ENGINE": "1"}


def cpu_options(family: Family, drafts: bool) -> dict[str, Any]:
    """Return the options that SGLang requires on a CPU.

    Args:
        family: family of the model.
        drafts: whether SGLang drafts.
    """
    if not is_on_cpu():
        return {}
    is_refused = family.serving.sglang is not None and family.serving.sglang.needs_gpu_backend
    # Compiling graphs takes minutes. Without AMX SGLang selects torch's attention, which cannot verify drafts; this
    # backend also runs without AMX.
    backend = None
    if drafts or is_refused:
        backend = "intel_amx"
    return {
        "device": "cpu",
        "disable_cuda_graph": True,
        "max_total_tokens": 32768,  # size of the KV cache, by default most of the memory
        "prefill_attention_backend": backend,
        "decode_attention_backend": backend,
        # Only the name is checked: the two options above have precedence.
        "attention_backend": "triton" if is_refused else None,
    }
