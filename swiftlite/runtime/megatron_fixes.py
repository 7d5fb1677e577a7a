"""What megatron-core 0.16.1 gets wrong on any device, mended where neither a subclass nor a spec reaches.

Nothing happens at import; `install()` is called once per process. Paths are relative to megatron/core of the 0.16.1
wheel. tests/runtime/test_megatron_fixes.py fails for each that is taken out.
"""

from megatron.core.transformer.moe import moe_utils


def define_te_general_gemm() -> None:
    """transformer/moe/moe_utils.py:1192 and 1225 ask whether this function is None; without Transformer Engine line 24
    leaves it undefined, so that every router ends in a NameError."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def install() -> None:
    """Mend what is broken in this installation; a second call changes nothing."""
    define_te_general_gemm()
