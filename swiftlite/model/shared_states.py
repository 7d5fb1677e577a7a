"""Hold what decoder layers read in addition to the state: inputs of their own, and keys and values of earlier layers.

Only layers of Gemma 4 E2B and E4B do so. Layers have the numbers of the whole model, from 0.

Shapes: S sequence (of this context- and sequence-parallel rank), T sequence of all sequence-parallel ranks, B batch, H
hidden size, P size of a layer's own input, G key-value heads of a tensor-parallel rank, D size of a head.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from swiftlite.families.architecture import CrossLayerReads
from swiftlite.model.attention.cache import Cache


@dataclass
class SharedStates:
    """The states of one pass, to which layers add theirs. megatron-core's layers pass this object in the argument for a
    mask.

    Attributes:
        cache: the cache of the rows in decoding; None in training.
        inputs: by layer, its own input [S, B, P].
        keys: by layer, its keys and values [T, B, G, D], if other layers read them.
        sources: the layers that add theirs to `keys`.
    """

    cache: Cache | None = None
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    sources: frozenset[int] = frozenset()

    def keep(self, layer: int, key_TBGD: torch.Tensor, value_TBGD: torch.Tensor) -> None:
        """Add the keys and values of a layer if other layers read them."""
        if layer in self.sources:
            self.keys[layer] = (key_TBGD, value_TBGD)

    def for_layers(self, layers: Iterable[int]) -> "SharedStates":
        """Return the inputs of some layers, and all keys and values so far."""
        inputs = {layer: self.inputs[layer] for layer in layers if layer in self.inputs}
        return SharedStates(self.cache, inputs, dict(self.keys), self.sources)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors: inputs, then keys and values."""
        return [*self.inputs.values(), *(tensor for pair in self.keys.values() for tensor in pair)]

    def new_keys(self, before: "SharedStates") -> list[torch.Tensor]:
        """Return the keys and values that layers have added since `before`, in the order of the layers."""
        return [tensor for layer, pair in self.keys.items() if layer not in before.keys for tensor in pair]

    def add_keys(self, layers: Iterable[int], tensors: Sequence[torch.Tensor]) -> None:
        """Add the result of `new_keys` after these layers."""
        sources = [layer for layer in layers if layer in self.sources]
        self.keys.update(zip(sources, zip(tensors[::2], tensors[1::2], strict=True), strict=True))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "SharedStates":
        """Return the states with other tensors, in the order of `tensors`."""
        inputs = dict(zip(self.inputs, tensors, strict=False))
        others = tensors[len(inputs) :]
        keys = dict(zip(self.keys, zip(others[::2], others[1::2], strict=True), strict=True))
        return SharedStates(self.cache, inputs, keys, self.sources)


@dataclass(frozen=True)
class Sharing:
    """Define how `SharedStates` pass from one (virtual) pipeline stage to the next.

    They are sent before the states (`StageStates`) as blocks [S, B, H], which contain all numbers of a token. Each
    position stands for as many positions of keys and values as there are sequence-parallel ranks.

    Attributes:
        read: for each stage except the last, what later stages read of it and of earlier stages.
        sources: layers whose keys and values other layers read, with G and D.
        input_size: P; 0 if layers have no inputs of their own.
        hidden: H.
        sequence_ranks: number of sequence-parallel ranks.
    """

    read: Sequence[CrossLayerReads] = ()
    sources: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    input_size: int = 0
    hidden: int = 1
    sequence_ranks: int = 1

    @property
    def is_used(self) -> bool:
        """Whether any layer reads more than the state."""
        return bool(self.sources or self.input_size)

    def num_blocks(self, stage: int) -> int:
        """Return the number of blocks that a stage sends; 0 for stages that do not exist."""
        if not 0 <= stage < len(self.read):
            return 0
        return -(-sum(self._widths(self.read[stage])) // self.hidden)

    def pack(self, shared: SharedStates, stage: int, like_SBH: torch.Tensor) -> list[torch.Tensor]:
        """Return the blocks that a stage sends.

        Args:
            like_SBH: the state that is sent as well.
        """
        number = self.num_blocks(stage)
        if not number:
            return []
        length, num_rows, _ = like_SBH.shape
        parts = [shared.inputs[layer] for layer in self.read[stage].inputs]
        parts += [tensor for layer in self.read[stage].keys for tensor in shared.keys[layer]]
        flat = torch.cat([part.reshape(length, num_rows, -1) for part in parts], dim=-1)
        filled = F.pad(flat, (0, number * self.hidden - flat.size(-1)))
        return list(filled.split(self.hidden, dim=-1))

    def unpack(self, blocks_SBH: Sequence[torch.Tensor], stage: int, cache: Cache | None) -> SharedStates:
        """Return the states that a stage receives in these blocks."""
        shared = SharedStates(cache, sources=frozenset(self.sources))
        if not blocks_SBH:
            return shared
        read = self.read[stage - 1]
        flat, widths = torch.cat([*blocks_SBH], dim=-1), self._widths(read)
        parts = list(flat[..., : sum(widths)].split(widths, dim=-1))
        for layer in read.inputs:
            shared.inputs[layer] = parts.pop(0)
        for layer in read.keys:
            shape = (-1, flat.size(1), *self.sources[layer])
            shared.keys[layer] = (parts.pop(0).reshape(shape), parts.pop(0).reshape(shape))
        return shared

    def _widths(self, read: CrossLayerReads) -> list[int]:
        """Return the number of numbers of each tensor for each position of the state."""
        keys = [self.sources[layer][0] * self.sources[layer][1] * self.sequence_ranks for layer in read.keys]
        return [self.input_size] * len(read.inputs) + [width for width in keys for _ in range(2)]
