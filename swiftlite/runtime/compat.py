"""The only reader of megatron-core's version: what moved between releases, answered once.

Tested: megatron-core 0.16.1.
"""

from importlib.metadata import version

from packaging.version import Version

MCORE_VERSION = Version(version("megatron-core"))

# The decoder layer inside an MTP layer, renamed after 0.16 (multi_token_prediction.py).
MTP_INNER_LAYER = "transformer_layer" if Version("0.17") > MCORE_VERSION else "mtp_model_layer"
