"""Plugin of SGLang to serve swiftlite's checkpoints.

The plugin adds a config class for MiMo, draft models for the architectures in `DRAFTS`, and live weights from files.

SGLang calls `register` in each of its processes, through the entry point group `sglang.srt.plugins`. If swiftlite is
installed, a checkpoint with heads can therefore be served with

    python -m sglang.launch_server --model-path DIR --speculative-algorithm NEXTN ...

Models whose config.json declares no MTP heads are not affected. The model classes are in `models/` and are imported
with SGLang's registry of models.
"""

import os
from typing import Any

from sglang.srt.configs.step3p5 import Step3p5Config
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from transformers import AutoConfig

from swiftlite.engines.loading.head_weights import heads_of
from swiftlite.engines.mimo_config import MiMoConfig
from swiftlite.engines.sglang.weight_transfer import load_at_once, take
from swiftlite.families.serving.index import drafts_of_plugin
from swiftlite.families.serving.sglang import convention

PLUGIN_DRAFTS = drafts_of_plugin(convention)
"""Conventions of the plugin's draft classes, by architecture of the trunk."""
DRAFTS = {trunk: known.draft for trunk, known in PLUGIN_DRAFTS.items()}
"""Architecture of the trunk -> architecture of its draft. Both are classes of models/."""


def choose_draft(result: None, model_config: Any) -> None:
    """Set the architecture of a draft class in the draft model's config.

    SGLang runs this hook after ModelConfig._config_draft_model (sglang/srt/configs/model_config.py of 0.5.23, called
    when a ModelConfig is created). That method has a branch for each architecture with a draft class in SGLang, but
    none for the architectures in DRAFTS. Without this hook, SGLang would use the target as the draft model
    (tests/engines/sglang/test_dry_load.py).
    """
    hf_config = model_config.hf_config
    architecture = hf_config.architectures[0]
    if model_config.is_draft_model and architecture in DRAFTS and heads_of(hf_config).layers:
        # SGLang's registry then finds the class in `models/`; its own method has left the architecture of the trunk.
        hf_config.architectures = [DRAFTS[architecture]]


def register() -> None:
    """Register the classes with transformers and SGLang. May be called repeatedly."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    # SGLang first reads config.json with the class of transformers 5.19, whose attributes it cannot list:
    # AmbiguousGlobalPerLayerAttributeError.
    AutoConfig.register("step3p5", Step3p5Config, exist_ok=True)
    # Read when a process of SGLang first looks up a model's class; classes of this package take precedence.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "swiftlite.engines.sglang.models")
    HookRegistry.register(
        "sglang.srt.configs.model_config.ModelConfig._config_draft_model", choose_draft, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
        take,
        HookType.AROUND,
    )
    HookRegistry.register("sglang.srt.model_loader.utils.should_async_load", load_at_once, HookType.AFTER)
