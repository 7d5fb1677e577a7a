"""Qwen3 (dense): norms on queries and keys per head, no biases. `attention_bias` would reach o_proj; refused."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.family import Family

QWEN3 = Family(
    name="qwen3",
    check=partial(dense.check, attention_bias=(False, None)),
    transformer_config=partial(dense.transformer_config, qk_norm=True),
    layer_rows=partial(dense.layer_rows, qk_norm=True),
    outer_rows=dense.outer_rows,
    mtp=dense.QWEN3_NEXT_HEADS,
    is_derived=dense.is_derived,
)
