"""The indexer of DeepSeek sparse attention (DSA), its selection of tokens, and its loss.

The score of a key for a query is a sum over the indexer's heads:

    score = sum over heads of( weight(query) / sqrt(heads) * relu( q(query) . k(key) / sqrt(C) ) )

Each query sees the `topk` keys with the highest scores. The loss of the indexer (DeepSeek-V3.2, arXiv 2512.02556,
section 2.1.1) is a divergence for each query, over the keys that the query sees:

    KL( mean over attention heads of the attention to the keys || softmax of the scores )

All tensor-parallel ranks compute the whole indexer. Scores exist only for a block of queries at a time: the forward
pass also computes the gradients of the loss with respect to the indexer's parameters, and the backward pass only
multiplies them.

Shapes: S sequence, B batch, H hidden size, L latent of queries, I heads of the indexer, C channels of its heads; Q
queries of a block and K keys of one sequence, N attention heads on this tensor-parallel rank, D their channels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from swiftlite.families import indexer as families
from swiftlite.families.indexer import BLOCK
from swiftlite.model.attention.rope import rotation
from swiftlite.model.layers.exact import KeepsPrecision
from swiftlite.runtime.mesh import Mesh


class Place(NamedTuple):
    """Queries of one sequence, and the keys that they may see: the last query sees all of them.

    Attributes:
        queries, query_row: the queries in a tensor [S, B, ...].
        keys, key_row: the keys in a tensor [K, B, ...].
    """

    queries: slice
    query_row: int
    keys: slice
    key_row: int

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    def blocks(self, size: int) -> Iterator["Place"]:
        """Yield parts with at most `size` queries, each with the keys up to its last query."""
        num_before = self.keys.stop - self.num_queries  # end of the keys before the first query
        for start in range(0, self.num_queries, size):
            end = min(start + size, self.num_queries)
            queries = slice(self.queries.start + start, self.queries.start + end)
            yield self._replace(queries=queries, keys=slice(self.keys.start, num_before + end))

    def seen(self, device: torch.device) -> torch.Tensor:
        """Return which keys come no later than each query, bool [Q, K]."""
        all_QK = torch.ones(self.num_queries, self.num_keys, dtype=torch.bool, device=device)
        return all_QK.tril(self.num_keys - self.num_queries)


@dataclass(frozen=True)
class Index:
    """Hold what an indexer computes: queries [S, B, I, C], keys [K, B, C], and weights of its heads [S, B, I]."""

    query: torch.Tensor
    key: torch.Tensor
    weight: torch.Tensor

    def scores(self, place: Place) -> torch.Tensor:
        """Return the scores [Q, K] of queries and keys, float32, with the order of operations of transformers."""
        query_QIC = self.query[place.queries, place.query_row].float()
        key_KC = self.key[place.keys, place.key_row].float()
        weight_Q1I = self.weight[place.queries, place.query_row].unsqueeze(1)
        products_QIK = torch.matmul(query_QIC, key_KC.T) * query_QIC.size(-1) ** -0.5
        return torch.matmul(weight_Q1I, products_QIK.relu()).squeeze(1)


class Indexer(KeepsPrecision):
    """The parameters of an indexer, and its projections.

    All tensor-parallel ranks hold the whole tensors. Those of exact bridge rows stay float32 in a 16-bit model. The
    parameters have gradients only in a run that trains indexers.

    Args:
        config: a `MLATransformerConfig`.

    Attributes:
        mean_loss: loss of this rank's tokens, without coefficient, summed since it was last set to None.
    """

    wq_b: nn.Parameter
    wk: nn.Parameter
    k_norm: nn.Parameter
    k_norm_bias: nn.Parameter
    weights_proj: nn.Parameter

    def __init__(self, indexer: families.Indexer, config: Any):
        super().__init__()
        assert config.q_lora_rank is not None
        self.heads, self.head_dim, self.rope_interleave = indexer.heads, indexer.head_dim, indexer.rope_interleave
        self.rotary, self._rotation = config.qk_pos_emb_head_dim, rotation(config)
        self.mean_loss: torch.Tensor | None = None
        self.exact: list[str] = []
        for row in indexer.rows(config.hidden_size, config.q_lora_rank):
            name = row.mcore.removeprefix("indexer.")
            (shape,) = row.hf.values()
            initial = torch.zeros(shape, dtype=torch.float32 if row.is_exact else config.params_dtype)
            self.register_parameter(name, nn.Parameter(initial, requires_grad=config.indexer_loss_coeff > 0))
            if row.is_exact:
                self.exact.append(name)

    @property
    def is_trained(self) -> bool:
        return self.wq_b.requires_grad

    def forward(self, hidden_SBH: torch.Tensor, latent_SBL: torch.Tensor, rotary_emb: torch.Tensor) -> Index:
        """Project tokens.

        Args:
            latent_SBL: the latent of queries after its norm.
            rotary_emb: output of `RotaryEmbedding` for these tokens.
        """
        query_SBIC = F.linear(latent_SBL, self.wq_b).unflatten(-1, (self.heads, self.head_dim))
        key_SBC = F.linear(hidden_SBH, self.wk)
        normed_SBC = F.layer_norm(key_SBC.float(), (self.head_dim,), self.k_norm, self.k_norm_bias, eps=1e-6)
        weight_SBI = F.linear(hidden_SBH.to(self.weights_proj.dtype), self.weights_proj).float() * self.heads**-0.5
        key_SBC = self._rotate(normed_SBC.to(key_SBC.dtype).unsqueeze(2), rotary_emb).squeeze(2)
        return Index(self._rotate(query_SBIC, rotary_emb), key_SBC, weight_SBI)

    def _rotate(self, heads: torch.Tensor, rotary_emb: torch.Tensor) -> torch.Tensor:
        """Rotate the first channels of heads [S, B, heads, C]. Their order is the same for queries and keys."""
        pos, rest = heads.split([self.rotary, self.head_dim - self.rotary], dim=-1)
        if self.rope_interleave:
            pos = pos.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
        return torch.cat([self._rotation(pos, rotary_emb), rest], dim=-1)


def block_size(heads: int, place: Place) -> int:
    """Return the number of queries whose scores of `heads` heads exist at a time."""
    return max(BLOCK // (heads * place.num_keys), 1)


@torch.no_grad()
def select(index: Index, places: Sequence[Place], topk: int) -> list[torch.Tensor | None]:
    """Return the keys that each query sees, for each place: int32 [queries, topk], from the first key of the place.

    A query with fewer keys before it sees all of them, and its other entries are 0. None: all queries of the place see
    all keys before them.
    """
    selected: list[torch.Tensor | None] = []
    for place in places:
        if place.num_keys <= topk:
            selected.append(None)
            continue
        blocks = place.blocks(block_size(index.query.size(2), place))
        selected.append(torch.cat([_highest(index.scores(block), block, topk) for block in blocks]))
    return selected


def _highest(score_QK: torch.Tensor, place: Place, topk: int) -> torch.Tensor:
    """Return the keys with the highest scores that each query may see, int32 [Q, topk].

    Of keys with equal scores, the first one is selected, so that the selection does not depend on the number of later
    keys, as padding. `torch.topk` selects any of them.
    """
    seen_QK = place.seen(score_QK.device)
    # Integers in the order of the scores; -0.0 becomes 0.0.
    bits_QK = (score_QK + 0.0).view(torch.int32)
    # Bits of negative floats are ordered in reverse, which flipping all but the sign corrects.
    order_QK = torch.where(bits_QK < 0, bits_QK ^ 0x7FFFFFFF, bits_QK).long() << 32
    # The low 32 bits order equal scores: the first key has the largest number.
    order_QK -= torch.arange(place.num_keys, device=score_QK.device)
    order_QK.masked_fill_(~seen_QK, torch.iinfo(torch.int64).min)
    key_QT = order_QK.topk(min(topk, place.num_keys), dim=-1).indices
    key_QT = key_QT.masked_fill(~seen_QK.gather(1, key_QT), 0)
    return F.pad(key_QT, (0, topk - key_QT.size(1))).int()


def visible(place: Place, selected: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return which keys each query of a place sees, bool [Q, K].

    Args:
        selected: result of `select` for these queries.
    """
    if selected is None:
        return place.seen(device)
    none_QK = torch.zeros(place.num_queries, place.num_keys, dtype=torch.bool, device=device)
    return none_QK.scatter(1, selected.long(), True)


