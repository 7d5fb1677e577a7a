"""Count parameters and activation bytes of a virtual pipeline stage on one rank.

The kinds of decoder layers count their own parameters and bytes (`families/layer.py`). This module counts the modules
around the layers.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from swiftlite.base.heads import MTP_FEATURES
from swiftlite.base.lora import Lora
from swiftlite.bridge.rows import Row, lift
from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank
from swiftlite.families.tower import Tower
from swiftlite.plan.cost.adapters import adapter_activation_bytes, adapter_parameters, saved_parameters
from swiftlite.plan.cost.products import low_precision_weights
from swiftlite.plan.cost.setup import Setup, low_rank_of, rank_of
from swiftlite.plan.kernels import CHUNK


@dataclass(frozen=True)
class Activation:
    """An activation of one forward pass on a rank: its name and its size in bytes."""

    name: str
    bytes: int


def total(entries: Iterable[Activation]) -> int:
    """Return the sum of the bytes of `entries`."""
    return sum(entry.bytes for entry in entries)


def share(number: int, ranks: int) -> int:
    """Return `number / ranks`, rounded up, which is the share of one rank."""
    return -(-number // ranks)


class ModelOnRank:
    """Parameters and activation bytes of a model on one rank, without its decoder layers."""

    def __init__(self, architecture: Architecture, setup: Setup):
        self.setup, self.rank = setup, rank_of(architecture, setup)
        self.low_rank = low_rank_of(self.rank, setup)
        self.architecture, self.layers, self.outside = architecture, architecture.layers, architecture.outside
        self.hidden = architecture.outside.hidden
        self.vocab = architecture.outside.local_vocab(self.rank)
        self.drafted = share(len(setup.heads.draft_vocab), self.rank.tp)
        self.num_mtp_layers = setup.heads.layers
        self.drafter = architecture.drafter_of(setup.heads)
        # Of an MTP head.
        self.num_features = len(setup.heads.features) if setup.heads.kind == MTP_FEATURES else 0
        self.is_trunk_frozen = setup.trunk_is_frozen

    def rank_in(self, layer: int) -> Rank:
        """Return this rank's settings for decoder layer `layer` (from 0), which depend on the layer's precision."""
        low = self.setup.low_precision
        if low and low.is_in_layer(layer, len(self.layers)):
            return self.low_rank
        return self.rank

    @property
    def vocabularies(self) -> list[int]:
        """Number of logits per position on this rank for each trained loss: first for the trunk's loss, then for each
        head's loss. A reward model has none.
        """
        head_vocabularies = [self.drafted or self.vocab] * self.setup.heads.drafts
        if self.is_trunk_frozen or self.outside.has_score:
            return head_vocabularies
        return [self.outside.local_outputs(self.rank), *head_vocabularies]

    def embedding(self) -> ParameterCount:
        """Count the parameters of the embedding."""
        return ParameterCount(self.vocab * self.hidden)

    def own_inputs(self) -> ParameterCount:
        """Count the parameters of the modules that compute the layers' own inputs (`Outside.own_inputs`)."""
        size, layers = self.outside.own_inputs, len(self.layers)
        return ParameterCount(layers * size * (self.vocab + self.hidden) + size)

    def own_input_bytes(self, layers: int) -> int:
        """Count the bytes of the inputs of this number of layers."""
        return self.rank.hidden_state_bytes(layers * self.outside.own_inputs)

    def output_layer(self) -> ParameterCount:
        """Count the parameters of an untied output layer."""
        return ParameterCount(self.outside.local_outputs(self.rank) * self.hidden)

    def mtp_layer(self) -> ParameterCount:
        """Count the parameters of an MTP layer: norms, a projection, a decoder layer and, in some families, an output
        layer; or of another drafter.
        """
        if self.drafter is not None:
            return self.drafter.parameters(self.rank)
        num_norms = 2 if self.architecture.outside.heads_share_final_norm else 3
        frame = (num_norms + self.num_features) * self.hidden + self.projection_weights()
        if self.outside.heads_have_output_layers:
            frame += self.embedding().total
        return ParameterCount(frame) + self.architecture.mtp_block.parameters(self.rank)

    def projection_weights(self) -> int:
        """Count the weights of a head's projection of embedding and state. If it reads features, later drafts have
        other weights for the state."""
        num_inputs = 2
        if self.num_features:
            num_inputs += self.num_features + 1
        return num_inputs * self.hidden * self.hidden // self.rank.tp

    def head_rows(self) -> list[Row]:
        """Return the bridge rows of a head's linear layers, for adapters."""
        projection = Row("mtp.eh_proj.weight", {"mtp.fc.weight": (self.hidden, 2 * self.hidden)})
        return [projection, *lift(self.architecture.mtp_block.rows(), "mtp.", "mtp.")]

    def layer_activation_bytes(self, number: int) -> int:
        """Count the activation bytes of decoder layer `number`, including adapters."""
        layer, rank, lora = self.layers[number], self.rank_in(number), self.setup.lora
        num_bytes = layer.activation_bytes(rank)
        if lora and lora.has_magnitudes:  # checked first, because listing rows is slow: a layer of DeepSeek-V3 has 770
            num_bytes += adapter_activation_bytes(layer, self.architecture.layer_rows(number), lora, rank)
        if layer.attention.indexer is not None and self.setup.indexer_mode != "frozen":
            num_bytes += layer.parameters(rank).frozen * rank.itemsize  # gradients from the forward pass
        return num_bytes

    def head_activation_bytes(self) -> list[int]:
        """Return the bytes of the activations of each MTP layer, or of another drafter, for all of its drafts."""
        unroll = self.setup.heads.unroll
        if self.drafter is not None:
            of_layers = sum(layer.activation_bytes(self.low_rank) for layer in self.drafter.layers)
            return [self.drafter.runs * of_layers + self.rank.hidden_state_bytes(self.drafter.stored)]
        drafts = [total(self.draft_activations(draft)) for draft in range(self.num_mtp_layers * unroll)]
        # All steps of an unrolled layer share one checkpoint.
        return [sum(drafts[start : start + unroll]) for start in range(0, len(drafts), unroll)]

    def low_precision_head_weights(self) -> int:
        """Count the weights of an MTP layer, or of another drafter, whose products have low precision."""
        if self.drafter is not None:
            return sum(low_precision_weights(layer, self.rank) for layer in self.drafter.layers)
        return self.projection_weights() + low_precision_weights(self.architecture.mtp_block, self.rank)

    def draft_activations(self, head: int) -> list[Activation]:
        """List the activations of one run of an MTP layer, in which it drafts token number `head` (from 0)."""
        rank = self.low_rank
        if self.setup.heads.unroll > 1:  # later steps read the keys of the first, see `model.mtp.UnrolledLayer`
            rank = replace(rank, recomputed=rank.recomputed - {"core_attn", "mla_up_proj"})
        block, lora = self.architecture.mtp_block, self.setup.lora
        num_features = self.num_features if head == 0 else 0
        is_first_of_frozen = self.is_trunk_frozen and head == 0
        id_bytes = adapter_bytes = 0
        if not self.is_trunk_frozen:
            id_bytes = 8 * rank.tokens
        if lora:
            adapter_bytes = adapter_activation_bytes(block, self.head_rows(), lora, rank)
        return [
            Activation("token ids", id_bytes),
            Activation("enorm input", self._head_norm_bytes(rank, has_gradient=not self.is_trunk_frozen)),
            Activation(
                "hnorm input", (1 + num_features) * self._head_norm_bytes(rank, has_gradient=not is_first_of_frozen)
            ),
            Activation(
                "eh_proj input", rank.input_activation_bytes(rank.sequence_tokens, (2 + num_features) * self.hidden)
            ),
            Activation("decoder layer", block.activation_bytes(rank)),
            Activation("adapters", adapter_bytes),
            Activation("output norm input", self._head_norm_bytes(rank, has_gradient=True)),
        ]

    def _head_norm_bytes(self, rank: Rank, has_gradient: bool) -> int:
        """Count the bytes of one norm of an MTP layer.

        Args:
            has_gradient: whether the norm's input has a gradient. A frozen embedding or a frozen trunk's state has
                none. Then only the norm's weight is trained; a fused norm stores its input in both cases.
        """
        num_bytes = rank.norm_activation_bytes(rank.sequence_tokens, self.hidden)
        if has_gradient or rank.is_fused:
            return num_bytes
        return num_bytes - rank.sequence_tokens * FLOAT32 * (self.hidden + 1)

    def loss_activations(self) -> list[Activation]:
        """List the activations of one loss, without logits."""
        states = self.rank.tokens * self.hidden * self.rank.itemsize
        if self.outside.has_score:
            return [Activation("states for the gradient of the score", states)]
        output_states = gradient = 0
        if not self.is_trunk_frozen or self.outside.heads_have_output_layers:
            output_states = states
        if self.setup.is_fused:
            gradient = states
        return [
            Activation("states for the output layer's gradient", output_states),
            Activation("gradient of the states, computed in chunks", gradient),
            # Per position: row, position, label, index of the state, weight, and a mask.
            Activation("labeled positions", self.rank.tokens * (3 * 8 + 8 + 4 + 1)),
        ]

    def rotary_bytes(self) -> int:
        """Count the bytes of cosines and sines, which all layers share.

        Each step of an unrolled layer has its own cosines and sines, for positions that are later by one.
        """
        return 2 * self.rank.length * self.architecture.rotary_channels * self.rank.itemsize * self.setup.heads.unroll


