"""Count the FLOPs of training from config.json and actual lengths. Does not import torch.

Each kind of layer counts its operations (`families/layer.py`). A multiply-add counts as two operations. Attention is
counted for causal pairs of tokens, n * (n + 1) / 2 for a sequence of n tokens, without those outside of a sliding
window. Attention to tokens that an indexer selects is counted like attention to all tokens, because it is computed with
a mask. Only selected experts are counted, and the output layer is counted only for positions with a label (`model.loss`
computes no other logits). Padding, recomputation, and operations other than matrix products (norms, rotary embeddings,
softmax, optimizer) are not counted. A tower counts its operations from the numbers of items of images; all pairs of
patches of an image attend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from swiftlite.args.fields import IndexerMode
from swiftlite.base.heads import MTP_FEATURES, Heads
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.rows import saved_names
from swiftlite.bridge.rows import lift, shapes_of
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.families.layer import Layer, num_pairs
from swiftlite.families.tower import FROZEN, Tower, TrainedParts
from swiftlite.plan.cost.adapters import adapter_macs

_PER_MAC = 2
"""Number of operations of a multiply-add."""


@dataclass(frozen=True)
class Flops:
    """Operations of a forward and backward pass, over all ranks of a replica.

    Attributes:
        linear: operations per token, without the output layer.
        square: operations per squared length of a sequence.
        targets: operations per label, for the trunk and for each MTP depth.
        item: operations of a tower per item, such as a group of patches of an image.
        item_square: operations of a tower per squared number of items of an image.
        windows: sizes of sliding windows in tokens, each with the operations per pair of tokens in the layers with this
            window. `linear` and `square` include the pairs outside of the windows.
        indexers: for indexers that are computed only in sequences of more than `topk` tokens: `topk`, and their
            operations per token and per pair of tokens, which `linear` and `square` include.
    """

    linear: float
    square: float
    targets: tuple[float, ...]
    item: float = 0.0
    item_square: float = 0.0
    windows: tuple[tuple[int, int], ...] = ()
    indexers: tuple[int, int, int] | None = None

    @property
    def per_token(self) -> float:
        """Operations per token if every token has a label. `data.packing.schedule` balances ranks by `per_token` and
        `square`."""
        return self.linear + sum(self.targets)

    def outside_windows(self, length: int) -> int:
        """Return the operations for pairs outside of the windows of a sequence of `length` tokens, and those of
        indexers that select all tokens, which are not computed.
        """
        missing = 0
        if self.indexers is not None:
            topk, per_token, per_pair = self.indexers
            if length <= topk:
                missing += per_token * length + per_pair * num_pairs(length, None)
        for window, per_pair in self.windows:
            missing += per_pair * (num_pairs(length, None) - num_pairs(length, window))
        return missing

    def step(
        self,
        num_tokens: int,
        squares: int,
        num_targets: Sequence[int],
        num_items: int = 0,
        item_squares: int = 0,
        outside_windows: float = 0.0,
    ) -> float:
        """Return the operations of a step.

        Args:
            num_tokens: sum of the lengths of the step's sequences.
            squares: sum of the squared lengths of these sequences.
            num_targets: number of labels that are not ignored, of the trunk and of each MTP depth.
            num_items, item_squares: sums of the numbers of items of the step's images, and of their squares.
            outside_windows: sum of `outside_windows` of the step's sequences.
        """
        vocabulary = sum(each * number for each, number in zip(self.targets, num_targets, strict=True))
        tower = self.item * num_items + self.item_square * item_squares
        return self.linear * num_tokens + self.square * squares + vocabulary + tower - outside_windows


def training_flops(
    hf_config: HfConfig,
    heads: Heads = Heads(),
    *,
    heads_only: bool = False,
    trunk_is_read: bool = False,
    lora: Lora | None = None,
    tower: Tower | None = None,
    trained_parts: TrainedParts = FROZEN,
    freeze_llm: bool = False,
    indexer_mode: IndexerMode = "frozen",
) -> Flops:
    """Return the FLOPs of training a tower, the trunk, the MTP layers, and the output layer for the trunk and each MTP
    depth.

    A backward pass has twice the operations of a forward pass, for gradients of inputs and of weights. With
    `heads_only`, there are no gradients of the trunk, of its loss, and of the output layer's weights. With adapters,
    only the weights of adapters and of modules that are trained in full have gradients.

    Args:
        hf_config: config.json.
        trunk_is_read: with `heads_only`, whether cached states replace the computation of the trunk and of the tower.
        tower: tower of the model; None if the run computes no tower.
        trained_parts: trained parts of the tower.
        freeze_llm: whether the trunk's weights have no gradients, but its states have.
        indexer_mode: training of indexers.

    Raises:
        UserError: the model_type is unknown.
    """
    architecture = architecture_of(hf_config)
    passes = _passes_of(architecture, heads_only, trunk_is_read, lora, freeze_llm, indexer_mode)
    of_layers = sum(layer.macs_per_token() for layer in architecture.layers)
    trunk = _PER_MAC * (of_layers + architecture.outside.own_input_macs)
    of_heads = _of_heads(architecture, heads, passes, lora)
    adapters = 0
    if lora is not None:
        for number, layer in enumerate(architecture.layers):
            adapters += 3 * _PER_MAC * adapter_macs(layer, architecture.layer_rows(number), lora)
    # n * (n + 1) / 2 pairs with two operations each are n ** 2 + n operations.
    pairs: dict[int | None, int] = {}  # by window
    computed = [(passes.trunk, layer) for layer in architecture.layers] + [(3, layer) for layer in of_heads.layers]
    for number, layer in computed:
        window = layer.attention.window
        pairs[window] = pairs.get(window, 0) + number * layer.attention.macs_per_pair()
    index_token, index_pair = _of_indexers(architecture, of_heads.layers, indexer_mode, heads_only, trunk_is_read)
    square = sum(pairs.values()) + index_pair
    vocabulary = _PER_MAC * architecture.outside.vocab * architecture.outside.hidden
    trunk_target = passes.output * vocabulary
    if heads_only or indexer_mode == "indexer_only":
        trunk_target = passes.trunk * vocabulary
    indexers = None
    if architecture.index_topk is not None and indexer_mode == "frozen":
        indexers = architecture.index_topk, index_token, _PER_MAC * index_pair
    item = item_square = 0.0
    if tower is not None and not trunk_is_read:
        item, item_square = tower.macs(trained_parts)
    return Flops(
        linear=passes.matrix * trunk + adapters + of_heads.linear + index_token + square,
        square=square,
        targets=(trunk_target, *[of_heads.target] * heads.drafts),
        item=_PER_MAC * item,
        item_square=_PER_MAC * item_square,
        windows=tuple((window, _PER_MAC * per_pair) for window, per_pair in pairs.items() if window is not None),
        indexers=indexers,
    )


class _Passes(NamedTuple):
    """Numbers of passes, of which a backward pass with gradients of inputs and of weights counts as two.

    Attributes:
        trunk: of the trunk's layers.
        matrix: of their matrices.
        output: of the output layer.
        head: of the MTP layers.
    """

    trunk: int
    matrix: int
    output: int
    head: int


def _passes_of(
    architecture: Architecture,
    heads_only: bool,
    trunk_is_read: bool,
    lora: Lora | None,
    freeze_llm: bool,
    indexer_mode: IndexerMode,
) -> _Passes:
    """Return the numbers of passes; the arguments are those of `training_flops`."""
    trunk = output = head = 3
    if heads_only:
        trunk, output = 1, 2
    elif indexer_mode == "indexer_only":
        trunk, output, head = 1, 2, 2
    if trunk_is_read:
        trunk = 0
    matrix = trunk
    if freeze_llm:
        matrix = output = 2
    if lora is not None:
        matrix = min(trunk, 2)
        if lora.heads != "full":
            head = 2
        if heads_only or not _output_layer_learns(architecture, lora):
            output = 2
    return _Passes(trunk, matrix, output, head)


class _OfHeads(NamedTuple):
    """FLOPs of MTP heads, or of another drafter.

    Attributes:
        linear: of matrices per token.
        target: of an output layer per label of a draft.
        layers: decoder layers of all drafts, as often as they are computed.
    """

    linear: int
    target: int
    layers: list[Layer]


def _of_heads(architecture: Architecture, heads: Heads, passes: _Passes, lora: Lora | None) -> _OfHeads:
    """Count the FLOPs of training the heads of a run."""
    hidden, block, drafter = architecture.outside.hidden, architecture.mtp_block, architecture.drafter_of(heads)
    per_input = _PER_MAC * (len(heads.draft_vocab) or architecture.outside.vocab)
    if drafter is not None:
        linear = _PER_MAC * (passes.head * drafter.macs() + drafter.read_macs)
        target = per_input * (passes.output * drafter.output + passes.head * drafter.own_output)
        return _OfHeads(linear, target, [*drafter.layers] * drafter.runs)
    linear = passes.head * _PER_MAC * (block.macs_per_token() + 2 * hidden**2)  # including the projection
    if lora is not None:
        linear += 3 * _PER_MAC * adapter_macs(block, lift(block.rows(), "mtp.", ""), lora)
    output_passes = passes.head if architecture.outside.heads_have_output_layers else passes.output
    layers = [block] * heads.drafts
    return _OfHeads(linear * heads.drafts + _of_features(heads, hidden), output_passes * per_input * hidden, layers)


def _of_indexers(
    architecture: Architecture, of_heads: list[Layer], mode: IndexerMode, heads_only: bool, trunk_is_read: bool
) -> tuple[int, int]:
    """Return the FLOPs of all indexers per token, and the multiply-adds per pair of tokens.

    A trained indexer also computes the scores of the attention that it learns, half of the operations of attention.
    """
    per_head = of_trunk = 1 if mode == "frozen" else 3
    if heads_only:
        of_trunk = 0 if trunk_is_read else 1
    per_token = per_pair = 0
    passes = [(of_trunk, layer.attention) for layer in architecture.layers]
    for number, attention in passes + [(per_head, layer.attention) for layer in of_heads]:
        if attention.indexer is None or attention.indexer.is_shared:
            continue
        shapes = shapes_of(row for row in attention.rows() if row.is_frozen).values()
        per_token += number * _PER_MAC * sum(prod(shape) for shape in shapes if len(shape) == 2)
        per_pair += number * attention.indexer.macs_per_pair()
        if number == 3:
            per_pair += attention.macs_per_pair() // 2
    return per_token, per_pair


def _of_features(heads: Heads, hidden: int) -> int:
    """Return the FLOPs of training the columns of a head's projection for features, which only the first draft reads.

    Args:
        hidden: hidden size.
    """
    if heads.kind != MTP_FEATURES:
        return 0
    return 3 * _PER_MAC * len(heads.features) * hidden**2


def _output_layer_learns(architecture: Architecture, lora: Lora) -> bool:
    return "output_layer.weight" in saved_names(lora, architecture.outside.rows())
