"""Implement an EAGLE-3 drafter (`families/eagle3.py`) in plain torch on top of a transformers trunk.

It has the interface of an `MtpHead`, with which `MtpSteps` drafts.

Shapes: B batch (always 1), S positions, H hidden size, F features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from swiftlite.bridge.rows import HfConfig

_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("hidden_act", "attention_bias", "mlp_bias"),
)


class Eagle3Drafter(nn.Module):
    """The drafter. Modules have the names of its files.

    Args:
        hf_config: the drafter's own config.json, from `eagle3.own_config`.
        attention: transformers' name of the implementation of attention.
    """

    make_mask = staticmethod(create_causal_mask)
    output_layer = None  # that of the trunk

    def __init__(self, hf_config: HfConfig, attention: str):
        super().__init__()
        settings: dict[str, Any] = {key: hf_config[key] for key in _SETTINGS}
        settings["attn_implementation"] = attention
        config = LlamaConfig(**settings)
        size, num_features = hf_config["hidden_size"], hf_config["num_aux_hidden_states"]
        self.fc = nn.Linear(num_features * size, size, bias=False)
        self.fc_norm = nn.ModuleList()
        if hf_config["fc_norm"]:
            self.fc_norm += [LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(num_features)]
        self.midlayer: Any = LlamaDecoderLayer(config, layer_idx=0)
        self.midlayer.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        # The layer reads embedding and state side by side, so only the inputs of its attention are wider than in Llama.
        projections = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(projections, name, nn.Linear(2 * size, getattr(projections, name).out_features, bias=False))
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)

    @property
    def final_layernorm(self) -> nn.Module:
        """The output norm, by its name in an `MtpHead`."""
        return self.norm

    def fused(self, features_BSH: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the state [B, S, H] that the first step reads, from F features."""
        if self.fc_norm:
            features_BSH = [norm(each) for norm, each in zip(self.fc_norm, features_BSH, strict=True)]
        return self.fc(torch.cat([*features_BSH], dim=-1))

    def forward(self, embedding_BSH: torch.Tensor, hidden_BSH: torch.Tensor, **layer_kwargs: Any) -> torch.Tensor:
        """Return the state [B, S, H] before the output norm; arguments are those of `MtpHead.forward`."""
        layer = self.midlayer
        pair = torch.cat((layer.input_layernorm(embedding_BSH), layer.hidden_norm(hidden_BSH)), dim=-1)
        hidden_BSH = hidden_BSH + layer.self_attn(pair, **layer_kwargs)[0]
        return hidden_BSH + layer.mlp(layer.post_attention_layernorm(hidden_BSH))

    def new_cache(self) -> DynamicCache:
        """Return an empty cache of the layer."""
        return DynamicCache()