class VirtualStage:
    """The part of a virtual stage on one rank.

    Args:
        holds: letters as in a layout string, such as "Ett" or "tmL".
        first_layer: number of the stage's first decoder layer.
    """

    def __init__(self, model: ModelOnRank, holds: str, first_layer: int):
        self.model, self.holds = model, holds
        last_layer = first_layer + holds.count("t")
        self.layer_numbers = range(first_layer, last_layer)
        self.layers: Sequence[Layer] = model.layers[first_layer:last_layer]
        self.num_mtp_layers = holds.count("m")
        self.is_first, self.is_last = "E" in holds, "L" in holds
        ends_trunk = bool(self.layers) and last_layer == len(model.layers)
        # With MTP layers the final norm follows the last decoder layer; otherwise it precedes the loss.
        self.has_final_norm = self.is_last
        if model.num_mtp_layers:
            self.has_final_norm = ends_trunk

    def describe(self) -> str:
        """Return the stage's letters with counted repetitions, such as "E t*2"."""
        words = []
        for letter, run in itertools.groupby(self.holds):
            count = len(list(run))
            if count > 1:
                letter += f"*{count}"
            words.append(letter)
        return " ".join(words)

    def parameters(self) -> ParameterCount:
        """Count the parameters of this stage."""
        model = self.model
        count = self._trunk_parameters() + self._mtp_parameters() + self._adapter_parameters()
        if self._tower is not None:
            count += self._tower.parameters(model.rank)
        return count

    @property
    def _tower(self) -> Tower | None:
        """The tower, on the first stage."""
        return self.model.architecture.tower if self.is_first else None

    def _trunk_parameters(self) -> ParameterCount:
        model = self.model
        count = sum((layer.parameters(model.rank) for layer in self.layers), ParameterCount())
        has_embedding = self.is_first or self.num_mtp_layers > 0  # MTP layers also embed tokens
        if has_embedding:
            count += model.embedding()
        if self.is_first:
            count += model.own_inputs()
        if self.is_last and not (model.outside.is_tied and has_embedding):
            count += model.output_layer()
        if self.has_final_norm:
            count += ParameterCount(model.hidden)
        return count

    def trained_parameters(self) -> ParameterCount:
        """Count the trained parameters of this stage."""
        mode, trained = self.model.setup.indexer_mode, self._trained_parts()
        if mode == "frozen":
            return trained.without_frozen
        if mode == "joint":
            return ParameterCount(trained.dense + trained.frozen, trained.expert)
        return ParameterCount((self._trunk_parameters() + self._mtp_parameters()).frozen)

    def _trained_parts(self) -> ParameterCount:
        """Count all parameters of the parts of this stage that are trained."""
        setup = self.model.setup
        lora = setup.lora
        if lora is None:
            count = self._mtp_parameters()
            if not self.model.is_trunk_frozen and not setup.freeze_llm:
                count += self._trunk_parameters()
            if self._tower is not None and setup.images:
                count += self._tower.trained_parameters(setup.images.trained)
            return count
        count = self._adapter_parameters() + self._saved_parameters(lora)
        if lora.heads == "full":
            count += self._mtp_parameters()
        return count

    def quantized_weights(self) -> int:
        """Count the bytes of the low-precision copies of weights that the first micro-batch of a step creates.

        A frozen trunk has no gradients, so its copies are needed in only one of the two memory orders.
        """
        model, low = self.model, self.model.setup.low_precision
        if low is None:
            return 0
        trunk_weights = 0
        for number in self.layer_numbers:
            if low.is_in_layer(number, len(model.layers)):
                trunk_weights += low_precision_weights(model.layers[number], model.rank)
        head_weights = model.low_precision_head_weights()
        per_weight = low.quantized.weights
        if model.is_trunk_frozen:
            per_weight /= 2
        return int(trunk_weights * per_weight + self.num_mtp_layers * head_weights * low.quantized.weights)

    def _adapter_parameters(self) -> ParameterCount:
        model, lora = self.model, self.model.setup.lora
        if lora is None:
            return ParameterCount()
        count = ParameterCount()
        for number in self.layer_numbers:
            count += adapter_parameters(model.architecture.layer_rows(number), lora, model.rank)
        if self.num_mtp_layers:
            count += adapter_parameters(model.head_rows(), lora, model.rank) * self.num_mtp_layers
        return count

    def _saved_parameters(self, lora: Lora) -> ParameterCount:
        """Count the parameters of this stage that are trained in full in addition to adapters."""
        model = self.model
        rows = [*model.outside.rows(), *itertools.chain(*map(model.architecture.layer_rows, self.layer_numbers))]
        number = 0
        for name, parameters in saved_parameters(rows, lora, model.rank).items():
            has_embedding = self.is_first or self.num_mtp_layers > 0
            is_here = {
                "embedding.word_embeddings.weight": has_embedding,
                "output_layer.weight": self.is_last and not (model.outside.is_tied and has_embedding),
                "decoder.final_layernorm.weight": self.has_final_norm,
            }
            if is_here.get(name, self.is_first or not name.startswith("own_inputs.")):
                number += parameters
        return ParameterCount(number)

    def _mtp_parameters(self) -> ParameterCount:
        if not self.num_mtp_layers:
            return ParameterCount()
        return self.model.mtp_layer() * self.num_mtp_layers

    def forward_pass(self) -> "ForwardPass":
        """Return the bytes of activations and logits of one forward pass that are stored or recomputed for the backward
        pass.
        """
        model, rank = self.model, self.model.rank
        entries, recomputed = self._layer_activations()
        entries += self._activations_outside_layers()
        images = model.setup.images
        if self._tower is not None and images:
            num_items = images.items_per_row * rank.rows
            tower = self._tower.activation_bytes(num_items, rank.itemsize, images.trained, recomputes=images.recomputes)
            entries.append(Activation("tower", tower.stored))
            recomputed = max(recomputed, tower.recomputed)
        if not self.is_last:
            return ForwardPass(tuple(entries), recomputed)
        vocabularies = model.vocabularies
        entries += model.loss_activations() * (len(vocabularies) + model.outside.has_score)
        entries.append(
            Activation("draft vocabulary's rows of the output matrix", model.drafted * model.hidden * rank.itemsize)
        )
        num_tokens = rank.tokens
        if rank.is_fused:
            num_tokens = min(rank.tokens, CHUNK)
        num_logits = num_tokens * max(vocabularies, default=0)
        rounded, is_capped = 0, model.outside.logits_cap is not None
        if rank.itemsize < FLOAT32:
            rounded = num_logits * rank.itemsize
        if rank.is_fused and rounded and rank.tp == 1:
            # The compiled kernel overwrites rounded logits. Without a trained trunk, heads are compared with as many of
            # the trunk's, unless --mtp_loss is ce. A cap has a derivative for each logit.
            number = 1 + model.is_trunk_frozen + is_capped
            return ForwardPass(tuple(entries), recomputed, passing_logits=number * rounded)
        if rank.is_fused:
            passing = num_logits * (FLOAT32 + is_capped * rank.itemsize) + rounded
            return ForwardPass(tuple(entries), recomputed, passing_logits=passing)
        # With a cap, the logits before the multiplication by the cap are stored as well.
        logits = rank.tokens * sum(vocabularies) * (FLOAT32 + is_capped * rank.itemsize)
        return ForwardPass(tuple(entries), recomputed, logits=logits, passing_logits=rounded)

    def _activations_outside_layers(self) -> list[Activation]:
        """List the activations of the trunk outside its layers."""
        model, rank = self.model, self.model.rank
        entries = []
        if self.layers or self.num_mtp_layers:
            entries.append(Activation("rotary embeddings", model.rotary_bytes()))
        if model.is_trunk_frozen:
            return entries
        # In float32, norms store the tensor that a later stage receives.
        keeps_received = rank.itemsize < FLOAT32 and not rank.is_fused
        if self.is_first:
            entries.append(Activation("token ids", 8 * rank.tokens))
        elif keeps_received and model.setup.recompute.recompute_granularity != "full":
            entries.append(Activation("states from the previous stage", rank.hidden_state_bytes(model.hidden)))
        if self.is_first and model.outside.own_inputs:
            size, layers = model.outside.own_inputs, len(model.layers)
            norm = rank.norm_activation_bytes(rank.sequence_tokens * layers, size)
            entries.append(Activation("inputs of layers", norm + model.own_input_bytes(layers)))
            entries.append(Activation("token ids of inputs of layers", 8 * rank.tokens))
        if self.has_final_norm:
            entries.append(
                Activation("final norm input", rank.norm_activation_bytes(rank.sequence_tokens, model.hidden))
            )
        return entries

    def _layer_activations(self) -> tuple[list[Activation], int]:
        """List the activations of decoder and MTP layers, and count the peak bytes of recomputation."""
        model = self.model
        states = model.rank.hidden_state_bytes(model.hidden)
        layers = []
        if not model.is_trunk_frozen:
            layers = [model.layer_activation_bytes(number) for number in self.layer_numbers]
        trunk_bytes, again = _recompute(model.setup, layers, states)
        unroll = model.setup.heads.unroll
        mtp_layers = model.head_activation_bytes()[: self.num_mtp_layers]
        mtp_bytes, mtp_again = _recompute(model.setup, mtp_layers, (1 + unroll) * states)
        again = max(again, mtp_again) + self._block_bytes()
        entries = [Activation("decoder layers", trunk_bytes), Activation("MTP layers", mtp_bytes)]
        entries.append(Activation("selections", self._shared_selections()))
        entries.append(Activation("gradients of indexers", self._indexer_gradients()))
        return entries, again

    def _shared_selections(self) -> int:
        """Count the bytes of the selections of indexers that recomputed layers read again."""
        indexers = [layer.attention.indexer for layer in self.layers]
        is_full = self.model.setup.recompute.recompute_granularity == "full"
        if self.model.is_trunk_frozen or not is_full or not any(each and each.is_shared for each in indexers):
            return 0
        return sum(each.selection_bytes(self.model.rank) for each in indexers if each)

    def _indexer_gradients(self) -> int:
        """Count the bytes of the gradients that a trunk without other gradients computes in the forward pass."""
        if self.model.setup.indexer_mode != "indexer_only":
            return 0
        return sum(layer.parameters(self.model.rank).frozen for layer in self.layers) * self.model.rank.itemsize

    def _block_bytes(self) -> int:
        """Count the bytes of temporary scores of an indexer."""
        length = self.model.setup.max_length
        indexers = [layer.attention.indexer for layer in self.layers]
        return max((each.block_bytes(length) for each in indexers if each), default=0)


