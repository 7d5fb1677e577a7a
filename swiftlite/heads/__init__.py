"""The MTP heads of a model: how many, what they draft, and what they are fed."""

from swiftlite.heads.heads import (
    DEPTH_KEY,
    DRAFT_VOCAB_KEY,
    DRAFTING_KEY,
    KEYS,
    QWEN3_5_DEPTH_KEY,
    UNROLL_KEY,
    Heads,
    depth_key,
)

__all__ = [
    "DEPTH_KEY",
    "DRAFTING_KEY",
    "DRAFT_VOCAB_KEY",
    "KEYS",
    "QWEN3_5_DEPTH_KEY",
    "UNROLL_KEY",
    "Heads",
    "depth_key",
]
