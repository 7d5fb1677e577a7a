"""Describe the MTP heads of a model: their number, their draft vocabulary, and their inputs."""

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
