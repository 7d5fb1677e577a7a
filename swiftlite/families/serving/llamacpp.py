"""Conventions of llama.cpp b11549.

Its graphs for MTP heads read the trunk's state after its norm and their own state after the output norm, in all
architectures. This differs from vLLM's inputs for some families (`sft --draft_for llamacpp`).
"""

from itertools import chain

from swiftlite.base.heads import MTP, Heads
from swiftlite.bridge.rows import HfConfig
from swiftlite.families import FAMILIES, Family, eagle3
from swiftlite.families.drafters import DRAFTERS
from swiftlite.families.serving.convention import Convention

ARCHITECTURES = {name: family.serving.llamacpp for name, family in FAMILIES.items() if family.serving.llamacpp}
"""HF model_type -> the architecture of llama.cpp that runs the trunk and the heads of the family
(`gguf/architectures.py`)."""
TRUNKS = dict(chain.from_iterable(drafter.llamacpp_trunks.items() for drafter in DRAFTERS.values()))
"""HF model_type -> the architecture of llama.cpp that runs the trunk of a drafter other than MTP heads."""
FAMILIES_RUN = {**TRUNKS, **ARCHITECTURES}
"""HF model_type -> the architecture of llama.cpp that runs a model without a drafter, or with MTP heads."""

KINDS = (MTP, *(kind for kind, drafter in DRAFTERS.items() if drafter.llamacpp_trunks))
"""Kinds of drafters with which llama.cpp drafts."""


def why_no_drafter(family: Family, hf_config: HfConfig) -> str:
    """Return why llama.cpp does not run the drafter that config.json declares, if it is not MTP heads; empty if it
    does."""
    heads = Heads.from_config(hf_config)
    if heads.kind not in KINDS:
        return f"llama.cpp does not support the drafter {heads.kind!r}"
    trunks = family.drafter(hf_config).llamacpp_trunks
    if family.name not in trunks:
        return f"llama.cpp does not draft for {family.name} with {heads.kind!r}, only for {', '.join(trunks)}"
    if heads.kind == eagle3.KIND and any(eagle3.is_set(hf_config, flag) for flag in eagle3.FLAGS):
        return "llama.cpp does not support EAGLE-3.1, only --drafter eagle3"
    if heads.kind == eagle3.KIND and len(heads.features) != 3:
        return "llama.cpp requires an EAGLE-3 drafter with three features"
    return ""


def convention(family: Family) -> Convention | None:
    """Return the convention with which llama.cpp runs the heads of a family; None if it cannot run them."""
    if not family.serving.llamacpp:
        return None
    return Convention(family.serving.llamacpp, "one")
