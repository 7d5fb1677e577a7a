"""`EngineInfo` of llama.cpp."""

from swiftlite.args.serving_fields import LlamacppArgs
from swiftlite.engines.info import EngineInfo
from swiftlite.families.serving.llamacpp import KINDS

LLAMACPP = EngineInfo(
    name="llamacpp",
    label="llama.cpp",
    package="xllamacpp",
    locate="swiftlite.engines.llamacpp.program:program",
    distributions=("xllamacpp",),
    install=(
        "put llama-server on PATH (brew install llama.cpp, or a release of github.com/ggml-org/llama.cpp), set "
        "LLAMA_SERVER=FILE, or pip install -r requirements/llamacpp.txt"
    ),
    adapter="swiftlite.engines.llamacpp.engine:LlamacppEngine",
    measured="b11549",
    server_takes_draft_schedule=False,
    sampling_options=("top_p", "top_k", "min_p", "repetition_penalty"),
    drafters=KINDS,
    joins_ngrams=True,
    drafts_without_heads=True,
    without_draft_vocab=KINDS,
    options_class=LlamacppArgs,
    server="swiftlite.engines.llamacpp.server:server_command",
    client="swiftlite.engines.llamacpp.client:LlamacppClient",
    metrics_prefix="llamacpp:",
    counts_drafts=True,
    dry_load="swiftlite.engines.llamacpp.dry_load:dry_load",
    file_report="swiftlite.engines.llamacpp.dry_load:report_of",
    command_needs_no_install=True,
    families="swiftlite.families.serving.llamacpp:FAMILIES_RUN",
    drafting_problem="swiftlite.gguf.drafters:why_no_drafts",
)
