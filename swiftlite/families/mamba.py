"""Define the layer of Mamba-2, a kind of attention with a fixed-size state instead of a KV cache.

`model/attention/mamba2.py` computes it; `linear_attention.py` defines the other kind with such a state.
"""

from dataclasses import dataclass
from typing import ClassVar

from swiftlite.bridge.join import InterleaveBlocks
from swiftlite.bridge.rows import Row, lift
from swiftlite.families.linear_attention import CHUNK, WithoutPairs
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank


@dataclass(frozen=True)
class Mamba2(WithoutPairs):
    """The layer of Mamba-2: a short convolution, a state space model, and a gated norm.

    The heads of a group have the same B, with which they write to their states, and the same C, with which they read
    them. Megatron's parameters are ordered by group, so that tensor-parallel ranks can split groups:

        in_proj_zxbcdt of a group    gates z, inputs x, B, C, time steps dt
        conv1d of a group            x, B, C

    Attributes:
        hidden: size of the model's states.
        heads: number of heads, a multiple of `groups`.
        head_dim: number of channels of a head.
        groups: number of groups of heads. Each has a norm of its own.
        state: size of B and C.
        kernel: number of tokens in the convolution.
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("core_attn",)
    is_recurrent: ClassVar[bool] = True

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def tensor_split(self) -> dict[str, int]:
        return {"n_groups": self.groups}

    def rows(self) -> list[Row]:
        inner, of_groups = self.widths(Rank())
        convolved = inner + 2 * of_groups
        projected = (inner, inner, of_groups, of_groups, self.heads)
        in_groups = InterleaveBlocks(self.groups, ((inner, of_groups, of_groups),))
        rows = [
            Row(
                "in_proj_zxbcdt.weight",
                {"in_proj.weight": (sum(projected), self.hidden)},
                InterleaveBlocks(self.groups, (projected,)),
            ),
            Row("conv1d.weight", {"conv1d.weight": (convolved, 1, self.kernel)}, in_groups),
            Row("conv1d.bias", {"conv1d.bias": (convolved,)}, in_groups),
            Row("A_log", {"A_log": (self.heads,)}, is_exact=True),
            Row("D", {"D": (self.heads,)}, is_exact=True),
            Row("dt_bias", {"dt_bias": (self.heads,)}, is_exact=True),
            Row("norm.weight", {"norm.weight": (inner,)}),
            Row("out_proj.weight", {"out_proj.weight": (self.hidden, inner)}),
        ]
        return lift(rows, "self_attention.", "mamba.")

    def parameters(self, rank: Rank) -> ParameterCount:
        inner, of_groups = self.widths(rank)
        convolution = (inner + 2 * of_groups) * (self.kernel + 1)
        return ParameterCount(self._matrices(rank) + convolution + 3 * (self.heads // rank.tp) + inner)

    def macs_per_token(self) -> int:
        inner, of_groups = self.widths(Rank())
        convolution = (inner + 2 * of_groups) * self.kernel
        # Within a chunk: the products of C with B, and with the inputs. With the state: reading it and writing to it.
        # Half of each square matrix is zero, but is computed.
        within = CHUNK * (of_groups + inner)
        return self._matrices(Rank()) + convolution + within + 2 * inner * self.state

    def gathered(self, rank: Rank) -> int:
        inner, of_groups = self.widths(rank)
        return rank.itemsize * rank.tokens * (2 * inner + 2 * of_groups + self.heads // rank.tp)

    def input_activation_bytes(self, rank: Rank) -> int:
        return rank.hidden_state_bytes(self.hidden)

    def activation_bytes(self, rank: Rank) -> int:
        """Return the bytes that autograd saves on a rank, for rows of many chunks."""
        inner, of_groups = self.widths(rank)
        heads, groups = self.heads // rank.tp, self.groups // rank.tp
        convolved = inner + 2 * of_groups
        # Before and after the convolution, and the inputs of heads.
        mixed = rank.itemsize * (2 * convolved + inner)
        # In float32 the scan's output, the gate, its SiLU, their product, and the normed product; the norm's result.
        gated = (5 * FLOAT32 + rank.itemsize) * inner
        per_head = FLOAT32 * (heads + groups)  # time steps before softplus, and the factor of the norm
        if "core_attn" in rank.recomputed:
            scan = rank.itemsize * convolved + FLOAT32 * heads
        else:
            # Inputs before and after their product with time steps. B and C, before and after their products with
            # decays for each head. Four square matrices per chunk, and the state before it.
            vectors = 2 * inner + 2 * of_groups + 4 * heads * self.state + 3 * heads
            scan = FLOAT32 * (vectors + 4 * heads * CHUNK + inner * self.state // CHUNK)
        return rank.tokens * rank.cp * (mixed + gated + per_head + scan)  # context-parallel ranks compute whole rows

    def widths(self, rank: Rank) -> tuple[int, int]:
        """Return the number of channels of all heads, and the size of the B of all groups, on a rank."""
        return self.heads // rank.tp * self.head_dim, self.groups // rank.tp * self.state

    def _matrices(self, rank: Rank) -> int:
        inner, of_groups = self.widths(rank)
        return (3 * inner + 2 * of_groups + self.heads // rank.tp) * self.hidden
