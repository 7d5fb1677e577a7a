"""Draft with an assistant of Gemma 4 (`families/gemma4_assistant.py`), a class of transformers, on top of its trunk.

transformers' generation gives queries another position and window than training and vLLM. This module calls the same
layers with those of training, and computes the keys and values that they read, as training does.

Shapes: B batch (always 1), S positions, H hidden size of the trunk, G key-value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, Gemma4AssistantForCausalLM, Gemma4UnifiedAssistantForCausalLM
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from swiftlite.bridge.rows import shapes_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.transformers.draft_generator import DraftSteps
from swiftlite.families.gemma4_assistant import PREFIX, own_config
from swiftlite.families.resolved import HfModel

_CLASSES: dict[str, Any] = {
    "gemma4_assistant": Gemma4AssistantForCausalLM,
    "gemma4_unified_assistant": Gemma4UnifiedAssistantForCausalLM,
}


class Gemma4Assistant(nn.Module):
    """The assistant.

    Args:
        network: transformers' class.
        read_layers: the decoder layers of the trunk whose keys and values it reads.
    """

    def __init__(self, network: Gemma4AssistantForCausalLM, read_layers: Sequence[Any]):
        super().__init__()
        self.network: Any = network
        self._read_layers = tuple(read_layers)  # in a tuple, so that they are not registered as submodules

    @property
    def output_layer(self) -> nn.Module:
        """The assistant's own output layer."""
        return self.network.lm_head

    def fused(self, states_BSH: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the trunk's states and the inputs of its layers as one tensor, [B, S, (1 + layers) * H]."""
        return torch.cat([*states_BSH], dim=-1)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for the keys and values of the trunk's layers."""
        return DynamicCache()

    def remember(self, fused: torch.Tensor, cache: DynamicCache, rotary_emb: Any) -> None:
        """Append keys and values that the trunk's layers compute from their inputs to the cache.

        Args:
            fused: result of `fused` for the positions that follow those in the cache.
            rotary_emb: the trunk's rotary embedding.
        """
        _, *inputs_BSH = fused.chunk(1 + len(self._read_layers), dim=-1)
        start = cache.get_seq_length()
        positions = torch.arange(start, start + fused.shape[1], device=fused.device)[None]
        for number, (layer, input_BSH) in enumerate(zip(self._read_layers, inputs_BSH, strict=True)):
            attention, normed_BSH = layer.self_attn, layer.input_layernorm(input_BSH)
            projected_BSGD = attention.k_proj(normed_BSH).unflatten(-1, (-1, attention.head_dim))
            # In full attention of Gemma 4, keys before their norm and rotation are the values (attention_k_eq_v).
            values_BSGD = projected_BSGD
            if attention.v_proj is not None:
                values_BSGD = attention.v_proj(normed_BSH).view(projected_BSGD.shape)
            rotary = rotary_emb(normed_BSH, positions, attention.layer_type)
            keys_BSGD = apply_rotary_pos_emb(attention.k_norm(projected_BSGD), *rotary, unsqueeze_dim=2)
            cache.update(keys_BSGD.transpose(1, 2), attention.v_norm(values_BSGD).transpose(1, 2), number)

    def forward(self, pair_BSH: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the state [B, 1, ...] of a draft after the output norm.

        Args:
            pair_BSH: embedding and state, [B, 1, 2 * H].
            cache: keys and values of all positions up to that of the query.
        """
        network, shared, end = self.network, {}, cache.get_seq_length()
        window = network.config.text_config.sliding_window
        of_layers: Any = cache.layers
        for layer, kept in zip(self._read_layers, of_layers, strict=True):
            is_windowed = layer.self_attn.layer_type == "sliding_attention"
            # The window is applied here, because the cache keeps all keys and the mask below hides none.
            first = max(end - window, 0) if is_windowed else 0
            shared[layer.self_attn.layer_type] = (kept.keys[:, :, first:], kept.values[:, :, first:])
        return network.model(
            inputs_embeds=network.pre_projection(pair_BSH),
            attention_mask=dict.fromkeys(shared),  # all of these keys
            position_ids=torch.tensor([[end - 1]], device=pair_BSH.device),
            shared_kv_states=shared,
            use_cache=False,
        ).last_hidden_state


def load_assistant(model: HfModel, decoder: Any) -> Gemma4Assistant:
    """Load the assistant of a checkpoint for its trunk."""
    own = own_config(model.family, model.config)
    network_class = _CLASSES[own["model_type"]]
    config = network_class.config_class.from_dict(own)
    network: Any = network_class._from_config(config, attn_implementation=decoder.config._attn_implementation)
    with Checkpoint(model.directory) as checkpoint:
        names = shapes_of(model.family.head_rows(model.config, 0))
        tensors = {name.removeprefix(PREFIX): checkpoint.read(name) for name in names}
    # Files leave out the tied copy, and strict loading requires it.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    network.load_state_dict(tensors, strict=True)
    network.tie_weights()
    return Gemma4Assistant(network, [decoder.layers[layer] for layer in model.heads.features])


class AssistantSteps(DraftSteps):
    """Draft with an assistant of Gemma 4. For arguments, see `DraftSteps`."""

    def begin(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Read the trunk's `states`, which are those of `Gemma4Assistant.fused`."""
        (assistant,), (cache,) = self._heads, self._caches
        new = states[:, : ids.shape[1] - 1 - cache.get_seq_length()]
        assistant.remember(new, cache, self._decoder.rotary_emb)
        # The first part of `fused` is the trunk's state; its inputs of layers follow.
        self._state = new[:, -1:, : assistant.network.post_projection.out_features]

    def logits(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of a draft."""
        (assistant,), (cache,) = self._heads, self._caches
        drafted = assistant(torch.cat((self._embeddings(ids[:, -1:]), self._state), dim=-1), cache)
        self._state = assistant.network.post_projection(drafted)
        clusters = assistant.network.masked_embedding
        if clusters is None:
            return self._output(assistant, drafted)
        logits = clusters(drafted[:, -1:], assistant.output_layer.weight)[:, 0]
        # Tokens outside of the selected clusters have the smallest logit. As in vLLM, they are never drawn.
        return logits.masked_fill(logits == logits.amin(dim=-1, keepdim=True), -torch.inf)
