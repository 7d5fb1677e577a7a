"""Qwen2 and Qwen2.5: biases on q, k, v always, whatever the config says, as in transformers."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.family import Family

QWEN2 = Family(
    name="qwen2",
    check=dense.check,
    transformer_config=partial(dense.transformer_config, qkv_bias=True),
    layer_rows=partial(dense.layer_rows, qkv_bias=True),
    outer_rows=dense.outer_rows,
    mtp=dense.QWEN3_NEXT_HEADS,
    is_derived=dense.is_derived,
)
