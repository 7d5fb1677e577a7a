"""Define one rank of a training run as a value, to count its parameters and the bytes that autograd saves."""

from dataclasses import dataclass, replace

FLOAT32 = 4


@dataclass(frozen=True)
class Quantized:
    """Bytes per element of tensors in 8 or 4 bits, including the element's share of a scale.

    Attributes:
        copy: bytes per element of a tensor in one memory order: by rows, or by columns.
        weights: bytes per element of a trained weight, which is stored in both orders.
    """

    copy: float
    weights: float


@dataclass(frozen=True)
class Rank:
    """The settings outside of the model that determine the sizes of a rank's modules.

    Attributes:
        tp: number of tensor-parallel ranks, which split every matrix.
        cp: number of context-parallel ranks, which split every row.
        ep: number of expert-parallel ranks, which the experts are distributed over.
        etp: number of ranks that split the matrices of an expert.
        sequence_parallel: whether tensor-parallel ranks split rows by position between matrices.
        itemsize: bytes of a parameter and of an activation: 2 for bfloat16, 4 for float32.
        rows: number of rows of a micro-batch.
        length: number of tokens of a row on this rank.
        norms_round_last: whether norms round only after the multiplication by the weight.
        is_fused: whether kernels are fused. Norms and activations then save only their inputs, and losses save no
            logits.
        copies_views: whether norms save a copy of an input that is a view, as the norms of Transformer Engine do.
        recomputed: modules without saved activations, by the names of --recompute_modules.
        quantized: low precision of linear layers; None for the model's own precision.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    itemsize: int = 2
    rows: int = 0
    length: int = 0
    norms_round_last: bool = False
    is_fused: bool = False
    copies_views: bool = False
    recomputed: frozenset[str] = frozenset()
    quantized: Quantized | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch in attention and MLP."""
        return self.rows * self.length

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of a micro-batch in norms, and in the hidden states between layers."""
        if self.sequence_parallel:
            return self.tokens // self.tp
        return self.tokens

    @property
    def copies_norm_inputs(self) -> bool:
        """Whether norms save a float32 copy of their input in addition to the input."""
        return self.itemsize < FLOAT32 and not self.is_fused

    def hidden_state_bytes(self, width: int) -> int:
        """Return the bytes of one state of `width` numbers for each of the `sequence_tokens` tokens."""
        return self.sequence_tokens * width * self.itemsize

    def input_activation_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes of the input that a linear layer saves for the gradient of its weight."""
        bytes_per_number = self.quantized.copy if self.quantized else self.itemsize
        return int(tokens * width * bytes_per_number)

    def norm_activation_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes that a norm saves.

        These are its input in float32, the scale, and the result before the multiplication by the weight. A fused norm
        saves its unchanged input and the scale.
        """
        if self.is_fused:
            return tokens * (self.itemsize * width + FLOAT32)
        result = FLOAT32 if self.norms_round_last else self.itemsize
        return tokens * ((FLOAT32 + result) * width + FLOAT32)


@dataclass(frozen=True)
class ParameterCount:
    """The number of parameters of a rank.

    Attributes:
        dense: parameters that all expert-parallel ranks hold.
        expert: parameters of the rank's own experts.
        frozen: parameters that are not trained by default (`Row.is_frozen`).
    """

    dense: int = 0
    expert: int = 0
    frozen: int = 0

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.dense + other.dense, self.expert + other.expert, self.frozen + other.frozen)

    def __mul__(self, times: int) -> "ParameterCount":
        return ParameterCount(self.dense * times, self.expert * times, self.frozen * times)

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.frozen

    @property
    def without_frozen(self) -> "ParameterCount":
        """The parameters that can be trained."""
        return replace(self, frozen=0)
