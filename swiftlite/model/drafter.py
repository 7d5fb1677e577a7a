"""Define the interface of a drafter's layers: what they read, and the states that they return.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import Heads
from swiftlite.families.architecture import Architecture
from swiftlite.model.attention.cache import Cache
from swiftlite.model.layers.kernels import Modules
from swiftlite.model.loss.balance import RoutedTokens
from swiftlite.runtime.compat import MTP_INNER_LAYER


@dataclass(frozen=True)
class DrafterParts:
    """The parts that the layers of a drafter are built from.

    Attributes:
        hf_config: content of config.json, with the settings of the drafter.
        modules: the classes of layers for the kernels of the run.
    """

    hf_config: Mapping[str, Any]
    architecture: Architecture
    heads: Heads
    drafting: Drafting
    modules: Modules


@dataclass(frozen=True)
class DraftInputs:
    """The inputs of a drafter, for a micro-batch in training or for new tokens of rows in decoding.

    Attributes:
        hidden_SBH: the trunk's states, before or after the final norm (`Drafting.takes_before_norm`), features, or both
            (`StageStates.head_input`).
        embed: `embed(k, zeroes_first=False)` returns the embeddings [S, B, H] of the tokens k + 1 positions later (k
            from 0), which the draft number k can read; with `zeroes_first`, zeros at position 0 of a sequence.
        ids: `ids(k)` returns the tokens [S, B] whose embeddings `embed(k)` returns.
        embed_token: returns the embedding of one token at every position, [S, B, H].
        rotary: `rotary(offset)` returns rotary embeddings of the positions s + offset (`GPTModel.rotary_emb`).
        packed_seq_params: the sequences of a packed row.
        tokens: for each draft, a description of the tokens for routers; None: routers do not count their load.
        cache: in decoding, the KV cache of the rows; None in training.
        drafting: which states the drafter reads.
        drafted: `ModelInputs.drafted`; states at other positions are not used.
    """

    hidden_SBH: torch.Tensor
    embed: Callable[..., torch.Tensor]
    ids: Callable[[int], torch.Tensor]
    embed_token: Callable[[int], torch.Tensor]
    rotary: Callable[[int], torch.Tensor]
    packed_seq_params: PackedSeqParams | None
    tokens: Sequence[RoutedTokens | None]
    cache: Cache | None
    drafting: Drafting
    drafted: Callable[[], torch.Tensor | None]


class DrafterLayer(MegatronModule, ABC):
    """A layer of a drafter other than MTP heads. The layers of MTP heads are megatron-core's, with the same method
    `draft`.

    Args:
        layer_number: the number of the layer, from 1.
    """

    def __init__(self, config: TransformerConfig, layer_number: int):
        super().__init__(config)
        self.layer_number = layer_number
        # megatron-core's schedules write the number of the micro-batch to the decoder layer of every layer in `mtp`
        # (pipeline_parallel/schedules.py:215 of 0.16.1).
        setattr(self, MTP_INNER_LAYER, SimpleNamespace())

    def build_layers(self, specs: Sequence[ModuleSpec]) -> None:
        """Build decoder layers, for a drafter that has some of its own: the modules `decoder_layer_0` and so on."""
        self._num_decoder_layers = len(specs)
        for number, spec in enumerate(specs):
            # Attributes: in a ModuleList, megatron-core would save parts of tensor-parallel ranks as whole tensors.
            layer = build_module(spec, config=self.config, layer_number=number + 1)
            setattr(self, f"decoder_layer_{number}", layer)

    @property
    def decoder_layers(self) -> list[Any]:
        """The layers of `build_layers`, in order."""
        return [getattr(self, f"decoder_layer_{number}") for number in range(self._num_decoder_layers)]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group, which megatron-core's MTP block does not pass to its layers."""
        return self.decoder_layers[0].self_attention.linear_proj.tp_group

    def connect(self, read_layers: Sequence[Any]) -> None:
        """Receive the decoder layers of this stage whose inputs are features, for a drafter that uses their modules."""

    @classmethod
    @abstractmethod
    def draft(cls, layers: Sequence[Any], inputs: DraftInputs) -> list[torch.Tensor]:
        """Return the states [S, B, H] of all drafts, to which output layers are applied. With a Markov head
        (`families/dflash.py`), they are [S, B, H + r].

        Args:
            layers: all layers of the drafter, which are instances of this class.
        """
