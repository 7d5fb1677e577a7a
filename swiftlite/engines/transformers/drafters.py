"""Load the drafter of a checkpoint, of any kind with which the transformers engine drafts."""

from collections.abc import Callable
from typing import Any

from torch import nn

from swiftlite.base.heads import MTP
from swiftlite.bridge.rows import HfConfig, shapes_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.transformers.dflash import DFlashCandidateGenerator, DFlashDrafter
from swiftlite.engines.transformers.eagle3 import Eagle3Drafter
from swiftlite.engines.transformers.mtp_heads import MtpCandidateGenerator, load_heads
from swiftlite.families import dflash, eagle3
from swiftlite.families.resolved import HfModel

DRAFTERS: dict[str, Callable[[HfConfig, str], nn.Module]] = {
    eagle3.KIND: Eagle3Drafter,
    dflash.KIND: lambda own_config, attention: DFlashDrafter(own_config),  # it calls torch's attention
}
"""The modules of drafters other than MTP heads, built from their own config.json and the name of an implementation of
attention."""
GENERATORS: dict[str, type[MtpCandidateGenerator]] = {dflash.KIND: DFlashCandidateGenerator}
"""The classes that draft. Kinds that are not listed draft like MTP heads."""


def load_drafter(model: HfModel, decoder: Any) -> nn.ModuleList:
    """Load the checkpoint's MTP heads, or its drafter, on the device and in the dtype of the decoder."""
    if model.heads.kind == MTP:
        return load_heads(model, decoder)
    own_config = model.family.drafter(model.config).own_config
    assert own_config is not None  # `require_heads`
    drafter = DRAFTERS[model.heads.kind](own_config(model.family, model.config), decoder.config._attn_implementation)
    with Checkpoint(model.directory) as checkpoint:
        names = shapes_of(model.family.head_rows(model.config, 0))
        drafter.load_state_dict({name: checkpoint.read(name) for name in names}, strict=True)
    drafter.to(decoder.device, decoder.dtype)
    return nn.ModuleList([drafter]).requires_grad_(False).eval()
