"""Define linear attention, a kind of attention with a fixed-size state instead of a KV cache.

`model/attention/gated_delta_net.py` computes it; `attention.py` defines the kinds of full attention.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from swiftlite.bridge.join import Interleave, InterleaveBlocks
from swiftlite.bridge.rows import Row, lift
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank

CHUNK = 64
"""Number of tokens that are computed together. With more tokens there are fewer steps, but the triangular system of
each step grows quadratically."""


class WithoutPairs:
    """Attention in which no pair of tokens has a score: no window, no indexer and no rotary embeddings."""

    needs_sequence_parallel: ClassVar[str] = ""
    layer_arguments: ClassVar[tuple[str, ...]] = ()
    takes_packed_rows: ClassVar[bool] = True
    takes_parts_of_rows: ClassVar[bool] = True
    indexer = None
    window = None
    rotary = 0

    def mcore_config(self) -> dict[str, Any]:
        """Return no arguments, because the module receives its sizes from this object."""
        return {}

    def macs_per_pair(self) -> int:
        return 0


@dataclass(frozen=True)
class GatedDeltaNet(WithoutPairs):
    """Qwen3-Next's linear attention: a short convolution, the gated delta rule, and a gated norm.

    A group of heads is a key head with its query, and `value_heads / key_heads` value heads. Megatron's parameters are
    ordered by group, so that tensor-parallel ranks can split groups:

        in_proj_qkvz of a group    query, key, values, gates of the values
        in_proj_ba of a group      beta and decay of each value
        conv1d of a group          query, key, values

    Attributes:
        hidden: size of the model's states.
        key_heads: number of heads of queries and keys.
        value_heads: number of heads of values, a multiple of `key_heads`.
        key_head_dim: size of a query head and a key head.
        value_head_dim: size of a value head.
        kernel: number of tokens in the convolution.
        hf_is_grouped: whether the projections are also ordered by group in files (Qwen3-Next). Otherwise files contain
            all queries, then all keys, and so on (Qwen3.5).
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("core_attn",)
    is_recurrent: ClassVar[bool] = True

    hidden: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int
    hf_is_grouped: bool = True

    @property
    def tensor_split(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.key_heads}

    def rows(self) -> list[Row]:
        keys, values = self._widths(Rank())
        convolved = 2 * keys + values
        by_group = InterleaveBlocks(self.key_heads, ((keys, keys, values),))
        rows = [
            *self._projections(),
            Row("conv1d.weight", {"conv1d.weight": (convolved, 1, self.kernel)}, by_group),
            Row("A_log", {"A_log": (self.value_heads,)}, is_exact=True),
            Row("dt_bias", {"dt_bias": (self.value_heads,)}, is_exact=True),
            Row("norm.weight", {"norm.weight": (self.value_head_dim,)}, is_exact=True),
            Row("out_proj.weight", {"out_proj.weight": (self.hidden, values)}),
        ]
        return lift(rows, "self_attention.", "linear_attn.")

    def _projections(self) -> list[Row]:
        keys, values = self._widths(Rank())
        hidden, heads = self.hidden, self.value_heads
        if self.hf_is_grouped:
            return [
                Row("in_proj_qkvz.weight", {"in_proj_qkvz.weight": (2 * (keys + values), hidden)}),
                Row("in_proj_ba.weight", {"in_proj_ba.weight": (2 * heads, hidden)}),
            ]
        qkv = {"in_proj_qkv.weight": (2 * keys + values, hidden), "in_proj_z.weight": (values, hidden)}
        per_head = {"in_proj_b.weight": (heads, hidden), "in_proj_a.weight": (heads, hidden)}
        by_group = InterleaveBlocks(self.key_heads, ((keys, keys, values), (values,)))
        return [
            Row("in_proj_qkvz.weight", qkv, by_group),
            Row("in_proj_ba.weight", per_head, Interleave(self.key_heads)),
        ]

    def parameters(self, rank: Rank) -> ParameterCount:
        keys, values = self._widths(rank)
        per_head = 2 * (self.value_heads // rank.tp)
        convolution = (2 * keys + values) * self.kernel
        return ParameterCount(self._matrices(rank) + convolution + per_head + self.value_head_dim)

    def macs_per_token(self) -> int:
        keys, values = self._widths(Rank())
        convolution = (2 * keys + values) * self.kernel
        # Per head and token. Within a chunk: the products of keys with keys and with queries, the triangular system,
        # and the products with values. With the state: reading it with the key and the query, and writing to it. Half
        # of each square matrix is zero, but is computed.
        key, value = self.key_head_dim, self.value_head_dim
        within = CHUNK * (2 * key + (key + value) / 2 + value)
        with_state = 3 * key * value
        return self._matrices(Rank()) + convolution + int(self.value_heads * (within + with_state))

    def gathered(self, rank: Rank) -> int:
        keys, values = self._widths(rank)
        return rank.itemsize * rank.tokens * (2 * keys + 2 * values + 2 * self.value_heads // rank.tp)

    def input_activation_bytes(self, rank: Rank) -> int:
        return rank.hidden_state_bytes(self.hidden)

    def activation_bytes(self, rank: Rank) -> int:
        """Return the bytes that autograd saves on a rank with torch's implementation. The CUDA kernels save less."""
        keys, values = self._widths(rank)
        heads, groups = self.value_heads // rank.tp, self.key_heads // rank.tp
        convolved = 2 * keys + values
        # Before and after the convolution, and queries and keys in float32, which are a view of the output in a float32
        # model.
        wide = convolved if rank.itemsize == FLOAT32 else 2 * keys
        mixed = 2 * rank.itemsize * convolved + FLOAT32 * wide
        # The output, the normed and weighted output, the gate, its SiLU, and the product of both.
        gated = (3 * FLOAT32 + 3 * rank.itemsize) * values
        per_head = heads * (3 * FLOAT32 + rank.itemsize) + groups * 2 * FLOAT32
        if "core_attn" in rank.recomputed:
            rule = heads * (2 * FLOAT32 * self.key_head_dim + FLOAT32 + rank.itemsize) + rank.itemsize * values
        else:
            rule = FLOAT32 * heads * self._delta_rule_bytes()
        return rank.tokens * rank.cp * (mixed + gated + per_head + rule)  # context-parallel ranks compute whole rows

    def _delta_rule_bytes(self) -> int:
        """Return the number of values that the delta rule stores per token and value head."""
        key, value = self.key_head_dim, self.value_head_dim
        return 6 * key + 3 * value + 6 * CHUNK + 2 * key * value // CHUNK + 4

    def _widths(self, rank: Rank) -> tuple[int, int]:
        """Return the number of channels of all keys and of all values on a rank.

        Queries have as many channels as keys.
        """
        return self.key_heads // rank.tp * self.key_head_dim, self.value_heads // rank.tp * self.value_head_dim

    def _matrices(self, rank: Rank) -> int:
        keys, values = self._widths(rank)
        heads = self.value_heads // rank.tp
        return (2 * keys + 3 * values + 2 * heads) * self.hidden
