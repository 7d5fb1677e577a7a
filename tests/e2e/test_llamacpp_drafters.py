"""Test that llama.cpp drafts with EAGLE-3, DFlash and DSpark drafters and assistants of Gemma 4: tokens and draft
counts of each request equal those of an independent reference."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from swiftlite.base.errors import UserError
from swiftlite.engines.llamacpp.dry_load import dry_load, report_of
from swiftlite.families.eagle3 import LLAMACPP_TRUNKS
from swiftlite.families.serving.llamacpp import TRUNKS
from swiftlite.runtime.mesh import Mesh
from tests.e2e import drafted, test_gemma4_assistant
from tests.e2e.test_llamacpp import NEW_TOKENS, check_requests
from tests.engines.drafter_reference import DrafterReference
from tests.engines.gemma4_assistant_reference import CLUSTERS, AssistantReference, config_for, declare, settings_of
from tests.engines.llamacpp_reference import Request, Slot, half_gelu
from tests.engines.reference import Reference, write_trained
from tests.llamacpp_here import needs_llamacpp
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import GEMMA4_E

pytestmark = [pytest.mark.engine, needs_llamacpp]


def write(kind: str, directory: Path, family: str) -> tuple[DrafterReference, list[list[int]]]:
    prompts = drafted.write_drafted(directory, kind, family)
    if kind != "eagle3.0":  # llama.cpp never drafts more tokens than a block has
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"mtp_unroll": 3}))
    return drafted.load_reference(directory, kind, family), prompts


# A tiny EAGLE-3.0 drafter of llama does not learn three drafts.
CASES = [(kind, family, 3) for kind in ("dflash", "dspark") for family in LLAMACPP_TRUNKS]
CASES += [("eagle3.0", family, 3) for family in LLAMACPP_TRUNKS if family != "llama"]
CASES += [("dflash", "llama", 1), ("dspark", "qwen3", 1), ("eagle3.0", "qwen3", 1)]


@dataclass
class DrafterSlot(Slot):
    """A request with a drafter that reads features. Drafts of a block depend on its size.

    Attributes:
        block: number of drafts that are computed, also if fewer tokens are left.
    """

    block: int = 0

    @torch.no_grad()
    def draft(self, tokens: list[int], num_tokens: int) -> list[int]:
        if not num_tokens:
            return []
        logits = self.reference.draft_logits_at(tokens, [len(tokens)], self.block, self.before_BSH)
        return logits[0].argmax(-1).tolist()[:num_tokens]


@torch.no_grad()
def expected_of(reference: Reference, prompt: list[int], row: list[int], num_tokens: int) -> Request:
    states, _ = reference.trunk_states(torch.tensor([prompt + row]))
    slot = DrafterSlot(reference, states, computes_again=False, block=num_tokens)
    return slot.answer(prompt, row, NEW_TOKENS, num_tokens, 0)


@pytest.mark.parametrize(
    ("kind", "family", "num_tokens"),
    some_of(CASES, ("dflash", "qwen3", 3), ("dspark", "llama", 3), ("eagle3.0", "mistral", 3)),
)
def test_requests_equal_the_reference(kind, family, num_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    directory = tmp_path / "model"
    reference, prompts = write(kind, directory, family)
    rows = reference.greedy_rows(prompts, NEW_TOKENS + num_tokens + 1)
    expected = [expected_of(reference, *pair, num_tokens) for pair in zip(prompts, rows, strict=True)]
    report = dry_load(check_requests(directory, prompts, num_tokens, expected))
    assert (report.problems, report.target, report.draft) == ([], TRUNKS[family], kind.removesuffix(".0"))


E_MODEL = {**GEMMA4_E, "num_kv_shared_layers": 2}
"""Like E2B, with full attention in the last layer that has keys and values of its own."""


class LlamacppAssistant(AssistantReference):
    """An assistant whose queries have the position of the token that they read: that after the last cached one."""

    def step(
        self, embedding_BSH: torch.Tensor, state_BSH: torch.Tensor, shared: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step_at(embedding_BSH, state_BSH, shared, 1)


def write_assistant(directory: Path, family: str, sizes: dict[str, Any], mesh: Mesh) -> tuple[Path, list[list[int]]]:
    """Export a trained trunk with an assistant; return its directory and prompts. That of an E model has clusters."""
    if not sizes:
        prompts = test_gemma4_assistant.write_drafted(directory / "source", family)
        return drafted.exported(directory / "source", directory, mesh), prompts

    def draft_as(reference: Reference) -> Reference:
        return AssistantReference.of(reference.trunk, **CLUSTERS)

    prompts = write_trained(directory / "source", family, 1, True, 3, draft_as, **sizes)
    declare(directory / "source", config_for(settings_of(directory / "source"), **CLUSTERS).to_dict(), (2, 3))
    return drafted.exported(directory / "source", directory, mesh), prompts


@pytest.mark.parametrize(
    ("family", "sizes", "num_tokens"),
    some_of(
        [(family, {}, 3) for family in TRUNKS if family.startswith("gemma4")]
        + [("gemma4_text", E_MODEL, 3), ("gemma4", {}, 1)],
        ("gemma4", {}, 3),
        ("gemma4_text", E_MODEL, 3),
    ),
    ids=lambda value: "e_model" if value is E_MODEL else None,
)
def test_requests_with_an_assistant_equal_the_reference(family, sizes, num_tokens, tmp_path, monkeypatch, mesh):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    directory, prompts = write_assistant(tmp_path, family, sizes, mesh)
    with half_gelu():
        reference = LlamacppAssistant.load(directory, directory / "draft", family)
    reference.assistant.masked_embedding = None  # llama.cpp drafts from all tokens
    rows = reference.greedy_rows(prompts, NEW_TOKENS + num_tokens + 1)
    expected = [expected_of(reference, *pair, num_tokens) for pair in zip(prompts, rows, strict=True)]
    others = AssistantReference.load(directory, directory / "draft", family)
    others.assistant.masked_embedding = None
    assert [expected_of(others, *pair, num_tokens) for pair in zip(prompts, rows, strict=True)] != expected
    report = dry_load(check_requests(directory, prompts, num_tokens, expected))
    assert (report.problems, report.target, report.draft) == ([], "gemma4", "mtp")
    (draft,) = (tmp_path / "home").rglob("*-draft.gguf")
    with pytest.raises(UserError, match=naming("gemma4-assistant X.gguf")):
        report_of(draft)
