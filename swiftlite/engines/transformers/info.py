"""`EngineInfo` of transformers."""

from swiftlite.engines.info import EngineInfo
from swiftlite.families.drafters import SERVED

TRANSFORMERS = EngineInfo(
    name="transformers",
    label="transformers",
    package="transformers",
    distributions=("transformers",),
    install="pip install transformers",
    adapter="swiftlite.engines.transformers.engine:TransformersEngine",
    is_required=True,
    server_takes_draft_schedule=False,
    takes_draft_confidence=True,
    joins_ngrams=True,
    drafters=SERVED,
    draws_rollouts=True,
    is_batched=False,
    supports_images=True,
    server="swiftlite.engines.transformers.server:server_command",
    metrics_prefix="transformers:",
    counts_drafts=True,
    measures_requests=True,
)
