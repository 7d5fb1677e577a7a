"""Inputs that decoder layers have in addition to the state (per-layer embeddings of Gemma 4 E2B and E4B).

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, L decoder layers, P size of a
layer's input.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.layers.output_norms import OutputNormsLayer
from swiftlite.model.layers.tensor_parallel import VocabParallelEmbedding, sum_over_sequence_ranks
from swiftlite.model.shared_states import SharedStates


class OwnInputs(nn.Module):
    """Computes the inputs of all layers from the ids and embeddings of tokens.

    Args:
        config: config of the model.
        vocab: number of rows of the embedding.
        size: P.
        norm: class of the norm.
        tp_group: ranks that split the embedding. Each has the whole projection.
    """

    def __init__(self, config: TransformerConfig, vocab: int, size: int, norm: type, tp_group: dist.ProcessGroup):
        super().__init__()
        width, dtype = config.num_layers * size, config.params_dtype
        assert config.init_method is not None
        self.word_embeddings = VocabParallelEmbedding(
            vocab,
            width,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=tp_group,
        )
        self.word_embeddings.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.projection = nn.Linear(config.hidden_size, width, bias=False, dtype=dtype)
        self.norm = norm(config, size, config.layernorm_epsilon)
        sum_over_sequence_ranks(config, self.projection.parameters())
        self.size, self.is_in_order = size, not config.sequence_parallel
        # Rounded to the model's precision, as in transformers' embedding module.
        self.multiplier = torch.tensor(size**0.5, dtype=dtype).item()
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, input_ids: torch.Tensor, embedding_SBH: torch.Tensor) -> torch.Tensor:
        """Return the inputs [S, B, L, P] of all layers.

        Args:
            input_ids: [B, S of all sequence-parallel ranks].
            embedding_SBH: embeddings of the tokens, with their factor.
        """
        token = self.word_embeddings(input_ids)
        # megatron-core's embedding returns [S, B, H] only with sequence parallelism, otherwise [B, S, H].
        if self.is_in_order:
            token = token.transpose(0, 1)
        token = token * self.multiplier
        projected = (self.projection(embedding_SBH) * self.projection_scale).unflatten(-1, (-1, self.size))
        return (self.norm(projected) + token.unflatten(-1, (-1, self.size))) * 2**-0.5


class OwnInputLayer(OutputNormsLayer):
    """A decoder layer that adds its own input to the state behind the MLP, multiplied by gates of the state.

    Args:
        config: config of the model.
        args, kwargs: further arguments of `OutputNormsLayer`.
        norm: class of the norms.
        input_size: P.
    """

    def __init__(self, config: TransformerConfig, *args: Any, norm: type, input_size: int, **kwargs: Any):
        super().__init__(config, *args, norm=norm, **kwargs)
        hidden, dtype = config.hidden_size, config.params_dtype
        self.own_input_gate = nn.Linear(hidden, input_size, bias=False, dtype=dtype)
        self.own_input_projection = nn.Linear(input_size, hidden, bias=False, dtype=dtype)
        self.own_input_norm = norm(config, hidden, config.layernorm_epsilon)
        for linear in (self.own_input_gate, self.own_input_projection):
            sum_over_sequence_ranks(config, linear.parameters())

    def before_scalar(self, hidden_SBH: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        """Return the state [S, B, H] with the layer's own input added.

        Args:
            attention_mask: `SharedStates`, which has the input.
        """
        assert isinstance(attention_mask, SharedStates)
        gate = F.gelu(self.own_input_gate(hidden_SBH), approximate="tanh")
        own = self.own_input_projection(gate * attention_mask.inputs[self.layer_number - 1])
        return hidden_SBH + self.own_input_norm(own)
