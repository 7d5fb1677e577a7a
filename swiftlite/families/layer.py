"""Define a decoder layer as a value, and the interface of its two halves, attention and MLP.

A new kind of attention or MLP is a frozen dataclass with the methods of the interface (see `attention.py` and
`mlp.py`), and a megatron-core spec in `model/specs.py`. Code that counts layers (`plan/cost/stage_memory.py`,
`plan/cost/flops.py`, `plan/layout.py`) uses only this interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

from swiftlite.bridge.rows import Row, renamed
from swiftlite.families.absent import NoAttention
from swiftlite.families.indexer import Indexer
from swiftlite.families.rank import ParameterCount, Rank


class Sublayer(Protocol):
    """One half of a decoder layer: its attention or its MLP."""

    recompute_modules: ClassVar[tuple[str, ...]]
    """Values of --recompute_modules that select modules of this half."""
    needs_sequence_parallel: ClassVar[str]
    """Description of the part that tensor-parallel ranks can split only if sequence parallelism is on; empty without
    such a part."""

    layer_arguments: ClassVar[tuple[str, ...]]
    """Arguments of `mcore_config` in which layers can differ, because the spec of each layer states them."""

    @property
    def tensor_split(self) -> dict[str, int]:
        """The sizes that tensor-parallel ranks split evenly, by their names in config.json."""
        ...

    def mcore_config(self) -> dict[str, Any]:
        """Return the arguments of megatron-core's TransformerConfig for this attention or MLP."""
        ...

    def rows(self) -> list[Row]:
        """Return the bridge rows, with names relative to the layer.

        A row maps Hugging Face tensors to a Megatron parameter. Hugging Face names are those of Llama, or of the first
        family with such a module.
        """
        ...

    def parameters(self, rank: Rank) -> ParameterCount:
        """Count the parameters on a rank."""
        ...

    def macs_per_token(self) -> int:
        """Count the multiply-adds of a forward pass per token, over all ranks.

        Attention scores and values are not included, because their work grows with the sequence length.
        """
        ...

    def input_activation_bytes(self, rank: Rank) -> int:
        """Return the bytes of the input that autograd saves on a rank."""
        ...

    def activation_bytes(self, rank: Rank) -> int:
        """Return the bytes that autograd saves on a rank for the backward pass, except the input."""
        ...


class Attention(Sublayer, Protocol):
    """The attention of a layer, in which tokens see each other."""

    takes_packed_rows: ClassVar[bool]
    """Whether this attention supports packed rows, without attention between sequences."""
    takes_parts_of_rows: ClassVar[bool]
    """Whether this attention supports context parallelism."""
    is_recurrent: ClassVar[bool]
    """Whether this attention has a fixed-size state instead of keys and values."""

    @property
    def hidden(self) -> int:
        """Size of the model's states."""
        ...

    @property
    def indexer(self) -> Indexer | None:
        """Selects the tokens that a token sees; None: it sees all tokens of `window`."""
        ...

    @property
    def window(self) -> int | None:
        """Number of tokens that a token sees, including itself; None: itself and all tokens before it."""
        ...

    @property
    def rotary(self) -> int:
        """Number of rotary channels of a head; 0 without rotary embeddings."""
        ...

    def gathered(self, rank: Rank) -> int:
        """Return the bytes of keys and values (or similar tensors) that each context-parallel rank gathers from this
        rank.
        """
        ...

    def macs_per_pair(self) -> int:
        """Count the multiply-adds of a forward pass per pair of tokens that see each other, over all ranks.

        The result is 0 if the work grows linearly with the number of tokens.
        """
        ...


class FeedForward(Sublayer, Protocol):
    """The MLP of a layer, which processes each token separately."""

    norms_input: ClassVar[bool]
    """Whether the MLP normalizes its input itself, instead of the layer."""

    @property
    def experts(self) -> int:
        """Number of routed experts; 0 without experts."""
        ...

    @property
    def topk(self) -> int:
        """Number of experts that the router selects per token; 0 without experts."""
        ...

    @property
    def splits_experts(self) -> bool:
        """Whether expert-tensor-parallel ranks can split the experts."""
        ...

    @property
    def expert_split(self) -> dict[str, int]:
        """The sizes that expert-tensor-parallel ranks split evenly, by their names in config.json."""
        ...


def num_pairs(length: int, window: int | None) -> int:
    """Count the pairs of tokens of a sequence that see each other, including each token with itself."""
    pairs = length * (length + 1) // 2
    if window is not None and length > window:
        pairs -= (length - window) * (length - window + 1) // 2
    return pairs


