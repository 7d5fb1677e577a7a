"""Handle differences between releases of megatron-core. No other module reads the version of megatron-core.

`swiftlite/cli/installed.py` lists the tested releases. Code that works with all releases without reading the version is
not in this module.
"""

import inspect
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from packaging.version import Version

MCORE_VERSION = Version(version("megatron-core"))

# The decoder layer inside an MTP layer, renamed in 0.17 (transformer/multi_token_prediction.py). Checkpoints keep the
# old name: since 0.17 the layer's sharded_state_dict maps it back.
MTP_INNER_LAYER = "mtp_model_layer"
if Version("0.17") > MCORE_VERSION:
    MTP_INNER_LAYER = "transformer_layer"

# The writer of asynchronous checkpoints: since 0.19 another package unless megatron-core's own writer is requested
# (dist_checkpointing/serialization.py).
ASYNC_WRITER: dict[str, Any] = {}
if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
    ASYNC_WRITER["async_strategy"] = "mcore"

# Warnings of megatron-core about its own interfaces, which users cannot fix. 0.19 recommends HybridModel, a class
# method for a spec's `mlp`, parameter layouts from the caller, another package's asynchronous writer, and no common.pt.
# 0.16 logs only the last entry, because it passes process groups only to its own class of expert layers; swiftlite's
# class reads them from the active mesh.
_KNOWN_WARNINGS = (
    ("models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("transformer.transformer_layer", "Rewrapping ModuleSpec"),
    ("distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
    ("dist_checkpointing.strategies.common", "load_common is deprecated"),
    ("transformer.transformer_layer", "Unknown MLP type"),
)


def quiet_known_warnings() -> None:
    """Remove the warnings in `_KNOWN_WARNINGS` from megatron-core's log. Repeated calls have no effect."""
    for name, _ in _KNOWN_WARNINGS:
        logging.getLogger(f"megatron.core.{name}").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(tuple(message for _, message in _KNOWN_WARNINGS))


def write_common(checkpoint: Path) -> None:
    """Write common.pt, which 0.16 requires to read a checkpoint.

    The file is for data other than tensors; swiftlite has none. 0.19 does not write this file, but reads an existing
    one.
    """
    common = checkpoint / "common.pt"
    if not common.exists():
        torch.save({}, common)
