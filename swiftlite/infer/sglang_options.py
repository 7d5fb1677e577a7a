"""SGLang's options for drafting, derived from the checkpoint, and what it would get wrong without a word.

Facts of SGLang 0.5.23: the draft's class comes from a table by architecture, whatever the config promises, and an
architecture that is not in it becomes its own draft. The three numbers are taken together: steps alone is a TypeError
there, topk alone a bare AssertionError.
"""

from typing import Any

from swiftlite.errors import UserError
from swiftlite.families.conventions import convention
from swiftlite.infer.served_model import ServedModel, require_heads


def depth_problem(model: ServedModel, num_steps: int | None = None) -> str | None:
    """Why SGLang would draft with something else than the checkpoint's heads; None when it would not.

    Args:
        num_steps: tokens to draft per step of the target; None is one per head that SGLang runs.
    """
    known, depth = convention("sglang", model.family.name), model.mtp_depth
    if depth == 0:
        return None
    if known is None:
        return (
            f"SGLang has no class for the MTP heads of {model.family.name}: the target would draft for itself, every "
            "draft accepted and none cheaper"
        )
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
    model: ServedModel,
    algorithm: str | None = None,
    num_steps: int | None = None,
    eagle_topk: int | None = None,
    num_draft_tokens: int | None = None,
) -> dict[str, Any]:
    """SGLang's speculative options by their names: those given, else what the checkpoint has.

    Raises:
        UserError: the heads are not whole, or SGLang would draft with something else.
    """
    require_heads(model)
    if problem := depth_problem(model, num_steps):
        raise UserError(problem, "serve it with --infer_backend vllm")
    known = convention("sglang", model.family.name)
    assert known is not None  # depth_problem says so
    num_run = known.num_heads(model.mtp_depth)
    num_steps = num_steps or (model.num_drafts if num_run == model.mtp_depth else num_run)
    return {
        "speculative_algorithm": algorithm or "NEXTN",
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": eagle_topk or 1,
        "speculative_num_draft_tokens": num_draft_tokens or num_steps + 1,
    }
