"""Draft models of vLLM that run MTP heads with features (`families/mtp_features.py`).

vLLM's method "eagle3" gives a draft model the inputs of decoder layers that its config names. From these,
`combine_hidden_states` computes one state per token, which `forward` reads together with the next token. `forward` also
returns the state that the next draft reads. Here, this state is the projection of everything but the embedding.

`plugin.py` registers the classes, one for each architecture of a trunk; `__getattr__` makes them.

Shapes: T tokens of all requests of a batch, H hidden size, F features.
"""

import inspect
from types import new_class
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from swiftlite.engines.loading.head_weights import heads_of
from swiftlite.engines.vllm import models
from swiftlite.engines.vllm.plugin import DRAFTS, layers_like_the_last
from swiftlite.families.mtp_features import CLASS_ENDING


@support_torch_compile(dynamic_arg_dims={"ids_T": 0, "positions_T": -1, "hidden_TH": 0, "embedding_TH": 0})
class FeatureHead(nn.Module):
    """The head and the trunk's embedding. Modules have the names of the files after `mtp.`.

    Args:
        vllm_config: vLLM's config, which `support_torch_compile` reads.
        config: config of the draft model.
        layer: the decoder layer.
        embedding_multiplier: factor of embeddings.
        norm: class of the norms.
    """

    def __init__(
        self, *, vllm_config: VllmConfig, config: Any, layer: nn.Module, embedding_multiplier: float, norm: Any
    ):
        super().__init__()
        size, eps, num_states = config.hidden_size, config.rms_norm_eps, 1 + len(heads_of(config).features)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size)
        self.embedding_multiplier = embedding_multiplier
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.ModuleList(norm(size, eps=eps) for _ in range(num_states))
        self.fc_embedding = ReplicatedLinear(size, size, bias=False, return_bias=False)
        self.fc_first = ReplicatedLinear(num_states * size, size, bias=False, return_bias=False)
        self.fc_later = ReplicatedLinear(size, size, bias=False, return_bias=False)
        self.layers = nn.ModuleList([layer])
        self.norm = norm(size, eps=eps)
        # Other layers of vLLM add their output to the residual themselves.
        self.layer_returns_residual = "residual" in inspect.signature(layer.forward).parameters

    def forward(
        self,
        ids_T: torch.Tensor | None,
        positions_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        embedding_TH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state [T, H] after the output norm, and what the next draft reads. Exactly one of `ids_T` and
        `embedding_TH` is given.

        Args:
            hidden_TH: result of `first_states`, or the second result of this method.
        """
        read_TH: torch.Tensor = self.embed_tokens(ids_T) if embedding_TH is None else embedding_TH
        # `hidden_TH` is projected already: the sum is the product of one matrix with [embedding, states].
        hidden_TH = hidden_TH + self.fc_embedding(self.pre_fc_norm_embedding(read_TH * self.embedding_multiplier))
        (layer,) = self.layers
        if self.layer_returns_residual:
            hidden_TH, residual_TH = layer(positions=positions_T, hidden_states=hidden_TH, residual=None)
            after_TH, before_TH = self.norm(hidden_TH, residual_TH)
        else:
            before_TH = layer(positions=positions_T, hidden_states=hidden_TH)
            after_TH = self.norm(before_TH)
        return after_TH, self.fc_later(self.pre_fc_norm_hidden[0](before_TH))

    def first_states(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Return what the first draft reads, [T, H], from [features; output of the last layer], [T, (F + 1) * H]."""
        # vLLM has the output of the last layer at the end; in training, the trunk's state comes first.
        *features_TH, state_TH = states_TH.chunk(len(self.pre_fc_norm_hidden), dim=-1)
        pairs = zip(self.pre_fc_norm_hidden, [state_TH, *features_TH], strict=True)
        return self.fc_first(torch.cat([norm(part_TH.contiguous()) for norm, part_TH in pairs], dim=-1))


class FeatureDraft(models.MtpDraft):
    """A draft model for the method "eagle3". Classes that `__getattr__` makes add the decoder layer of a family, and
    the base class that this method requires.
    """

    # vLLM then shares both of the trunk (llm_base_proposer.py: _maybe_share_embeddings, _maybe_share_lm_head).
    has_own_embed_tokens = has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        # Not those of the base classes, which would build the drafters of `MtpDraft` and of EAGLE-3.
        nn.Module.__init__(self)
        speculative = vllm_config.speculative_config
        assert speculative is not None
        # vLLM wraps the config for this method.
        of_draft: Any = speculative.draft_model_config.hf_config
        self.config: Any = of_draft.model
        trunk = self.config.architectures[0].removesuffix(CLASS_ENDING)
        self.config.update(layers_like_the_last(trunk, self.config, 1))
        self.model: Any = FeatureHead(
            vllm_config=vllm_config,
            config=self.config,
            layer=self.make_layer(vllm_config, maybe_prefix(prefix, "mtp.layers.0")),
            embedding_multiplier=self.embedding_multiplier,
            norm=self.norm_class,
        )
        self.add_output_layer(prefix)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what the first draft reads, [T, H], from the states [T, (F + 1) * H] of the trunk."""
        return self.model.first_states(hidden_states)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state [T, H] for `compute_logits`, and the state that the next draft reads."""
        return self.model(input_ids, positions, hidden_states, inputs_embeds)


def __getattr__(name: str) -> type:
    """Return the class for the trunk in a name such as LlamaForCausalLMMtpFeaturesEagle3, and store it.

    Raises:
        AttributeError: there is no such trunk.
    """
    draft = DRAFTS.get(name.removesuffix(CLASS_ENDING)) if name.endswith(CLASS_ENDING) else None
    if draft is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    members = {"__doc__": "A draft model of an MTP head with features.", "__module__": __name__}
    # vLLM checks the class of an eagle3 draft (llm_base_proposer.py: propose), so EAGLE-3's class must be a base. It is
    # the last base, so that methods of the others precede its own.
    bases = (FeatureDraft, getattr(models, draft), Eagle3LlamaForCausalLM)
    made = new_class(name, bases, exec_body=lambda body: body.update(members))
    globals()[name] = made
    return made