@dataclass(frozen=True)
class Teacher:
    """The attention that an indexer learns.

    Attributes:
        query_SBND, key_KBND: queries and keys of the attention.
        scale: factor of its scores.
        tp_group: the ranks that share its heads.
    """

    query_SBND: torch.Tensor
    key_KBND: torch.Tensor
    scale: float
    tp_group: dist.ProcessGroup

    @torch.no_grad()
    def attention(self, place: Place, visible_QK: torch.Tensor) -> torch.Tensor:
        """Return the mean over all heads of the attention to visible keys, [Q, K], float32."""
        query_NQD = self.query_SBND[place.queries, place.query_row].transpose(0, 1).float()
        key_NDK = self.key_KBND[place.keys, place.key_row].permute(1, 2, 0).float()
        score_NQK = torch.matmul(query_NQD, key_NDK).mul_(self.scale).masked_fill_(~visible_QK, -torch.inf)
        sum_QK = score_NQK.softmax(dim=-1).sum(dim=0)
        if self.tp_group.size() > 1:
            dist.all_reduce(sum_QK, group=self.tp_group)
        return sum_QK / (len(query_NQD) * self.tp_group.size())


def loss_of(
    indexer: Indexer,
    index: Index,
    teacher: Teacher,
    places: Sequence[Place],
    selected: Sequence[torch.Tensor | None],
    weight_SB: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of the divergences of all queries, a scalar with gradients of the indexer's parameters.

    Args:
        index: result of the indexer, with gradients; keys are those of whole rows.
        selected: result of `select`; only None for the divergence over all keys before a query.
        weight_SB: weight of each query.
    """
    outputs = [index.query, index.key, index.weight]
    # In float32, because many blocks add to the gradient of a key.
    sums = [torch.zeros_like(output, dtype=torch.float32) for output in outputs]
    total = weight_SB.new_zeros(())
    for place, of_place in zip(places, selected, strict=True):
        # By the one with more heads, whose scores need more memory.
        size = block_size(max(indexer.heads, teacher.query_SBND.size(2)), place)
        first = place.queries.start
        for block in place.blocks(size):
            own = None if of_place is None else of_place[block.queries.start - first : block.queries.stop - first]
            visible_QK = visible(block, own, weight_SB.device)
            target_QK = teacher.attention(block, visible_QK)
            parts = _block_leaves(index, block)
            with torch.enable_grad():
                of_block = Place(slice(0, block.num_queries), 0, slice(0, block.num_keys), 0)
                score_QK = Index(*parts).scores(of_block).masked_fill(~visible_QK, -torch.inf)
                # The target is 0 where the logarithm is -inf, and 0 * -inf would be NaN.
                log_QK = score_QK.log_softmax(dim=-1).masked_fill(~visible_QK, 0)
                loss_Q = torch.xlogy(target_QK, target_QK).sum(-1) - (target_QK * log_QK).sum(-1)
                loss = (loss_Q * weight_SB[block.queries, block.query_row]).sum()
            gradients = torch.autograd.grad(loss, parts)
            total += loss.detach()
            rows = (block.query_row, block.key_row, block.query_row)
            tokens = (block.queries, block.keys, block.queries)
            for summed, gradient, part, row in zip(sums, gradients, tokens, rows, strict=True):
                summed[part, row] += gradient.squeeze(1)
    # One backward pass through the projections, with the sums over all blocks.
    parameters = list(indexer.parameters())
    gradients = torch.autograd.grad(
        outputs, parameters, [each.to(output.dtype) for each, output in zip(sums, outputs, strict=True)]
    )
    return _Known.apply(total, gradients, *parameters)  # type: ignore[return-value]


def _block_leaves(index: Index, block: Place) -> list[torch.Tensor]:
    """Return the queries, keys and weights of a block, [Q or K, 1, ...], with gradients of their own."""
    parts = (
        index.query[block.queries, block.query_row],
        index.key[block.keys, block.key_row],
        index.weight[block.queries, block.query_row],
    )
    return [part.detach().unsqueeze(1).requires_grad_() for part in parts]


class _Known(torch.autograd.Function):
    """A scalar whose gradients with respect to parameters are already known."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = grad_outputs
        return None, None, *(gradient * factor.to(gradient.dtype) for gradient in ctx.saved_tensors)


def take_indexer_loss(model: Iterable[nn.Module], mesh: Mesh) -> torch.Tensor:
    """Return the loss of indexers since the last call, averaged over trained indexers and without its coefficient, a
    float64 scalar on the device. Collective.
    """
    values = torch.zeros(2, dtype=torch.float64, device=mesh.device.torch_device)
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, Indexer) and module.is_trained:
                values[1] += 1
                if module.mean_loss is not None:
                    values[0] += module.mean_loss.double()
                    module.mean_loss = None
    dist.all_reduce(values)
    total, num_indexers = values
    # Tensor-parallel ranks have the same tokens; the others of a stage have a part of the tokens each.
    num_parts = dist.get_world_size() // mesh.pp.size() // mesh.tp.size()
    return total * num_parts / num_indexers.clamp(min=1)