@dataclass(frozen=True)
class ForwardPass:
    """Bytes of one forward pass of a virtual stage on one rank."""

    entries: tuple[Activation, ...]
    """Activations that are stored until the backward pass, without logits."""
    recomputed: int
    """Peak size of the activations that the backward pass recomputes, in bytes."""
    logits: int = 0
    """Bytes of the softmax of all losses, in float32, which are stored until the backward pass."""
    passing_logits: int = 0
    """Bytes of temporary logits: the logits of one loss before they are converted to float32, or the logits of one
    chunk."""

    @property
    def activation_bytes(self) -> int:
        """The bytes of all `entries`."""
        return total(self.entries)


def _recompute(setup: Setup, layers: list[int], boundary: int) -> tuple[int, int]:
    """Return the bytes that consecutive layers store, and the peak bytes of recomputation.

    Args:
        layers: bytes that each layer stores without recomputation.
        boundary: bytes of the input of a group of recomputed layers.
    """
    recompute, number = setup.recompute, setup.recompute.recompute_num_layers
    if recompute.recompute_granularity != "full" or not layers:
        return sum(layers), 0
    if recompute.recompute_method == "block":  # each of the first layers separately
        return len(layers[:number]) * boundary + sum(layers[number:]), max(layers[:number])
    spans = [sum(layers[start : start + number]) for start in range(0, len(layers), number)]
    return len(spans) * boundary, max(spans)
