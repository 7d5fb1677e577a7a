"""One rank of a training run as a value, and what is counted on it: parameters, and bytes that autograd keeps."""

from dataclasses import dataclass

FLOAT32 = 4


@dataclass(frozen=True)
class Quantized:
    """Bytes of a number of 8 or 4 bits, with its share of a scale.

    Attributes:
        copy: of a tensor in one order: by rows, or by columns.
        weights: of a weight as a layer keeps it while it trains: in both orders.
    """

    copy: float
    weights: float


@dataclass(frozen=True)
class Rank:
    """The settings that determine the sizes of a rank's modules, apart from the model; by default one rank without
    tokens.

    Attributes:
        tp: number of tensor-parallel ranks, which split every matrix.
        cp: number of context-parallel ranks, which split every row.
        ep: number of expert-parallel ranks, which the experts are distributed over.
        etp: number of ranks that split the matrices of an expert.
        sequence_parallel: whether tensor-parallel ranks split rows by position between matrices.
        itemsize: bytes of a parameter and of an activation: 2 for bfloat16, 4 for float32.
        rows: number of rows of a micro-batch.
        length: number of tokens of a row on this rank.
        zero_centered_norms: whether norms add their weights to 1, so that they round last.
        is_fused: whether norms and activations save only their inputs, and losses no logits.
        copies_views: whether norms save a copy of an input that is a view, as Transformer Engine's do.
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
    zero_centered_norms: bool = False
    is_fused: bool = False
    copies_views: bool = False
    recomputed: frozenset[str] = frozenset()
    quantized: Quantized | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch inside attention and MLP."""
        return self.rows * self.length

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a micro-batch outside of them: in norms, and in the states from layer to layer."""
        if self.sequence_parallel:
            return self.tokens // self.tp
        return self.tokens

    @property
    def copies_norm_inputs(self) -> bool:
        """Whether norms save their input in float32 in addition to the original one."""
        return self.itemsize < FLOAT32 and not self.is_fused

    def hidden_state_bytes(self, width: int) -> int:
        """Return the bytes of one state of `width` numbers for each of `sequence_tokens`."""
        return self.sequence_tokens * width * self.itemsize

    def input_activation_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes that a linear layer keeps of its input for the gradient of its weight."""
        bytes_per_number = self.quantized.copy if self.quantized else self.itemsize
        return int(tokens * width * bytes_per_number)

    def norm_activation_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes that a norm keeps: its input in float32, the scale, and the result before the weight; a
        fused one its input unchanged, and the scale."""
        if self.is_fused:
            return tokens * (self.itemsize * width + FLOAT32)
        result = FLOAT32 if self.zero_centered_norms else self.itemsize
        return tokens * ((FLOAT32 + result) * width + FLOAT32)


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters of one rank: those on every rank of the expert-parallel group, and those of its experts."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> "ParameterCount":
        return ParameterCount(self.dense * times, self.expert * times)

    @property
    def total(self) -> int:
        return self.dense + self.expert
