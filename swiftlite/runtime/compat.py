"""The only reader of megatron-core's version: what moved between releases, answered once.

Tested: megatron-core 0.16.1.
"""

from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

MCORE_VERSION = Version(version("megatron-core"))

# The decoder layer inside an MTP layer, renamed after 0.16 (multi_token_prediction.py).
MTP_INNER_LAYER = "transformer_layer" if Version("0.17") > MCORE_VERSION else "mtp_model_layer"


def believe_in_te_only_if_installed() -> None:
    """Without Transformer Engine, megatron-core 0.16.1 imports mocks in its place and takes them for the real thing:
    transformer/multi_latent_attention.py:183 asks isinstance of one, a TypeError. Call before multi-latent attention is
    built, with CUDA too. Later releases ask for the package itself."""
    from megatron.core.transformer import multi_latent_attention

    if find_spec("transformer_engine") is None:
        multi_latent_attention.HAVE_TE = False
