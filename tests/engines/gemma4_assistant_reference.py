"""Make trunks of Gemma 4 with assistants of transformers, for the same comparisons as `tests/engines/reference.py`.

Queries have the position and the window of vLLM, and those of transformers' generation another one. So this module
calls the layers of transformers' class with a mask and positions of its own, for all positions of a row at once.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)

from tests.engines import drafter_reference
from tests.engines.drafter_reference import add_tensors
from tests.engines.reference import Reference, stack_experts
from tests.tiny import OWN_SIZES, make_tiny_hf, make_tiny_model, memory_name

PREFIX = "mtp.assistant."
LAYERS = 4
CLUSTERS: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 3,
}
"""Settings of an assistant with clusters of tokens, like those of E2B and E4B."""
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
_OF_TRUNK = (
    *("num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
    *("rope_parameters", "vocab_size", "max_position_embeddings", "sliding_window"),
)


def classes_for(of_trunk: dict[str, Any]) -> tuple[Any, Any]:
    """Return transformers' classes of an assistant's config and model for a trunk with this config.json."""
    if of_trunk["model_type"].startswith("gemma4_unified"):
        return Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM
    return Gemma4AssistantConfig, Gemma4AssistantForCausalLM


def config_for(of_trunk: dict[str, Any], **changed: Any) -> Any:
    """Return the config of a tiny assistant for a trunk with this config.json."""
    of_trunk = OWN_SIZES["gemma4_text"] | of_trunk
    config_class, model_class = classes_for(of_trunk)
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(KINDS),
        "num_kv_shared_layers": len(KINDS),
        "layer_types": KINDS,
        "num_attention_heads": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        **{key: of_trunk[key] for key in _OF_TRUNK},
    }
    changed = {"architectures": [model_class.__name__], "dtype": "float32", **changed}
    return config_class(text_config=text, backbone_hidden_size=of_trunk["hidden_size"], **changed)


def random_assistant(of_trunk: dict[str, Any], **changed: Any) -> Any:
    """Return a random assistant, in which no norm or factor of a layer is 1."""
    model: Any = classes_for(of_trunk)[1](config_for(of_trunk, **changed))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor)))
            else:
                tensor.copy_((tensor.ndim == 1) + torch.randn(tensor.shape) * 0.15)
    model.tie_weights()
    return model


def make_trunk(directory: Path, family: str = "gemma4_text", **options: Any) -> Path:
    """Write a tiny trunk, whose last decoder layer has full attention; return its directory."""
    return make_tiny_hf(directory, family, num_hidden_layers=LAYERS, tied=True, **options)


def settings_of(directory: Path) -> dict[str, Any]:
    """Return the settings of the language model in a config.json."""
    config = json.loads((directory / "config.json").read_text())
    return config.get("text_config", config)


def make_assistant(directory: Path, trunk: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> Path:
    """Write a random assistant for a trunk in a directory of its own; return this directory."""
    torch.manual_seed(3)
    model = random_assistant(settings_of(trunk), **changed).to(dtype)
    model.generation_config.num_assistant_tokens = 4
    model.save_pretrained(directory)
    return directory


class AssistantReference(Reference):
    """A trunk and an assistant of transformers."""

    def __init__(self, trunk: Any, assistant: Any):
        nn.Module.__init__(self)
        self.trunk, self.family, self.depth = trunk, "gemma4_text", 1
        self.assistant: Any = assistant
        self.takes_state_before_norm, self.draft_vocab = False, []
        self.heads = nn.ModuleList()

    @classmethod
    def of(cls, trunk: Any, **changed: Any) -> "AssistantReference":
        """Return a trunk with a random assistant."""
        return cls(trunk, random_assistant(trunk.config.to_dict(), **changed))

    @classmethod
    def load(cls, trunk: Path, assistant: Path, family: str = "gemma4_text") -> "AssistantReference":
        """Read a trunk and an assistant from their directories."""
        config = settings_of(trunk)
        overrides = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype", "drafter")}
        model = make_tiny_model(family, config["tie_word_embeddings"], **overrides)
        tensors = load_file(trunk / "model.safetensors")
        named = {memory_name(family, name): tensor for name, tensor in tensors.items()}
        missing, _ = model.load_state_dict(stack_experts(named), strict=False)
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return cls(model, classes_for(config)[1].from_pretrained(assistant, dtype=torch.float32)).eval()

    def mtp_tensors(self) -> dict[str, torch.Tensor]:
        state = self.assistant.state_dict()
        return {PREFIX + name: tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}

    def shared_keys(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the trunk's states after its final norm, and the keys and values that assistants read."""
        output = self.trunk.model(ids_BS, use_cache=False, return_shared_kv_states=True)
        return output.last_hidden_state, output.shared_kv_states

    def step(
        self, embedding_BSH: torch.Tensor, state_BSH: torch.Tensor, shared: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state that the next step reads, [B, S, H], and that of the output layer, [B, S, A], at all
        positions at once."""
        return self.step_at(embedding_BSH, state_BSH, shared, 0)

    def step_at(
        self, embedding_BSH: torch.Tensor, state_BSH: torch.Tensor, shared: Any, ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of a step whose queries have positions that are larger by `ahead`."""
        model, length = self.assistant, embedding_BSH.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        windowed = seen.triu(1 + ahead - model.config.text_config.sliding_window)
        masks = {
            kind: torch.zeros(length, length).masked_fill(~mask, -torch.inf)[None, None]
            for kind, mask in {"full_attention": seen, "sliding_attention": windowed}.items()
        }
        output = model.model(
            inputs_embeds=model.pre_projection(torch.cat((embedding_BSH, state_BSH), dim=-1)),
            attention_mask=masks,
            position_ids=torch.arange(length)[None] + ahead,
            shared_kv_states=shared,
            use_cache=False,
        )
        return model.post_projection(output.last_hidden_state), output.last_hidden_state

    def drafted_logits(self, states_BSA: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, S, V] of drafts. With clusters, transformers takes the smallest logit of a tensor, so
        each position is a tensor of its own."""
        masked, output_layer = self.assistant.masked_embedding, self.assistant.lm_head
        if masked is None:
            return output_layer(states_BSA)
        return torch.cat([masked(each, output_layer.weight) for each in states_BSA.split(1, dim=1)], dim=1)

    def cluster_scores(self, states_BSA: torch.Tensor, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [B, S, C] of the clusters, and the cluster of each token."""
        masked = self.assistant.masked_embedding
        members = masked.token_ordering.view(masked.num_centroids, -1)
        places = (members[None, None] == ids_BS[..., None, None]).any(-1)
        return masked.centroids(states_BSA), places.int().argmax(-1)

    def trained_logits(
        self, rows_BS: torch.Tensor, hidden_BSH: torch.Tensor, num_drafts: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        state, shared = self.shared_keys(rows_BS[:, :-1])
        pairs, padded = [], nn.functional.pad(rows_BS, (0, num_drafts))
        for draft in range(num_drafts):
            ids_BS = padded[:, draft + 1 : draft + rows_BS.shape[1]]
            state, drafted = self.step(self.trunk.get_input_embeddings()(ids_BS), state, shared)
            known, targets = drafted[:, : rows_BS.shape[1] - draft - 2], rows_BS[:, draft + 2 :]
            pairs.append((self.assistant.lm_head(known), targets))
            if self.assistant.masked_embedding is not None:
                pairs.append(self.cluster_scores(known, targets))
        return pairs

    @torch.no_grad()
    def draft_logits_at(
        self, row: list[int], lengths: Sequence[int], num_tokens: int, trunk_states_BSH: torch.Tensor
    ) -> torch.Tensor:
        longest = max(lengths)
        state, shared = self.shared_keys(torch.tensor([row[: longest - 1]]))
        read, logits = torch.tensor([row[1:longest]]), []
        for _ in range(num_tokens):
            state, drafted = self.step(self.trunk.get_input_embeddings()(read), state, shared)
            of_draft = self.drafted_logits(drafted)
            read = of_draft.argmax(-1)
            logits.append(of_draft[0, torch.tensor(lengths) - 2])
        return torch.stack(logits, dim=1)


def declare(
    directory: Path, assistant: dict[str, Any], feature_layers: Sequence[int] = (LAYERS - 2, LAYERS - 1)
) -> Path:
    """Let config.json declare an assistant with this config.json; return the directory.

    Args:
        feature_layers: the last layers of each kind that have keys and values.
    """
    drafter = {
        "kind": "gemma4_assistant",
        "layers": 1,
        "feature_layers": [*feature_layers],
        "config": assistant,
    }
    return drafter_reference.declare(directory, drafter)


def add_assistant(directory: Path, **changed: Any) -> Path:
    """Add a random assistant to a trunk without heads; return the directory."""
    torch.manual_seed(3)
    of_trunk = json.loads((directory / "config.json").read_text())
    model = random_assistant(of_trunk, **changed)
    own = {PREFIX + name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    add_tensors(directory, own, {})
    return declare(directory, model.config.to_dict())
