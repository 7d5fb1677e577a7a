"""The indexer of DeepSeek sparse attention (DSA). Does not import torch."""

from dataclasses import dataclass
from math import prod

from swiftlite.bridge.rows import Row, shapes_of


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

    def macs_per_token(self, hidden: int, q_lora_rank: int) -> int:
        """Return the multiply-adds of the projections for a token, with the arguments of `rows`."""
        return sum(prod(shape) for shape in shapes_of(self.rows(hidden, q_lora_rank)).values() if len(shape) == 2)

    def macs_per_pair(self) -> int:
        """Return the multiply-adds of the scores for a pair of tokens."""
        return 0 if self.is_shared else self.heads * (self.head_dim + 1)
