"""What megatron-core 0.16.1 gets wrong on any device, mended where neither a subclass nor a spec reaches.

Nothing happens at import; `install()` is called once per process. Paths are relative to megatron/core of the 0.16.1
wheel. tests/runtime/test_megatron_fixes.py fails for each that is taken out.
"""

from importlib.util import find_spec

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils


def define_te_general_gemm() -> None:
    """transformer/moe/moe_utils.py:1192 and 1225 ask whether this function is None; without Transformer Engine line 24
    leaves it undefined, so that every router ends in a NameError."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def disbelieve_mocked_te() -> None:
    """transformer/multi_latent_attention.py:54 imports mocks where Transformer Engine is absent and takes them for the
    real thing; :183 asks isinstance of one, so that every latent attention ends in a TypeError."""
    if find_spec("transformer_engine") is None:
        multi_latent_attention.HAVE_TE = False


def install() -> None:
    """Mend what is broken in this installation; a second call changes nothing."""
    define_te_general_gemm()
    disbelieve_mocked_te()
