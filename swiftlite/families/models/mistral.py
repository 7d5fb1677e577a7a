"""Mistral: Llama's layers without biases. Mistral 7B v0.1 has sliding-window attention over 4,096 tokens; later models
do not."""

from swiftlite.families import dense
from swiftlite.families.family import Family, HfConfig


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config)
    # The default in transformers is 4096.
    window = hf_config.get("sliding_window", 4096)
    if not problems and window is not None and window < hf_config["max_position_embeddings"]:
        problems.append(f"sliding_window {window} is below max_position_embeddings; it can only be null")
    dense.refuse(hf_config, problems)


MISTRAL = Family(
    name="mistral",
    check=_check,
    layer=dense.layer,
    outside=dense.outside,
    mtp=dense.QWEN3_NEXT_HEADS,
)
