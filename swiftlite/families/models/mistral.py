"""Mistral: Llama's layers without biases; 7B v0.1 lets a token see 4,096 others alone, later ones see all."""

from swiftlite.families import dense
from swiftlite.families.family import Family, HfConfig


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config)
    # transformers takes 4096 where config.json is silent.
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
