"""Clusters of tokens: a drafter with them drafts only tokens of the few clusters that a state selects first.

Each cluster has a centroid, and the state's product with it is the score of the cluster. Only tokens of the clusters
with the largest scores have logits. The selection has no gradient, so training compares all logits with the target, as
without clusters, and adds a loss of the scores: their cross-entropy with the cluster of the label. Its gradient reaches
only the centroids, which thus follow the states.

Shapes: N positions, V vocabulary on this rank, T all tokens, A size of a state, C clusters.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from swiftlite.base.errors import UserError
from swiftlite.model.loss.losses import Group, Selected, TokenLoss


class TokenClusters(nn.Module):
    """The clusters, whole on every tensor-parallel rank.

    Args:
        size: size of a state, A.
        vocab: number of tokens.
        clusters: number of clusters, which have the same number of tokens.
        selected: number of clusters that a state selects.
        dtype: dtype of the centroids.
    """

    def __init__(self, size: int, vocab: int, clusters: int, selected: int, dtype: torch.dtype):
        super().__init__()
        self.selected = selected
        self.centroids = nn.Linear(size, clusters, bias=False, dtype=dtype)
        self.centroids.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        # The tokens of the first cluster, then those of the second, and so on.
        self.token_ordering: torch.Tensor
        self.register_buffer("token_ordering", torch.zeros(vocab, dtype=torch.int64))

    def check(self, directory: Path) -> None:
        """Check that the clusters have each token once.

        Args:
            directory: where the tokens were read from, for errors.

        Raises:
            UserError: they do not.
        """
        if not torch.equal(self.token_ordering.sort().values.cpu(), torch.arange(self.num_tokens)):
            problem = (
                f"{directory}: masked_embedding.token_ordering does not have each of {self.num_tokens} tokens once"
            )
            raise UserError(problem, "copy or download the assistant again")

    def cluster_of(self, num_rows: int) -> torch.Tensor:
        """Return the cluster of each row of the output matrix, int64 [num_rows]; C for rows that are padding."""
        token_T, clusters = self.token_ordering, self.centroids.out_features
        place_T = torch.arange(len(token_T), device=token_T.device)
        return token_T.new_full((num_rows,), clusters).index_put((token_T,), place_T // (len(token_T) // clusters))

    def masked(self, logits_NV: torch.Tensor, states_NA: torch.Tensor, group: Group) -> torch.Tensor:
        """Return logits in which those of tokens outside of the selected clusters are replaced by the smallest selected
        logit of the position minus 1, as in transformers.

        Args:
            group: the ranks that share the vocabulary.
        """
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        cluster_V = self.cluster_of(size * logits_NV.size(1)).chunk(size)[rank]
        index_Nk = self.centroids(states_NA).topk(self.selected, dim=-1).indices
        # One more column, never selected, is the cluster of padding rows (`cluster_of`).
        is_selected_NC = index_Nk.new_zeros(len(states_NA), self.centroids.out_features + 1, dtype=torch.bool)
        is_selected_NV = is_selected_NC.scatter_(1, index_Nk, value=True)[:, cluster_V]
        # Over all ranks, because the selected tokens of a position may all be on one of them.
        smallest_N1 = logits_NV.detach().masked_fill(~is_selected_NV, torch.inf).amin(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(smallest_N1, dist.ReduceOp.MIN, group=group)
        return torch.where(is_selected_NV, logits_NV, smallest_N1 - 1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.token_ordering.size(0)

    def loss(self, states_NA: torch.Tensor, label_N: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy [N] of the scores with the cluster of the label, float32, in nats."""
        # Detached: the states follow the loss over the tokens, and the centroids follow the states.
        scores_NC = self.centroids(states_NA.detach()).float()
        cluster_T = self.cluster_of(self.num_tokens)
        return F.cross_entropy(scores_NC, cluster_T[label_N], reduction="none")


def with_clusters(
    loss: TokenLoss,
    clusters: TokenClusters | None,
    states_NA: torch.Tensor,
    selected: Selected,
    share_BS: torch.Tensor | None,
) -> TokenLoss:
    """Return the loss of all logits with that of the scores added; without clusters the loss.

    Args:
        selected: the positions in the micro-batch that the states belong to, and their labels.
        share_BS: as for `chunked_loss`.
    """
    if clusters is None:
        return loss
    where = (selected.row_N, selected.pos_N)
    added_N = clusters.loss(states_NA, selected.label_N)
    added_BS, total = added_N.new_zeros(selected.shape).index_put(where, added_N), loss.total
    if total is not None:  # then the loss of each position has no gradient
        assert share_BS is not None
        total = total + (added_BS * share_BS).sum()
        added_BS = added_BS.detach()
    return replace(loss, loss_BS=loss.loss_BS + added_BS, total=total)
