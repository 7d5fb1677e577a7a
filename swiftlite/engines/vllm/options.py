"""vLLM's options of drafting, derived from the checkpoint; what vLLM needs on a CPU, and gets wrong there.

vLLM itself is asked, so it must be installed; it is imported when a function is called.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.served_model import log_fed_otherwise, require_heads
from swiftlite.engines.vllm.info import VLLM
from swiftlite.errors import UserError
from swiftlite.families.attention import LatentAttention
from swiftlite.families.resolved import HfModel
from swiftlite.log import logger


def speculative_config(config: EngineConfig) -> dict[str, Any] | None:
    """vLLM's options of drafting, after making sure that it drafts with what was trained.

    Returns:
        vLLM's `speculative_config`; None without speculation.

    Raises:
        UserError: the heads are not whole, or vLLM would run another head than the one trained for a step.
    """
    from swiftlite.engines.vllm.plugin import DRAFTS

    model, given = config.model, config.speculative_config
    if given is not None and given.get("method") != "mtp":
        if "model" in given and Path(given["model"]).resolve() == model.directory.resolve():
            raise UserError(
                "--vllm_speculative_config names the model as its own draft: every draft accepted and none cheaper",
                'write {"method": "mtp", "num_speculative_tokens": 1} for its heads, or leave the option out',
            )
        return given  # another drafter, which needs nothing of our heads
    num_tokens = config.num_speculative_tokens if given is None else given.get("num_speculative_tokens")
    if num_tokens == 0:
        return None
    require_heads(model)
    log_fed_otherwise(model, VLLM)
    draft = VLLM.convention_for(model.family).draft
    if model.heads.draft_vocab and draft not in DRAFTS.values():
        raise UserError(
            f"the checkpoint's heads have a draft vocabulary, and vLLM's {draft} drafts from all tokens",
            "use --infer_backend transformers or sglang, or train the heads with --draft_vocab 0",
        )
    if given is None and config.draws_drafts:
        given = {"draft_sample_method": "probabilistic"}
    return {"method": "mtp", **(given or {}), "num_speculative_tokens": num_tokens_to_draft(model, num_tokens)}


def num_tokens_to_draft(model: HfModel, num_tokens: int | None) -> int:
    """Tokens per step that this vLLM drafts with heads that were trained for them; unset, all that they were.

    Raises:
        UserError: at one of the steps vLLM would run another head.
    """
    from swiftlite.engines.vllm.plugin import check_draft_steps

    num_drafting = num_drafting_heads(model)
    if num_tokens is None:
        if num_drafting < model.heads.layers:
            logger.warning(
                "vLLM can run only the first of the %d MTP heads here: drafting 1 token per step", model.heads.layers
            )
            return num_drafting
        num_tokens = model.heads.drafts
    try:
        check_draft_steps(num_tokens, model.heads.layers, num_drafting == model.heads.layers)
    except ValueError as error:
        raise UserError(str(error), "or --infer_backend transformers, which runs every head") from None
    return num_tokens


def num_drafting_heads(model: HfModel) -> int:
    """MTP heads that draft in this vLLM; the classes of our plugin run all of them in its newer model runner."""
    from swiftlite.engines.vllm.plugin import has_multi_module_runner

    can_draft = VLLM.convention_for(model.family).num_drafting(model.heads.layers)
    return can_draft if has_multi_module_runner() else min(can_draft, 1)


def schedule_options(schedule: DraftSchedule) -> dict[str, Any]:
    """Return vLLM's options for the number of draft tokens by requests in a step, as [first, last, tokens].

    Beyond the last range vLLM keeps the same number.
    """
    if schedule.is_constant:
        return {}
    begins = list(schedule.numbers)
    ends = [begin - 1 for begin in begins[1:]] + begins[-1:]
    ranges = [list(each) for each in zip(begins, ends, schedule.numbers.values(), strict=True)]
    return {"num_speculative_tokens_per_batch_size": ranges}


def is_on_cpu() -> bool:
    """Whether this vLLM computes on the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def attention_options(model: HfModel, torch_dtype: str) -> dict[str, Any]:
    """vLLM's options without which it computes a kind of attention wrongly, or not at all.

    Raises:
        UserError: this vLLM has no linear attention in that precision, or lacks a package that its classes import.
    """
    if model.family.name.startswith("qwen3_5") and find_spec("torchvision") is None:
        raise UserError(
            f"vLLM's classes of {model.family.name} import torchvision, which is not installed",
            "install torchvision for this torch, or use --infer_backend transformers",
        )
    attentions = model.family.architecture(model.config).attentions
    options: dict[str, Any] = {}
    if is_on_cpu() and any(isinstance(attention, LatentAttention) for attention in attentions):
        # Its rotary kernel there takes the rotary part of a query for a whole tensor: with 0.32 every token behind the
        # first has other logits. Angles of yarn are not computed by that kernel.
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if torch_dtype != "bfloat16":
            # Where the CPU has AMX, 0.32 takes its kernels for granted, which know no other precision.
            options["attention_backend"] = "CPU_MLA"
    if any(attention.is_recurrent for attention in attentions):
        # A state is that of all tokens before: what a prefix has in common with another cannot be taken from it.
        options["enable_prefix_caching"] = False
        if is_on_cpu() and torch_dtype != "bfloat16":
            raise UserError(
                f"--torch_dtype {torch_dtype}: on a CPU vLLM computes linear attention in bfloat16 alone",
                "use --torch_dtype bfloat16, or --infer_backend transformers",
            )
    return options


def with_backend_of_trunk(speculative: dict[str, Any] | None, attention: dict[str, Any]) -> dict[str, Any] | None:
    """Return the draft's options for the trunk's kind of attention, because vLLM selects its backend separately.

    Args:
        attention: result of `attention_options`.
    """
    backend = attention.get("attention_backend")
    if backend is None or speculative is None or speculative["method"] != "mtp":
        return speculative
    return {"attention_backend": backend, **speculative}


def memory_on_cpu() -> dict[str, str]:
    """Environment variables without which vLLM takes half of the machine's memory for its key-value cache."""
    name = "VLLM_CPU_KVCACHE_SPACE"
    return {name: os.environ.get(name, "1")} if is_on_cpu() else {}
