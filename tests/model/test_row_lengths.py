"""Test that a row of a padded micro-batch, or of a decoded batch, is computed with its own length.

Rotary embeddings of the types `longrope` and `dynamic` depend on the length of the row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from swiftlite.acceptance import greedy
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import make_sample
from swiftlite.model.forward import forward
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from tests.model.logits import load_megatron, load_transformers
from tests.model.test_logits import ROPES
from tests.tiny import make_tiny_hf

LENGTHS = (12, 48, 33, 32)
"""Lengths of rows below, at and above the original length, at which frequencies change."""
LIMIT = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


def make_model(directory: Path, family: str, rope: dict[str, Any], depth: int = 0) -> Path:
    options: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    if family == "phi3":
        options |= {"head_dim": 16, "original_max_position_embeddings": LIMIT}
    options["max_position_embeddings"] = LIMIT if "dynamic" in str(rope) else 128
    return make_tiny_hf(directory, family, depth=depth, dtype=torch.float32, rope_parameters=rope, **options)


def make_rows(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, (length,), generator=generator).tolist() for length in lengths]


def padded_logits(model: GPTModel, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    batch = collate([make_sample(row, [1.0] * len(row)) for row in rows], 0)
    found: Any = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS, lengths=batch.lengths))
    return [logits[: len(row)] for logits, row in zip(found.main, rows, strict=True)]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that values differ only by rounding, because sums over rows of other lengths have another order."""
    rounding = torch.finfo(torch.float32).eps * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=64 * rounding)


def assert_logits_equal_transformers(directory: Path, family: str, mesh) -> None:
    rows = make_rows()
    reference: Any = load_transformers(directory, family, torch.float32)
    with torch.no_grad():
        ours = padded_logits(load_megatron(directory, mesh, torch.float32), rows)
        # Short rows first: with `dynamic`, transformers keeps the frequencies of the longest row so far.
        for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
            assert_close(ours[number], reference(torch.tensor([rows[number]])).logits[0])


@pytest.mark.parametrize("name", [name for name in ROPES if name != "none"])
def test_logits_of_padded_rows_equal_transformers(tmp_path, mesh, name):
    directory = make_model(tmp_path, "llama", cast(dict[str, Any], ROPES[name]))
    assert_logits_equal_transformers(directory, "llama", mesh)


@pytest.mark.parametrize("family", ["deepseek_v3", "olmo3"])
def test_kinds_of_attention_with_rows_of_their_own_length(tmp_path, mesh, family):
    """Latent attention, and layers with different rotary embeddings."""
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    if family == "olmo3":
        sliding = {"rope_type": "default", "rope_theta": 500_000.0}
        rope["rope_theta"] = 500_000.0
        rope = {"full_attention": rope, "sliding_attention": sliding}
    assert_logits_equal_transformers(make_model(tmp_path, family, rope), family, mesh)


def test_losses_of_padded_rows_equal_those_of_packed_and_single_rows(tmp_path, mesh):
    """Padding of a packed sequence, as context-parallel ranks require it, does not count either."""
    directory = make_model(tmp_path, "phi3", LONGROPE, depth=2)
    model = load_megatron(directory, mesh, torch.float32)
    samples = [make_sample(row, [1.0] * len(row)) for row in make_rows()]

    def losses(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            found = forward(model, batch)
        return torch.stack([found.main.loss_BS, *(head.loss_BS for head in found.mtp)])

    padded_KBS = losses(collate(samples, 0, num_drafts=2, pad_to_multiple_of=8))
    packed = collate_packed(samples, 0, num_drafts=2, pad_each_to_multiple_of=16, pad_to_multiple_of=16)
    assert packed.cu_seqlens is not None
    packed_KS, starts = losses(packed)[:, 0], packed.cu_seqlens.tolist()
    for number, sample in enumerate(samples):
        alone_KS = losses(collate([sample], 0, num_drafts=2))[:, 0]
        assert_close(padded_KBS[:, number, : len(sample)], alone_KS)
        assert_close(packed_KS[:, starts[number] :][:, : len(sample)], alone_KS)


def continue_greedily(model: GPTModel, mesh, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    rows = [greedy.GreedyRow.of(prompt, num_tokens, 128) for prompt in prompts]
    decoding = greedy.GreedyRows([model], mesh, rows, ())
    with torch.no_grad():
        while decoding.num_unfinished:
            decoding.step()
    return [row.tokens for row in rows]


@pytest.mark.parametrize(("family", "rope"), [("phi3", LONGROPE), ("llama", ROPES["dynamic"])])
def test_continuations_are_those_of_one_prompt_in_transformers(tmp_path, mesh, monkeypatch, family, rope):
    """One prompt is short, one reaches the limit while it is decoded, and one is longer, also if it is read in parts.

    With `longrope`, the row is computed again at the limit, as in transformers without a cache. With a cache,
    transformers 5.19 empties that of Phi-3 there, and passes only the last token. With `dynamic`, cached keys keep
    their frequencies.
    """
    directory = make_model(tmp_path, family, rope)
    prompts = make_rows([6, LIMIT - 5, LIMIT + 8])
    reference: Any = load_transformers(directory, family, torch.float32)
    expected = [
        reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            use_cache=rope["rope_type"] == "dynamic",
        )[0].tolist()
        for prompt in prompts
    ]
    model = load_megatron(directory, mesh, torch.float32)
    monkeypatch.setattr(greedy, "MAX_PASS_TOKENS", 30)
    assert continue_greedily(model, mesh, prompts, 12) == expected
    alone = [continue_greedily(model, mesh, [prompt], 12)[0] for prompt in prompts]
    assert alone == expected
