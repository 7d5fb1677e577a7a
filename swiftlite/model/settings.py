"""Define how a run uses a model, and the part of the model on one pipeline stage.

Sizes are not here: those of the model are in its `Architecture`, and the layout is in the `Mesh`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from swiftlite.args.fields import IndexerArgs, MoeArgs, MtpLoss, RecomputeArgs
from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import Heads
from swiftlite.model.features import Features
from swiftlite.model.shared_states import Sharing
from swiftlite.model.tower import SentOutputs


@dataclass(frozen=True)
class ModelSettings:
    """Define how a run uses a model.

    Attributes:
        heads: the MTP heads of the model.
        freeze_trunk: whether embedding, decoder and the trunk's loss are computed without gradients. The caller selects
            the trained parameters (`Trainable`).
        holds_layers: whether the model has the decoder layers; otherwise it has a `StreamedBlock`.
        recompute, moe: options of megatron-core.
        indexer: training of indexers. The caller selects the trained parameters.
        drafting: which states and embeddings the MTP layers read; needed only for computing.
        mtp_loss: loss of the heads: cross-entropy with the labels (ce), or a distance from the trunk's distribution,
            which gets no gradient (kl, tv, nla, lk_hybrid; see `distillation_loss`).
        detached_heads: whether the losses of the heads have no gradient with respect to the trunk: its states, the
            embedding and the output layer.
        temperature: losses are those of logits divided by this number.
        is_teacher: whether the last stage returns the states at positions with a label, instead of losses.
        loss_in_chunks: whether losses are computed for a chunk of positions at a time (`chunked_loss.py`), instead of
            from all logits.
        mcore_config: further arguments of TransformerConfig, from --megatron_config.
    """

    heads: Heads = Heads()
    freeze_trunk: bool = False
    holds_layers: bool = True
    recompute: RecomputeArgs = field(default_factory=RecomputeArgs)
    moe: MoeArgs = field(default_factory=MoeArgs)
    indexer: IndexerArgs = field(default_factory=IndexerArgs)
    drafting: Drafting = Drafting()
    mtp_loss: MtpLoss = "ce"
    detached_heads: bool = False
    temperature: float = 1.0
    is_teacher: bool = False
    loss_in_chunks: bool = False
    mcore_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """The part of a model on one (virtual) pipeline stage: specs of its layers, from which the model builds them, and
    the tower.

    Attributes:
        decoder: the decoder layers of the stage and the norm after the last one.
        mtp_block: the layers of the drafter; None on stages without them.
        tower: maps `TowerInputs.items`, which are on the host, to one output per item, [I, H], on the stage of the
            embedding; None if the model has no tower.
        sent_outputs: outputs of the tower that the stage receives and sends.
        features: inputs of decoder layers that a drafter reads, up to this stage.
        number: number of the (virtual) stage, in the order of the forward pass.
        sharing: what decoder layers read in addition to the state, on all stages.
        own_inputs: class of the module that computes inputs of layers (`Outside.own_inputs`), with the arguments that
            the model does not know; None on stages without it.
        is_first, is_last: whether it is the first or the last stage.
        vp_stage: number of the virtual stage on its rank; None without virtual stages.
    """

    decoder: TransformerBlockSubmodules
    mtp_block: MultiTokenPredictionBlockSubmodules | None
    tower: nn.Module | None
    sent_outputs: SentOutputs
    features: Features
    number: int
    sharing: Sharing
    own_inputs: Callable[..., nn.Module] | None
    is_first: bool
    is_last: bool
    vp_stage: int | None
