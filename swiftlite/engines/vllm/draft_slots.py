"""Fix the places of drafts' keys in the KV cache behind images, in vLLM's older model runner (vllm-project/vllm#54498).

Models with images have three positions per token (time, row, column). Behind an image they are smaller than the index
of the token in its sequence. From the second draft of a step on, vLLM 0.32 computes the slot of a draft's key from the
first position (v1/spec_decode/llm_base_proposer.py:776), so that the key overwrites that of an earlier token, and the
draft is computed with wrong keys. Answers are correct, but acceptance drops. The newer model runner, which vLLM uses
with Triton, is not affected. Without this replacement, tests/e2e/test_images.py fails.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiftlite.engines.vllm.replace import replace

_Update = Callable[..., torch.Tensor]


def with_slots_of_tokens(
    update: _Update, proposer: Any, positions: torch.Tensor, common_attn_metadata: Any, batch_size: int, *others: int
) -> torch.Tensor:
    """Update positions and slots between two drafts as vLLM does, with slots computed from indices of tokens.

    Return the positions of the next drafts, [3, requests] or [requests].

    Args:
        positions: positions of the last drafts, or of the tokens before the first ones.
        common_attn_metadata: contains the lengths of the sequences up to these tokens.
    """
    if not proposer.uses_mrope:
        return update(proposer, positions, common_attn_metadata, batch_size, *others)
    next_positions = positions + 1  # a copy: `positions` can be a part of the buffer below
    # vLLM's method computes slots from these indices, and also stores them as positions, which the last line replaces.
    index = common_attn_metadata.seq_lens[:batch_size].to(positions.dtype) - 1
    update(proposer, index.expand_as(positions), common_attn_metadata, batch_size, *others)
    buffer = proposer.mrope_positions[:, :batch_size]
    return buffer.copy_(next_positions)


def install() -> None:
    """Replace vLLM's method; repeated calls have no effect."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    replace(SpecDecodeBaseProposer, "_update_positions_dependent_metadata", with_slots_of_tokens)
