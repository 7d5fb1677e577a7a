"""Load the drafter of a checkpoint, of any kind with which the transformers engine drafts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from swiftlite.base.heads import GEMMA4_ASSISTANT, MTP, MTP_FEATURES
from swiftlite.bridge.rows import HfConfig, shapes_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.transformers.dflash import DFlashDrafter, DFlashSteps
from swiftlite.engines.transformers.draft_generator import DraftSteps
from swiftlite.engines.transformers.eagle3 import Eagle3Drafter
from swiftlite.engines.transformers.gemma4_assistant import AssistantSteps, load_assistant
from swiftlite.engines.transformers.mtp_features import load_feature_head
from swiftlite.engines.transformers.mtp_heads import load_heads
from swiftlite.families import dflash, eagle3
from swiftlite.families.resolved import HfModel


def load_drafter(model: HfModel, decoder: Any) -> nn.ModuleList:
    """Load the checkpoint's MTP heads, or its drafter, on the device and in the dtype of the decoder."""
    if model.heads.kind == MTP:
        return load_heads(model, decoder)
    drafter = DRAFTERS[model.heads.kind](model, decoder)
    drafter.to(decoder.device, decoder.dtype)
    return nn.ModuleList([drafter]).requires_grad_(False).eval()


def _load_with_own_config(make: Callable[[HfConfig, str], nn.Module], model: HfModel, decoder: Any) -> nn.Module:
    """Load a drafter that consists only of modules with the names of its files.

    Args:
        make: returns the module for its own config.json and the name of an implementation of attention.
    """
    own_config = model.family.drafter(model.config).own_config
    assert own_config is not None  # `require_heads`
    drafter = make(own_config(model.family, model.config), decoder.config._attn_implementation)
    with Checkpoint(model.directory) as checkpoint:
        names = shapes_of(model.family.head_rows(model.config, 0))
        drafter.load_state_dict({name: checkpoint.read(name) for name in names}, strict=True)
    return drafter


def _make_dflash(own_config: HfConfig, attention: str) -> nn.Module:
    return DFlashDrafter(own_config)  # it calls torch's attention


DRAFTERS: dict[str, Callable[[HfModel, Any], nn.Module]] = {
    eagle3.KIND: partial(_load_with_own_config, Eagle3Drafter),
    **dict.fromkeys(dflash.KINDS, partial(_load_with_own_config, _make_dflash)),
    MTP_FEATURES: load_feature_head,
    GEMMA4_ASSISTANT: load_assistant,
}
"""Functions that load drafters other than MTP heads for a model and its decoder."""
STEPS: dict[str, type[DraftSteps]] = {
    **dict.fromkeys(dflash.KINDS, DFlashSteps),
    GEMMA4_ASSISTANT: AssistantSteps,
}
"""The classes that compute drafts. Kinds that are not listed draft like MTP heads."""
