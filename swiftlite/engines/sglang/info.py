"""SGLang's record."""

from typing import Any

from swiftlite.args.fields import SglangArgs
from swiftlite.engines.info import EngineInfo, EngineOptions, Plugin
from swiftlite.engines.sglang.rules import RULES


def speculative_config(args: SglangArgs) -> dict[str, Any] | None:
    """SGLang's options of drafting that were given, by SGLang's names; None when none were."""
    drafting = {
        "speculative_algorithm": args.sglang_speculative_algorithm,
        "speculative_num_steps": args.sglang_speculative_num_steps,
        "speculative_eagle_topk": args.sglang_speculative_eagle_topk,
        "speculative_num_draft_tokens": args.sglang_speculative_num_draft_tokens,
    }
    return {name: value for name, value in drafting.items() if value is not None} or None


SGLANG = EngineInfo(
    name="sglang",
    label="SGLang",
    package="sglang",
    distributions=("sglang",),
    install="pip install sglang, which comes for CUDA",
    adapter="swiftlite.engines.sglang.engine:SglangEngine",
    convention="swiftlite.engines.sglang.conventions:convention",
    options=EngineOptions(
        SglangArgs,
        engine_kwargs=lambda args: args.sglang_engine_kwargs,
        speculative_config=speculative_config,
        rules=RULES,
    ),
    server="swiftlite.engines.sglang.server:server_command",
    client="swiftlite.engines.sglang.client:SglangClient",
    dry_load="swiftlite.engines.sglang.dry_load:dry_load",
    known_report="swiftlite.engines.sglang.options:known_report",
    prints_anywhere=True,
    plugin=Plugin("swiftlite.engines.sglang.plugin:register", "sglang.srt.plugins", "SGLANG_PLUGINS"),
)
