"""The indexer of DeepSeek sparse attention (DSA). Does not import torch."""

from dataclasses import dataclass

from swiftlite.bridge.rows import Row
from swiftlite.families.rank import FLOAT32, Rank

BLOCK = 2**26
"""Maximum number of scores of all heads, or of attention scores, that exist at a time: 256 MB in float32."""
_INDEX_BYTES = 4
_COPIES = 4
"""Number of copies of these scores, such as before and after the ReLU."""


@dataclass(frozen=True)
class Indexer:
    """The indexer of DeepSeek sparse attention (DSA), which selects the tokens that each token sees.

    It selects up to `topk` tokens, so in sequences of up to `topk` tokens it selects all of them. It is trained only
    with --indexer_mode.

    Attributes:
        heads: number of heads of the indexer.
        head_dim: size of a head of the indexer.
        topk: maximum number of tokens that a token sees.
        rope_interleave: whether channels 2i and 2i + 1 are rotated together; otherwise i and i + R / 2, where R is the
            number of rotary channels of the attention.
        is_shared: whether the layer has no indexer of its own, but uses the selection of the last layer with one.
    """

    heads: int
    head_dim: int
    topk: int
    rope_interleave: bool = False
    is_shared: bool = False

    def rows(self, hidden: int, q_lora_rank: int) -> list[Row]:
        """Return the bridge rows. Norm and weights of heads are float32 in DeepSeek's own code.

        Args:
            hidden: size of the model's states, from which keys and weights of heads are projected.
            q_lora_rank: size of the latent of queries.
        """
        if self.is_shared:
            return []
        queries, size = self.heads * self.head_dim, self.head_dim
        return [
            Row("indexer.wq_b", {"indexer.wq_b.weight": (queries, q_lora_rank)}, is_frozen=True),
            Row("indexer.wk", {"indexer.wk.weight": (size, hidden)}, is_frozen=True),
            Row("indexer.k_norm", {"indexer.k_norm.weight": (size,)}, is_exact=True, is_frozen=True),
            Row("indexer.k_norm_bias", {"indexer.k_norm.bias": (size,)}, is_exact=True, is_frozen=True),
            Row(
                "indexer.weights_proj",
                {"indexer.weights_proj.weight": (self.heads, hidden)},
                is_exact=True,
                is_frozen=True,
            ),
        ]

    def macs_per_pair(self) -> int:
        """Return the multiply-adds of the scores for a pair of tokens."""
        return 0 if self.is_shared else self.heads * (self.head_dim + 1)

    def selection_bytes(self, rank: Rank) -> int:
        """Return the bytes of the selected tokens, which are stored until the backward pass."""
        if self.is_shared or not self.selects(rank.length * rank.cp):
            return 0
        return rank.tokens * self.topk * _INDEX_BYTES

    def block_bytes(self, length: int) -> int:
        """Return the bytes of temporary scores for rows of `length` tokens."""
        if not self.selects(length):
            return 0
        return _COPIES * FLOAT32 * min(BLOCK, self.heads * length**2)

    def selects(self, length: int) -> bool:
        """Return whether some tokens of a row of `length` tokens do not see all tokens before them."""
        return length > self.topk
