"""The architecture of a model, read from config.json by its family: decoder layers, and the modules outside of them.

MTP heads are not part of the architecture, because their number can change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from swiftlite.base.heads import MTP, Heads
from swiftlite.bridge.join import COPY, Join, PadEnd
from swiftlite.bridge.rows import Row, lift
from swiftlite.families.absent import NoMlp
from swiftlite.families.drafter import DrafterSizes
from swiftlite.families.layer import Attention, Layer, Sublayer
from swiftlite.families.rank import Rank
from swiftlite.families.reward_model import SCORE
from swiftlite.families.tower import Tower


@dataclass(frozen=True)
class Outside:
    """The parts of a model outside of its decoder layers: embedding, final norm, output layer.

    Attributes:
        num_layers: number of decoder layers.
        hidden: hidden size.
        vocab: size of the vocabulary.
        is_tied: whether the output layer shares the embedding.
        embedding_multiplier: factor of embeddings, for the trunk and for MTP heads.
        multiplies_in_embedding: whether this factor belongs to transformers' embedding module, which rounds it to the
            precision of the model.
        logits_divisor: number by which logits are divided.
        logits_cap: logits are `cap * tanh(logits / cap)`, so that they are between -cap and cap; None: no cap.
        norms_round_last: whether norms round only their results to the precision of the model. By default, normalized
            states are rounded before they are multiplied by the weight.
        rotary_rounds_last: the same for rotary embeddings, whose cosines and sines are rounded by default.
        mcore_config: arguments of megatron-core's TransformerConfig that all layers share, for norms and activation.
        ropes: settings of the rotary embeddings, each with the names of config.json (`families/rope.py`), if layers
            have different ones; empty: all layers have that of config.json.
        head_layer: the decoder layer of MTP heads; None: like the last trunk layer that sees all previous tokens. Its
            attention and its MLP must each be those of a trunk layer, but not necessarily of the same one.
        heads_share_final_norm: whether the output norm of MTP heads is the trunk's final norm.
        heads_have_output_layers: whether each MTP head has an output layer of its own; otherwise all use the trunk's.
        has_score: whether the output layer computes one number, as in a reward model.
        own_inputs: size of the input that each decoder layer gets in addition to the state (`Layer.own_input`): a
            second embedding of the token and a projection of the first one; 0 without such inputs.
        hf_layers: prefix of the Hugging Face names of decoder layers, followed by a number and a dot.
    """

    num_layers: int
    hidden: int
    vocab: int
    is_tied: bool
    mcore_config: Mapping[str, Any] = field(default_factory=dict)
    ropes: tuple[Mapping[str, Any], ...] = ()
    hf_layers: str = "model.layers."
    hf_embedding: str = "model.embed_tokens.weight"
    hf_final_norm: str = "model.norm.weight"
    hf_output_layer: str = "lm_head.weight"
    embedding_multiplier: float = 1.0
    multiplies_in_embedding: bool = False
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    norms_round_last: bool = False
    rotary_rounds_last: bool = False
    head_layer: Layer | None = None
    heads_share_final_norm: bool = False
    heads_have_output_layers: bool = False
    has_score: bool = False
    own_inputs: int = 0

    @property
    def own_input_macs(self) -> int:
        """Multiply-adds per token of the projection to the layers' own inputs."""
        return self.num_layers * self.own_inputs * self.hidden

    def local_vocab(self, rank: Rank) -> int:
        """Return the number of rows of the embedding on a rank, including padding."""
        return -(-self.vocab // rank.tp)

    def local_outputs(self, rank: Rank) -> int:
        """Return the number of rows of the output layer on a rank, including padding."""
        return 1 if self.has_score else self.local_vocab(rank)

    def rows(self) -> list[Row]:
        """Return the bridge rows (`bridge/rows.py`) of embedding, final norm and, unless the embedding is tied, the
        output layer."""
        matrix = (self.vocab, self.hidden)
        embedding = Row("embedding.word_embeddings.weight", {self.hf_embedding: matrix}, PadEnd())
        final_norm = Row("decoder.final_layernorm.weight", {self.hf_final_norm: (self.hidden,)})
        if self.has_score:
            score = Row("output_layer.weight", {SCORE: (1, self.hidden)}, can_be_new=True)
            return [embedding, final_norm, score, *self._rows_of_own_inputs()]
        output_layer = Row("output_layer.weight", {self.hf_output_layer: matrix}, PadEnd())
        if not self.is_tied:
            return [embedding, final_norm, output_layer, *self._rows_of_own_inputs()]
        # Files of a tied model can contain a copy of the embedding, and so can a later pipeline stage.
        embedding = replace(embedding, hf_copies=(self.hf_output_layer,), mcore_copies=(output_layer.mcore,))
        return [embedding, final_norm, *self._rows_of_own_inputs()]

    def _rows_of_own_inputs(self) -> list[Row]:
        """Return the bridge rows of the modules that compute the layers' own inputs, next to the embedding."""
        size, prefix = self.num_layers * self.own_inputs, self.hf_embedding.removesuffix("embed_tokens.weight")
        if not size:
            return []
        hf = {
            "word_embeddings": {f"{prefix}embed_tokens_per_layer.weight": (self.vocab, size)},
            "projection": {f"{prefix}per_layer_model_projection.weight": (size, self.hidden)},
            "norm": {f"{prefix}per_layer_projection_norm.weight": (self.own_inputs,)},
        }
        joins: dict[str, Join] = {"word_embeddings": PadEnd()}
        return [Row(f"own_inputs.{name}.weight", tensor, joins.get(name, COPY)) for name, tensor in hf.items()]


@dataclass(frozen=True)
class CrossLayerReads:
    """Hold what decoder layers read of earlier ones, in addition to the state.

    Attributes:
        inputs: numbers of the decoder layers with an input of their own (`Layer.own_input`).
        keys: numbers of the decoder layers whose keys and values are read, ascending.
    """

    inputs: Sequence[int] = ()
    keys: Sequence[int] = ()


@dataclass(frozen=True)
class Architecture:
    """A model without MTP heads.

    Attributes:
        layers: decoder layers from first to last; they can be of different kinds.
        tower: computes embeddings of inputs other than tokens; None without a tower.
        drafter: returns the sizes of the declared drafter for a number of drafts; None: those of MTP heads.
    """

    outside: Outside
    layers: tuple[Layer, ...]
    tower: Tower | None = None
    drafter: Callable[[int], DrafterSizes] | None = None

    def drafter_of(self, heads: Heads) -> DrafterSizes | None:
        """Return the sizes of a run's drafter; None for MTP heads, and without heads."""
        if not heads.layers or heads.kind == MTP or self.drafter is None:
            return None
        return self.drafter(heads.unroll)

    @property
    def mtp_block(self) -> Layer:
        """The decoder layer inside an MTP head.

        Without `Outside.head_layer`, it is that of the last trunk layer that sees all previous tokens; without such a
        layer, that of the last one with a KV cache. Heads have an indexer if any layer has one.
        """
        if self.outside.head_layer is not None:
            return self.outside.head_layer
        cached = [layer for layer in self.layers if not layer.attention.is_recurrent]
        full = [layer for layer in cached if layer.attention.window is None]
        indexed = [layer for layer in full if has_indexer(layer)]
        return (indexed or full or cached)[-1]

    @property
    def mtp_sources(self) -> tuple[int, int]:
        """Numbers (from 0) of the trunk layers with the attention and with the MLP of the heads.

        Both are the last trunk layer that equals the layer of the heads. Without such a layer, they are the last ones
        with this attention and with this MLP.

        Raises:
            ValueError: no trunk layer has this attention or this MLP.
        """
        block = self.mtp_block
        if block in self.layers:
            number = _last_index(self.layers, block)
            return number, number
        attention = _last_index([layer.attention for layer in self.layers], block.attention)
        if isinstance(block.mlp, NoMlp):
            return attention, attention
        return attention, _last_index([layer.mlp for layer in self.layers], block.mlp)

    @cached_property
    def sublayers(self) -> list[Sublayer]:
        """The different kinds of attention and MLP of the layers, with sizes, in the order of the layers."""
        found: list[Sublayer] = []
        for layer in self.layers:
            found += [part for part in (layer.attention, layer.mlp) if part not in found]
        return found

    @cached_property
    def attentions(self) -> list[Attention]:
        """The different kinds of attention of the layers."""
        found: list[Attention] = []
        for layer in self.layers:
            if layer.attention not in found:
                found.append(layer.attention)
        return found

    @property
    def rotary_channels(self) -> int:
        """Number of channels of all different rotary embeddings."""
        channels = {getattr(kind, "rope", None): kind.rotary for kind in self.attentions if kind.rotary}
        return sum(channels.values())

    @property
    def is_chain(self) -> bool:
        """Whether each decoder layer reads only the output of the layer before."""
        return not (self.outside.own_inputs or self.key_sources)

    def cross_layer_reads(self, first: int) -> "CrossLayerReads":
        """Return what the decoder layers from number `first` on read of earlier ones, in addition to the state."""
        inputs = range(first, len(self.layers)) if self.outside.own_inputs else range(0)
        return CrossLayerReads(inputs, [layer for layer in _key_layers(self.layers[first:]) if layer < first])

    @property
    def key_sources(self) -> list[int]:
        """Numbers of the decoder layers whose keys and values other layers read."""
        return _key_layers(self.layers)

    @property
    def index_topk(self) -> int | None:
        """Number of tokens that indexers select for each token; None for a model without indexers."""
        return next((kind.indexer.topk for kind in self.attentions if kind.indexer is not None), None)

    @property
    def recompute_modules(self) -> set[str]:
        """The supported values of --recompute_modules."""
        return set().union(*(part.recompute_modules for part in self.sublayers))

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.mlp.experts for layer in self.layers)

    def rows(self) -> list[Row]:
        """Return the bridge rows (`bridge/rows.py`) of the model, with tensor names in the whole model."""
        rows = self.outside.rows()
        if self.tower is not None:
            rows += self.tower.rows()
        for number in range(len(self.layers)):
            rows += self.layer_rows(number)
        return rows

    def layer_rows(self, number: int) -> list[Row]:
        """Return the bridge rows of decoder layer `number` (from 0)."""
        rows = self.layers[number].rows()
        return lift(rows, f"decoder.layers.{number}.", f"{self.outside.hf_layers}{number}.")

    def mcore_config(self) -> dict[str, Any]:
        """Return the arguments of megatron-core's TransformerConfig.

        All layers share them, except for `layer_arguments`, which are those of the first layer that has them.

        Raises:
            ValueError: two layers require different values of an argument, which megatron-core does not support.
        """
        config: dict[str, Any] = {"num_layers": self.outside.num_layers, "hidden_size": self.outside.hidden}
        config |= self.outside.mcore_config
        for part in self.sublayers:
            for name, value in part.mcore_config().items():
                if config.setdefault(name, value) != value and name not in part.layer_arguments:
                    raise ValueError(
                        f"layers differ in {name}: {config[name]!r} and {value!r}; megatron-core has one for all"
                    )
        # Makes megatron-core save layers separately in checkpoints, which is required if layers differ.
        if self.has_experts:
            config["moe_layer_freq"] = [int(layer.mlp.experts > 0) for layer in self.layers]
        elif any(layer != self.layers[0] for layer in self.layers):
            config["hetereogenous_dist_checkpoint"] = True
        return config


def _key_layers(layers: Sequence[Layer]) -> list[int]:
    """Return the numbers of the layers whose keys and values these layers read, ascending."""
    numbers = {getattr(layer.attention, "key_layer", None) for layer in layers}
    return sorted(number for number in numbers if number is not None)


def _last_index(items: Sequence[Any], item: Any) -> int:
    return len(items) - 1 - items[::-1].index(item)


def has_indexer(layer: Layer) -> bool:
    """Return whether a layer has an indexer of its own, and does not use the selection of an earlier layer."""
    return layer.attention.indexer is not None and not layer.attention.indexer.is_shared
