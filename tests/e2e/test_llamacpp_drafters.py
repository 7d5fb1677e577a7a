"""Test that llama.cpp drafts with EAGLE-3 and DFlash drafters: tokens and draft counts of each request equal those of
an independent reference."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.llamacpp.dry_load import dry_load
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.llamacpp import TRUNKS
from tests.e2e import test_dflash, test_eagle3
from tests.engines.dflash_reference import DFlashReference
from tests.engines.drafter_reference import DrafterReference
from tests.engines.eagle3_reference import Eagle3Reference
from tests.engines.llamacpp_reference import Request
from tests.gguf.wordless import write_tokenizer
from tests.llamacpp_here import needs_llamacpp
from tests.tiers import some_of

pytestmark = [pytest.mark.engine, needs_llamacpp]
NEW_TOKENS = 24


def write_dflash(directory: Path, family: str) -> tuple[DrafterReference, list[list[int]]]:
    prompts = test_dflash.write_drafted(directory, family, 2)
    # llama.cpp never drafts more tokens than a block has.
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"mtp_unroll": 3}))
    return DFlashReference.load(directory, family), prompts


def write_eagle3(directory: Path, family: str) -> tuple[DrafterReference, list[list[int]]]:
    prompts = test_eagle3.write_drafted(directory, family, "3.0")
    return Eagle3Reference.load(directory, family), prompts


WRITERS: dict[str, Callable[[Path, str], tuple[DrafterReference, list[list[int]]]]] = {
    "dflash": write_dflash,
    "eagle3": write_eagle3,
}
# A tiny EAGLE-3.0 drafter of llama does not learn three drafts.
CASES = [("dflash", family, 3) for family in TRUNKS] + [("eagle3", family, 3) for family in TRUNKS if family != "llama"]
CASES += [("dflash", "llama", 1), ("eagle3", "qwen3", 1)]


def expected_of(reference: DrafterReference, prompt: list[int], row: list[int], num_tokens: int) -> Request:
    """Return the tokens and counts of a request. llama.cpp drafts at most the tokens that are left, except for the
    last, which the verification of the others gives."""
    states, _ = reference.trunk_states(torch.tensor([prompt + row]))
    done, drafted, accepted = 1, 0, 0
    while done < NEW_TOKENS:
        tokens = prompt + row[:done]
        most = min(num_tokens, NEW_TOKENS - done - 1)
        drafts: list[int] = []
        if most:
            drafts = reference.draft_logits_at(tokens, [len(tokens)], num_tokens, states)[0].argmax(-1).tolist()[:most]
        hits = 0
        while hits < len(drafts) and drafts[hits] == row[done + hits]:
            hits += 1
        drafted += len(drafts)
        accepted += hits
        done += hits + 1
    return Request(row[:NEW_TOKENS], drafted, accepted)


@pytest.mark.parametrize(
    ("kind", "family", "num_tokens"), some_of(CASES, ("dflash", "qwen3", 3), ("eagle3", "mistral", 3))
)
def test_requests_equal_the_reference(kind, family, num_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    directory = tmp_path / "model"
    reference, prompts = WRITERS[kind](directory, family)
    rows = reference.greedy_rows(prompts, NEW_TOKENS + num_tokens + 1)
    with torch.no_grad():
        expected = [expected_of(reference, *pair, num_tokens) for pair in zip(prompts, rows, strict=True)]
    vocab_size = reference.trunk.config.vocab_size
    used = {token for result in expected for token in result.tokens}
    write_tokenizer(directory, vocab_size, next(token for token in range(vocab_size) if token not in used))
    config = EngineConfig(
        resolve_served(directory),
        torch_dtype="float32",
        num_speculative_tokens=num_tokens,
        max_batch_size=1,
        engine_kwargs={"threads": 1},
    )
    engine = start_engine("llamacpp", config)
    found = []
    try:
        for prompt in prompts:
            before = engine.draft_counts()
            (answer,) = engine.generate([prompt], Sampling(NEW_TOKENS))
            counts = engine.draft_counts().since(before)
            found.append(Request(answer.token_ids, counts.drafted, counts.accepted))
    finally:
        engine.close()
    assert found == expected
    report = dry_load(config)
    assert (report.problems, report.target, report.draft) == ([], TRUNKS[family], kind)
    share = sum(result.accepted for result in found) / sum(result.drafted for result in found)
    assert 0.05 < share < 0.9  # some right, some wrong
