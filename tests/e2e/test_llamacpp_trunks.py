"""Test trunks that llama.cpp runs without MTP heads: log-probabilities of all tokens equal those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.llamacpp.client import request_of
from swiftlite.engines.llamacpp.request import post
from swiftlite.engines.served_model import resolve_served
from tests.engines.llamacpp_reference import half_gelu
from tests.engines.reference import Reference
from tests.gguf.wordless import write_tokenizer
from tests.llamacpp_here import needs_llamacpp
from tests.tiers import some_of
from tests.tiny import GEMMA4_E, LLAMACPP_SIZES, make_tiny_hf

pytestmark = [pytest.mark.engine, needs_llamacpp]
SIZE = 128
NEW_TOKENS = 8
PROMPT_TOKENS = (3, 30)
"""Shorter and longer than the sliding windows of tiny models."""
E_MODEL: dict[str, Any] = GEMMA4_E | {"num_kv_shared_layers": 2}
UNCAPPED = {"final_logit_softcapping": None}
DENSE = ["linear_attention", "mlp", "full_attention", "mlp"]
NANO_2, NANO_3 = {"layers_block_type": DENSE}, LLAMACPP_SIZES["nemotron_h"] | {"moe_latent_size": None}
# Numbers that are rounded to float16, in the table of GELU, differ by up to 2 ** -11 if their sums differ slightly.
CASES: list[Any] = [("gemma4", {}, 2e-3), ("gemma4_unified", UNCAPPED, 2e-3), ("gemma4_text", E_MODEL, 2e-3)]
CASES += [("nemotron_h", sizes, 1e-4) for sizes in (NANO_2, NANO_3, LLAMACPP_SIZES["nemotron_h"])]


def answers_of(directory: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the answers of llama.cpp with the log-probabilities of all tokens."""
    config = EngineConfig(
        resolve_served(directory), torch_dtype="float32", max_batch_size=1, engine_kwargs={"threads": 1}
    )
    engine: Any = start_engine("llamacpp", config)
    try:
        answers = []
        for prompt in prompts:
            request = request_of(prompt, Sampling(NEW_TOKENS), seed=0) | {"cache_prompt": False, "n_probs": SIZE}
            answers.append(json.loads(post(engine._server.url, "/completion", request)))
        return answers
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "sizes", "tolerance"),
    some_of(CASES, CASES[0], CASES[2], CASES[3], CASES[4]),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_log_probabilities_equal_those_of_transformers(family, sizes, tolerance, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    directory = make_tiny_hf(tmp_path / "model", family, vocab_size=SIZE, **sizes)
    write_tokenizer(directory, SIZE, SIZE - 1)
    with half_gelu():
        trunk = Reference.load(directory, family, depth=0).trunk
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, SIZE - 1, (length,), generator=generator).tolist() for length in PROMPT_TOKENS]
    for prompt, answer in zip(prompts, answers_of(directory, prompts), strict=True):
        with torch.no_grad():
            expected = trunk(torch.tensor([prompt + answer["tokens"]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        assert len(answer["tokens"]) >= 4
        for step, of_step in enumerate(answer["completion_probabilities"]):
            found = {each["id"]: each["logprob"] for each in of_step["top_logprobs"]}
            assert len(found) == SIZE
            ordered = torch.tensor([found[token] for token in range(SIZE)])
            assert (ordered - expected[step]).abs().max() < tolerance
