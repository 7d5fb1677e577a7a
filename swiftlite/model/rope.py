"""Rotary embeddings with the frequencies that transformers computes, for every `rope_type` it supports."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding as McoreRotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig as McoreTransformerConfig
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from swiftlite.errors import UserError
from swiftlite.families.rope import ROPE_KEYS

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary embedding whose frequencies depend on the length of the sequence."""


@dataclass
class TransformerConfig(McoreTransformerConfig):
    """megatron-core's, with the factor on cos and sin that some types of rotary embedding have.

    megatron-core's attention multiplies them by

        0.1 * yarn_mscale * log(yarn_rotary_scaling_factor) + 1

    and looks in the config for these fields, which none of its own classes has (yarn_rotary_pos_embedding.py:274). With
    a scaling factor of e^10 that is 1 + yarn_mscale. Latent attention takes the factor itself, see mla.py.

    Args:
        attention_scaling: the factor, transformers' name for it.
    """

    attention_scaling: float = 1.0
    yarn_rotary_scaling_factor: float = math.exp(10)
    yarn_mscale_all_dim: float = 0.0

    @property
    def yarn_mscale(self) -> float:
        return self.attention_scaling - 1.0


def rope_config(hf_config: dict[str, Any]) -> LlamaConfig:
    """The rotary part of a config.json, normalised by transformers (legacy `rope_scaling` included)."""
    with _refusing():
        return LlamaConfig.from_dict({key: hf_config[key] for key in ROPE_KEYS if hf_config.get(key) is not None})


@contextmanager
def _refusing() -> Iterator[None]:
    """What transformers makes of values that it does not expect is an exception of any kind."""
    try:
        yield
    except Exception as error:
        problem = " ".join(str(error).split())
        raise UserError(f"config.json: no rotary frequencies follow from it: {problem}", _HINT) from error


_HINT = "copy rope_parameters (or rope_scaling, rope_theta) from the model's source"


class RotaryEmbedding(McoreRotaryEmbedding):
    """megatron-core's rotary embedding whose frequencies come from transformers' init functions.

    Args:
        hf_config: the model's config.json, or the part of it that fixes the frequencies.
        cp_group: context-parallel ranks, each of which gets the angles of its part of a padded row.

    Attributes:
        attention_scaling: factor on cos and sin, 1.0 for most types; who turns queries and keys multiplies by it.

    Raises:
        UserError: a type that transformers does not know.
    """

    def __init__(self, hf_config: dict[str, Any], cp_group: dist.ProcessGroup):
        self.hf = rope_config(hf_config)
        assert self.hf.head_dim
        assert self.hf.rope_parameters
        super().__init__(self.hf.head_dim, rotary_percent=1.0, use_cpu_initialization=True, cp_group=cp_group)
        self.rope_type = str(self.hf.rope_parameters["rope_type"])
        if self.rope_type != "default" and self.rope_type not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
            raise UserError(f"config.json: rope_type {self.rope_type!r} is not known", f"transformers knows {known}")
        with _refusing():
            self.inv_freq, self.attention_scaling = self._init_frequencies(seq_len=None)
        if not self.inv_freq.isfinite().all() or not math.isfinite(self.attention_scaling):
            raise UserError("config.json: the rotary frequencies that follow from it are not finite", _HINT)

    def _init_frequencies(self, seq_len: int | None) -> tuple[torch.Tensor, float]:
        if self.rope_type == "default":
            # Llama's formula over a part of each head (partial_rotary_factor); Llama's own class takes all of it.
            return Glm4MoeRotaryEmbedding.compute_default_rope_parameters(self.hf)  # type: ignore[arg-type]
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.hf, device=torch.device("cpu"), seq_len=seq_len)

    def packed(self, cu_seqlens: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Angles for the sequences of a packed row, as megatron-core's layers take them: of the longest,
        [max_seqlen, 1, 1, D], each sequence starting at its first; or of the whole row, [T, 1, 1, D], where a
        sequence's frequencies depend on its own length (rope_utils.py:206 of 0.16.1).

        Args:
            offset: position of each sequence's first token.
        """
        lengths = [length for length in cu_seqlens.diff().tolist() if length]
        if self.rope_type in LENGTH_DEPENDENT:
            return torch.cat([self(length, offset=offset, packed_seq=True) for length in lengths])
        return self(max(lengths), offset=offset, packed_seq=True)

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles [max_seq_len, D / 2]."""
        if self.rope_type in LENGTH_DEPENDENT:
            self.inv_freq = self._init_frequencies(seq_len=max_seq_len)[0].to(self.inv_freq.device)
        return super().get_freqs_non_repeated(max_seq_len, offset)