@dataclass(frozen=True)
class Layer:
    """A decoder layer: norm, attention, norm, MLP. One half can be absent (`absent.py`), with its norm.

    Attributes:
        hf_names: maps prefixes of Hugging Face names (within a layer) in the bridge rows of attention and MLP to the
            prefixes of this family. For example {"mlp.gate_proj.": "feed_forward.w1."}.
        residual_multiplier: factor of the outputs of attention and MLP before they are added to the state.
        has_input_norms: whether the inputs of attention and MLP are normalized.
        has_output_norms: whether the outputs of attention and MLP are normalized before they are added to the state.
        has_scalar: whether the output of the layer is multiplied by a number of the layer, which is not trained.
            Requires `has_output_norms`.
        own_input: size of an input of the layer in addition to the state (`Outside.own_inputs`), which is gated by the
            state and added to it behind the MLP; 0 without one. Requires `has_output_norms`.
    """

    attention: Attention
    mlp: FeedForward
    hf_names: Mapping[str, str] = field(default_factory=dict)
    residual_multiplier: float = 1.0
    has_input_norms: bool = True
    has_output_norms: bool = False
    has_scalar: bool = False
    own_input: int = 0

    def rows(self) -> list[Row]:
        """Return the bridge rows, with names relative to the layer."""
        hidden = self.attention.hidden
        names = {}
        if self.norms_attention_input:
            names["input_layernorm"] = "input_layernorm"
        if self.norms_mlp_input:
            before_mlp = "pre_feedforward_layernorm" if self.has_output_norms else "post_attention_layernorm"
            names["pre_mlp_layernorm"] = before_mlp
        if self.has_output_norms:
            names |= {
                "post_attention_layernorm": "post_attention_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            }
        norms = [Row(f"{mcore}.weight", {f"{hf}.weight": (hidden,)}) for mcore, hf in names.items()]
        scalar = [Row("layer_scalar", {"layer_scalar": (1,)}, is_frozen=True)] if self.has_scalar else []
        rows = (*self.attention.rows(), *norms, *self.mlp.rows(), *self._rows_of_own_input(), *scalar)
        return [self._renamed(row) for row in rows]

    def _rows_of_own_input(self) -> list[Row]:
        hidden, size = self.attention.hidden, self.own_input
        if not size:
            return []
        return [
            Row("own_input_gate.weight", {"per_layer_input_gate.weight": (size, hidden)}),
            Row("own_input_projection.weight", {"per_layer_projection.weight": (hidden, size)}),
            Row("own_input_norm.weight", {"post_per_layer_input_norm.weight": (hidden,)}),
        ]

    def _renamed(self, row: Row) -> Row:
        return replace(row, hf={renamed(name, self.hf_names): shape for name, shape in row.hf.items()})

    @cached_property
    def matrices(self) -> list[tuple[str, int, int]]:
        """The (Megatron name, output size, input size) of every matrix that is computed.

        Of identical experts, only the first is included.
        """
        found = []
        for row in self.rows():
            shapes = list(row.hf.values())
            is_other_expert = ".local_experts." in row.mcore and ".local_experts.0." not in row.mcore
            is_bias = row.mcore.endswith("bias")  # [1, E] in some routers
            if len(shapes[0]) == 2 and not (is_bias or is_other_expert or row.is_frozen):
                found.append((row.mcore, sum(shape[0] for shape in shapes), shapes[0][1]))
        return found

    def parameters(self, rank: Rank) -> ParameterCount:
        """Count the parameters on a rank."""
        weights = self._num_norms * self.attention.hidden + self._own_input_weights
        own = ParameterCount(weights, frozen=int(self.has_scalar))
        return own + self.attention.parameters(rank) + self.mlp.parameters(rank)

    @property
    def norms_attention_input(self) -> bool:
        """Whether the layer normalizes the input of attention."""
        return self.has_input_norms and not isinstance(self.attention, NoAttention)

    @property
    def norms_mlp_input(self) -> bool:
        """Whether the layer normalizes the input of the MLP."""
        return self.has_input_norms and not self.mlp.norms_input

    @property
    def _num_norms(self) -> int:
        norms = self.norms_attention_input + self.norms_mlp_input + 2 * self.has_output_norms
        return norms + (self.own_input > 0)

    @property
    def _own_input_weights(self) -> int:
        """Number of weights of the two matrices of the layer's own input, which every tensor-parallel rank has."""
        return 2 * self.own_input * self.attention.hidden

    def macs_per_token(self) -> int:
        """Count the multiply-adds per token of a forward pass, without attention scores and values."""
        return self.attention.macs_per_token() + self.mlp.macs_per_token() + self._own_input_weights

    def activation_bytes(self, rank: Rank) -> int:
        """Return the bytes that autograd saves on a rank for norms, and for attention and MLP with their
        inputs."""
        norms = self._num_norms * rank.norm_activation_bytes(rank.sequence_tokens, self.attention.hidden)
        inputs = self.attention.input_activation_bytes(rank) + self.mlp.input_activation_bytes(rank)
        outside = norms + inputs
        if self.own_input:  # the state; gates before and after the activation, and their product with the input
            outside += rank.hidden_state_bytes(self.attention.hidden + 3 * self.own_input)
        return outside + self.attention.activation_bytes(rank) + self.mlp.activation_bytes(rank)
