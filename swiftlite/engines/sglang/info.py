"""`EngineInfo` of SGLang, and rules of its options."""

from collections.abc import Iterator
from typing import Any

from swiftlite.args.config import Problem
from swiftlite.args.serving_fields import SglangArgs
from swiftlite.base.heads import MTP
from swiftlite.engines.info import EngineInfo, Plugin
from swiftlite.families import dflash, eagle3, gemma4_assistant

NUMBERS = ("sglang_speculative_num_steps", "sglang_speculative_eagle_topk", "sglang_speculative_num_draft_tokens")


def numbers_go_together(args: Any) -> Iterator[Problem]:
    numbers = {name: vars(args)[name] for name in NUMBERS if vars(args)[name] is not None}
    missing = [f"--{name}" for name in NUMBERS if name not in numbers]
    if numbers and missing:
        words = " ".join(f"--{name} {value}" for name, value in numbers.items())
        yield f"{words} requires {' and '.join(missing)}", "set all three, or none"
    if numbers and args.num_speculative_tokens is not None:
        flags = f"--num_speculative_tokens {args.num_speculative_tokens} and --{next(iter(numbers))}"
        yield f"{flags} both set the number of draft tokens", "remove --num_speculative_tokens"


def numbers_agree(args: Any) -> Iterator[Problem]:
    steps = args.sglang_speculative_num_steps
    topk = args.sglang_speculative_eagle_topk
    tokens = args.sglang_speculative_num_draft_tokens
    if steps is None or topk is None or tokens is None:
        return
    if topk == 1 and tokens != steps + 1:
        yield (
            f"--sglang_speculative_num_draft_tokens {tokens} must be {steps + 1} for {steps} steps with topk 1: the "
            "chain of drafts and one verified token",
            f"use --sglang_speculative_num_draft_tokens {steps + 1}",
        )
    drafted = topk + (steps - 1) * topk**2  # topk tokens in the first step, then topk per branch
    if topk > 1 and tokens > 1 + drafted:
        yield (
            f"--sglang_speculative_num_draft_tokens {tokens} must be at most {1 + drafted}: {steps} steps with topk "
            f"{topk} draft {drafted} tokens, and one more is verified",
            f"use --sglang_speculative_num_draft_tokens {1 + drafted} or less",
        )


SGLANG = EngineInfo(
    name="sglang",
    label="SGLang",
    package="sglang",
    distributions=("sglang",),
    install="pip install sglang (requires CUDA)",
    adapter="swiftlite.engines.sglang.engine:SglangEngine",
    measured="0.5.23",
    drafters=(MTP, eagle3.KIND, *dflash.KINDS, gemma4_assistant.KIND),
    without_draft_vocab=dflash.KINDS,
    gpu_drafters=dflash.KINDS,  # arg_groups/speculative_hook.py of 0.5.23
    memory_option="mem_fraction_static",
    draws_rollouts=True,
    # Its repetition_penalty does not count the tokens of the prompt (sampling/penaltylib/repetition_penalty.py).
    sampling_options=("top_p", "top_k", "min_p"),
    sampling_options_without_drafts=("min_p",),  # it verifies drafts without it (speculative/eagle_utils.py)
    filters_log_p=False,
    options_class=SglangArgs,
    rules=(numbers_go_together, numbers_agree),
    server="swiftlite.engines.sglang.server:server_command",
    client="swiftlite.engines.sglang.client:SglangClient",
    metrics_prefix="sglang:",
    dry_load="swiftlite.engines.sglang.dry_load:dry_load",
    known_report="swiftlite.engines.sglang.options:known_report",
    command_needs_no_install=True,
    drafting_problem="swiftlite.engines.sglang.options:why_no_drafts",
    drawing_problem="swiftlite.engines.sglang.options:drawing_problem",
    plugin=Plugin("swiftlite.engines.sglang.plugin:register", "sglang.srt.plugins", "SGLANG_PLUGINS"),
)
