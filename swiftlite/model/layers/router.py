"""The router of a mixture of experts, which does not count padding as load, and keeps bias and counts in float32."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer as McoreMoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter as McoreTopKRouter

from swiftlite.model.layers.dispatcher import LocalTokenDispatcher
from swiftlite.model.layers.exact import KeepsPrecision
from swiftlite.model.layers.recompute import checkpoint
from swiftlite.model.loss.balance import RoutedTokens, tokens_times_loss
from swiftlite.runtime.mesh import Mesh

_SMALLEST_SUM = 1e-12
"""`moe_norm_min` of ERNIE 4.5."""


class TopKRouter(McoreTopKRouter):
    """megatron-core's router with a correctly weighted load-balancing loss and buffers that remain in float32.

    megatron-core multiplies the loss by the number of all tokens of the micro-batch, including padding. The gradients
    are later divided by the number of trained tokens only (`calculate_per_token_loss`, moe/router.py:452 of 0.16.1).
    For long prompts with short answers, the loss is therefore many times too large. This router uses the loss of
    `balance.py`.

    Float16Module casts a model, including the router's buffers, with `bfloat16()`. megatron-core's router converts its
    expert bias back to float32 at the next forward pass, but it was already rounded (the biases of GLM-4.5 are near 0
    and differ by about 1e-3). The token counts stop growing at 256, because bfloat16 cannot represent 257.

    Attributes:
        tokens: description of the tokens of the next call. None: no load-balancing loss is computed, and no load is
            counted.
        mean_loss: load-balancing loss of this rank's tokens, without coefficient, summed since it was last set to None.
    """

    tokens: RoutedTokens | None = None
    mean_loss: torch.Tensor | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "TopKRouter":
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            # Only the device of the converted buffer is used; its values are rounded.
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and choice of experts, both [T, E].

        If all scores are normalized before the selection, megatron-core rounds them to the precision of the logits
        first (moe_utils.py:711 of 0.16.1). In bfloat16, two experts can then have equal scores, and another one is
        selected than in transformers and vLLM, which select by scores in float32.
        """
        if not self.config.moe_router_pre_softmax:
            return super().routing(logits, padding_mask)
        probs_TE, chosen_TE = super().routing(logits.float(), padding_mask)
        return probs_TE.type_as(logits), chosen_TE

    # megatron-core's `routing` calls these four methods. They have an effect only in training and with gradients
    # enabled, so recomputation does not count tokens twice.

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Attach the load-balancing loss over all tokens of the micro-batch (`aux_loss`) to `probs`."""
        if self.tokens is None or not self.get_aux_loss_coeff("aux_loss"):
            return probs
        # All sequences become group 0, and padding remains -1.
        group_T = self.tokens.sequence_T.clamp(max=0)
        return self._with_loss(probs, scores_for_aux_loss, routing_map, group_T, 1)

    def _apply_seq_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Attach the load-balancing loss over each sequence (`seq_aux_loss`) to `probs`."""
        if self.tokens is None or not self.get_aux_loss_coeff("seq_aux_loss"):
            return probs
        group_T = self.tokens.sequence_T
        return self._with_loss(probs, scores_for_aux_loss, routing_map, group_T, self.tokens.num_sequences)

    def apply_z_loss(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Attach the z-loss to `logits` [T, E]: the mean over tokens of the squared logarithm of the sum of
        exponentials (ST-MoE, arXiv 2202.08906, equation 5)."""
        coefficient, tokens = self.config.moe_z_loss_coeff, self.tokens
        if coefficient is None or tokens is None or not (self.training and torch.is_grad_enabled()):
            return logits
        squares_T = logits.float().logsumexp(dim=-1).square().masked_fill(tokens.sequence_T < 0, 0)
        # Times the divisor, by which megatron-core divides all gradients at the end of the step.
        loss = coefficient * tokens.divisor * tokens.mean_weight * squares_T.sum()
        return MoEAuxLossAutoScaler.apply(logits, loss)

    def _apply_expert_bias(self, routing_map: torch.Tensor, *_: Any, **__: Any) -> None:
        """Count the tokens of each expert, from which the expert bias is updated at the end of the step."""
        if self.tokens is None or not self.enable_expert_bias or not torch.is_grad_enabled():
            return
        is_real_T1 = self.tokens.sequence_T[:, None] >= 0
        counts_E = self.get_buffer("local_tokens_per_expert")
        counts_E += self.tokens.load_weight * (routing_map & is_real_T1).sum(dim=0)

    def _with_loss(
        self,
        probs: torch.Tensor,
        scores_TE: torch.Tensor,
        chosen_TE: torch.Tensor,
        group_T: torch.Tensor,
        num_groups: int,
    ) -> torch.Tensor:
        """Return `probs` unchanged, with the loss attached: the backward pass of `probs` also adds the gradient of the
        loss."""
        tokens = self.tokens
        assert tokens is not None
        summed = tokens_times_loss(scores_TE, chosen_TE, group_T, num_groups, self.tp_cp_group)
        mean = tokens.mean_weight * summed
        if self.mean_loss is None:
            self.mean_loss = mean.detach()
        else:
            self.mean_loss = mean.detach() + self.mean_loss
        return MoEAuxLossAutoScaler.apply(probs, self.config.moe_aux_loss_coeff * tokens.divisor * mean)


class Float32Router(KeepsPrecision, TopKRouter):
    """A router whose matrix is float32 even in a 16-bit model."""

    exact = ("weight",)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight.data = self.weight.data.float()


class BiasedSoftmaxRouter(Float32Router):
    """The router of ERNIE 4.5: it selects experts by the softmax of the logits plus a bias.

    The weights of the selected experts are their softmaxes without the bias, divided by their sum. megatron-core
    supports a bias only with sigmoids (transformer_config.py:1593 of 0.16.1), so `moe_router_score_function` is
    sigmoid, and this class replaces the function. The matrix is float32, and the bias [1, E], as in files.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.score_function = "softmax"
        for name in ("expert_bias", "local_tokens_per_expert"):
            self._buffers[name] = self.get_buffer(name)[None]

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, in the precision of the model as in transformers, and choice of experts, both [T, E], for
        logits [S, B, E].
        """
        logits_TE = self.apply_z_loss(logits.flatten(0, -2).float())
        scores_TE = logits_TE.softmax(dim=-1)
        expert_TK = (scores_TE + self.get_buffer("expert_bias")).topk(self.topk, dim=-1).indices
        weight_TK = scores_TE.gather(1, expert_TK)
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True).clamp(min=_SMALLEST_SUM)
        probs_TE = torch.zeros_like(scores_TE).scatter(1, expert_TK, weight_TK).to(self.config.params_dtype)
        chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, expert_TK, True)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            # As megatron-core does: by the experts that would be selected without the bias.
            likely_TK = scores_TE.topk(self.topk, dim=-1).indices
            likely_TE = torch.zeros_like(chosen_TE).scatter(1, likely_TK, True)
            probs_TE = self._apply_aux_loss(probs_TE, scores_TE, likely_TE)
            probs_TE = self._apply_seq_aux_loss(probs_TE, scores_TE, likely_TE)
        self._apply_expert_bias(chosen_TE)
        return probs_TE, chosen_TE


class MoELayer(McoreMoELayer):
    """megatron-core's mixture-of-experts layer, extended to pass information about the tokens to its router.

    megatron-core's MoELayer only passes a mask. Its TransformerLayer passes process groups only to megatron-core's own
    class, so this class reads the groups from the active mesh. If one rank holds all experts, tokens are sorted without
    waiting for the GPU (`dispatcher.py`).
    """

    router: TopKRouter

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        stock: Any = self.token_dispatcher
        if stock.tp_ep_group.size() == 1:
            groups = ProcessGroupCollection(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
            self.token_dispatcher = LocalTokenDispatcher(self.config, groups)
        # This class recomputes the layer: megatron-core's recomputation accepts only tensors as arguments.
        self.is_recomputed = self.moe_layer_recompute
        self.moe_layer_recompute = False

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: None = None, padding_mask: RoutedTokens | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return the experts' outputs for the tokens.

        Args:
            intermediate_tensors: for megatron-core's CUDA graphs, which are not used.
            padding_mask: information about the tokens for the router.
        """
        stock_forward = super().forward

        def compute(hidden_states: torch.Tensor) -> torch.Tensor:
            # Inside of the recomputed function: before the backward pass, other micro-batches set other tokens.
            self.router.tokens = padding_mask
            return stock_forward(hidden_states)[0]

        if self.is_recomputed:
            return checkpoint(self.config, self.attn_tp_group, compute, hidden_states), None
        return compute(hidden_states), None


def take_load_balancing_loss(model: Iterable[torch.nn.Module], mesh: Mesh) -> torch.Tensor:
    """Return the load-balancing loss since the last call, averaged over routers and without its coefficient, a float64
    scalar on the device. Collective.

    The loss is 1 if the load is balanced.
    """
    values = torch.zeros(2, dtype=torch.float64, device=mesh.device.torch_device)
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter) and module.mean_loss is not None:
                values += torch.stack([module.mean_loss.double(), torch.ones_like(module.mean_loss).double()])
                module.mean_loss = None
    dist.all_reduce(values)
    total, num_routers = values
    num_replicas = dist.get_world_size() // mesh.pp.size()  # of each router; each replica has a part of the tokens
    return total * num_replicas / num_routers.clamp(min=1)
