"""Build and load this rank's part of a Hugging Face model (`families/resolved.py`)."""

from typing import Any

import torch
from torch import nn

from swiftlite.base.heads import Heads
from swiftlite.bridge.transfer import MtpInit, WeightsReport, load_hf
from swiftlite.families.resolved import HfModel
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.model.loss.clusters import TokenClusters
from swiftlite.runtime.mesh import Mesh


def build_hf_model(
    hf_model: HfModel, mesh: Mesh, *, dtype: torch.dtype, heads: Heads | None = None, **options: Any
) -> list[GPTModel]:
    """Build the model's part on this rank with uninitialized weights, one chunk per virtual pipeline stage.

    Args:
        heads: the MTP heads of the model; None: the heads that config.json declares.
        options: further arguments of `build_model`.

    Raises:
        OptionError: the model does not support the layout.
    """
    if heads is None:
        heads = hf_model.heads
    return build_model(
        hf_model.family.architecture(hf_model.config),
        hf_model.config,
        mesh=mesh,
        dtype=dtype,
        heads=heads,
        drafting=hf_model.family.drafting_of(hf_model.config, heads),
        **options,
    )


def open_model(
    hf_model: HfModel,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    heads: Heads | None = None,
    mtp_init: MtpInit = "checkpoint",
    graft_from: HfModel | None = None,
    seed: int = 42,
    **options: Any,
) -> tuple[list[GPTModel], WeightsReport]:
    """Build the model's part on this rank and load the weights. Also return a report on the tensors in the model's
    directory.

    Args:
        heads: the MTP heads of the model; None: those of the directory.
        mtp_init, graft_from, seed: how the heads' weights are initialized, see `load_hf`.
        options: further arguments of `build_model`.

    Raises:
        UserError: the directory cannot be read, or does not match the model.
        OptionError: the model does not support the layout.
    """
    chunks = build_hf_model(hf_model, mesh, dtype=dtype, heads=heads, **options)
    report = load_hf(
        chunks,
        hf_model.directory,
        hf_model.family,
        hf_model.config,
        mtp_init=mtp_init,
        graft_from=graft_from and graft_from.directory,
        seed=seed,
    )
    for module in nn.ModuleList(chunks).modules():
        if isinstance(module, TokenClusters):
            module.check((graft_from or hf_model).directory)
    return chunks, report
