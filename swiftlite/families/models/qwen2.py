"""Qwen2 and Qwen2.5: q, k and v always have biases, independent of config.json, as in transformers."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.family import Family

QWEN2 = Family(
    name="qwen2",
    check=dense.check,
    layer=partial(dense.layer, qkv_bias=True),
    outside=dense.outside,
    mtp=dense.QWEN3_NEXT_HEADS,
)
