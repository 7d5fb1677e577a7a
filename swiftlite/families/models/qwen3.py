"""Qwen3 (dense): norms on queries and keys per head, and no biases. `attention_bias` is not supported."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.family import Family

QWEN3 = Family(
    name="qwen3",
    check=partial(dense.check, attention_bias=(False, None)),
    layer=partial(dense.layer, qk_norm=True),
    outside=dense.outside,
    mtp=dense.QWEN3_NEXT_HEADS,
)
