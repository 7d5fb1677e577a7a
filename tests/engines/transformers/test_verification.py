"""Test that rejection sampling preserves the trunk's distribution, and that the test detects wrong code."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.drafting import Drafting
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.transformers import engine as engine_module
from swiftlite.engines.transformers import verification
from swiftlite.engines.transformers.draft_generator import DraftGenerator
from swiftlite.engines.transformers.mtp_heads import MtpSteps, load_heads
from swiftlite.engines.transformers.verification import processed, verify, warpers
from tests.engines.chi_square import FALSE_ALARM, probability
from tests.engines.joint import PROMPT, TEMPERATURE, filtered, joint_distribution
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

WRONG = {
    "replaced by a draw from p": ("rest_V = left_V", "rest_V = rest_V"),
    "replaced by a draw from q - p": ("rest_V - q_KV[num_kept]", "q_KV[num_kept] - rest_V"),
    "always kept": ("luck_K * q_KV", "0 * q_KV"),
    "kept with p": ("luck_K * q_KV[place_K, drafts_K]", "luck_K"),
    "kept by one chance": ("torch.rand(len(drafts_K)", "torch.rand(1"),
}


def wrong_verify(how: str) -> Callable[..., torch.Tensor]:
    """Return `verify` with one part changed."""
    source = inspect.getsource(verification)
    old, new = WRONG[how]
    assert source.count(old) == 1
    names: dict[str, Any] = {}
    exec(source.replace(old, new), names)
    return names["verify"]


NUM_TRIPLES = 3000
"""With fewer, some wrong verification is not noticed."""


def drawn_triples(check: Callable[..., torch.Tensor]) -> tuple[list[list[int]], torch.Tensor]:
    """Return three tokens, drafted two at a time, and their expected distribution.

    Each token depends on the tokens before.
    """
    generator = torch.Generator().manual_seed(1)
    size = 4

    def distributions(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, size, generator=generator)).softmax(-1)

    p1, p2, p3 = distributions(), distributions(size), distributions(size, size)
    q1, q2 = distributions(), distributions(size)
    draw = partial(torch.multinomial, num_samples=1, generator=generator)
    found = []
    for _ in range(NUM_TRIPLES):
        first = int(draw(q1))
        second = int(draw(q2[first]))
        q = torch.stack((q1, q2[first]))
        p = torch.stack((p1, p2[first], p3[first, second]))
        tokens = check(torch.tensor([first, second]), q, p, generator).tolist()
        if len(tokens) == 1:
            tokens.append(int(draw(p2[tokens[0]])))
        if len(tokens) == 2:
            tokens.append(int(draw(p3[tokens[0], tokens[1]])))
        found.append(tokens)
    return found, p1[:, None, None] * p2[:, :, None] * p3


def test_tokens_have_the_trunks_distribution():
    assert probability(*drawn_triples(verify)) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_verification_is_noticed(how):
    assert probability(*drawn_triples(wrong_verify(how))) < FALSE_ALARM / 1e6


def test_a_draft_is_kept_as_often_as_the_distributions_overlap():
    generator = torch.Generator().manual_seed(2)
    p, q = (2 * torch.randn(2, 8, generator=generator)).softmax(-1)
    number = 4000
    drafts = torch.multinomial(q, number, replacement=True, generator=generator)
    both = torch.stack((p, p))
    kept = sum(len(verify(draft[None], q[None], both, generator)) == 2 for draft in drafts)
    overlap = float(torch.minimum(p, q).sum())
    assert 0.2 < overlap < 0.8
    # 4.9 standard deviations of a binomial count: a false alarm of 1e-6.
    assert abs(kept / number - overlap) < 4.9 * (overlap * (1 - overlap) / number) ** 0.5
    assert all(len(verify(draft[None], p[None], both, generator)) == 2 for draft in drafts if p[draft] > 0)


def test_equal_distributions_leave_something_to_draw_from():
    """Because of rounding, a draft can be rejected although no entry of p - q is positive."""
    p = torch.tensor([[0.5, 0.5]])
    (token,) = verify(torch.tensor([0]), p.new_tensor([[2.0, 0.5]]), torch.cat((p, p)), HighLuck().generator).tolist()
    assert token in (0, 1)


class HighLuck:
    """A generator whose first number is above 0.5."""

    def __init__(self):
        seed = 0
        while torch.rand(1, generator=torch.Generator().manual_seed(seed)) < 0.5:
            seed += 1
        self.generator = torch.Generator().manual_seed(seed)


def make_small(tmp_path, family: str, depth: int):
    """Return a real model with a small vocabulary."""
    return make_tiny_hf(tmp_path, family, depth=depth, vocab_size=6)


def answered(directory, confidence: float = 0.0, **filters: Any) -> tuple[list[list[int]], DraftCounts]:
    """Return three tokens after PROMPT, 600 times."""
    engine = start_engine("transformers", EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=2))
    sampling = Sampling(3, temperature=TEMPERATURE, draft_confidence=confidence, **filters)
    completions = engine.generate([PROMPT] * 600, sampling)
    return [completion.token_ids for completion in completions], engine.draft_counts()


STOPS = 0.17
"""A draft confidence that stops some drafting: 6 tokens are about as likely."""


@pytest.mark.parametrize(
    ("family", "depth", "top_p", "confidence"),
    some_of(
        [("qwen3", 2, 1.0, 0.0), ("qwen3", 2, 0.8, STOPS), ("qwen3", 1, 1.0, STOPS), ("qwen3_next", 1, 1.0, 0.0)],
        ("qwen3", 2, 0.8, STOPS),
    ),
)
def test_an_engine_that_drafts_writes_what_the_trunk_would(tmp_path, family, depth, top_p, confidence):
    """Drafting may stop after a draft token with a low probability. This draft token is verified as well."""
    directory = make_small(tmp_path, family, depth)
    found, counts = answered(directory, confidence, top_p=top_p)
    assert probability(found, joint_distribution(directory, top_p)) > FALSE_ALARM
    assert 0.02 < counts.accepted / counts.drafted < 0.9
    assert 1.1 < counts.drafted / counts.drafts < 1.9 or not confidence


FILTERS: list[dict[str, Any]] = [
    {"repetition_penalty": 2.0},
    {"top_k": 4, "min_p": 0.3, "top_p": 0.95, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("filters", some_of(FILTERS, FILTERS[1]))
def test_an_engine_that_drafts_applies_filters_as_the_trunk_would(tmp_path, filters):
    directory = make_small(tmp_path, "qwen3", 2)
    found, counts = answered(directory, **filters)
    assert probability(found, joint_distribution(directory, **filters)) > FALSE_ALARM
    assert probability(found, joint_distribution(directory)) < FALSE_ALARM / 1e6
    assert 0.02 < counts.accepted / counts.drafted < 0.9


@pytest.mark.parametrize("filters", [*FILTERS, {"repetition_penalty": 0.7, "top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}])
def test_each_position_is_processed_with_the_drafts_before_it(filters):
    generator = torch.Generator().manual_seed(3)
    ids, logits = [3, 1, 3, 7, 5, 0], 3 * torch.randn(4, 9, generator=generator)
    processor = warpers(Sampling(1, temperature=TEMPERATURE, **filters))
    found = processed(processor, torch.tensor([ids]), logits.clone()).softmax(-1)
    texts = [ids[:3], ids[:4], ids[:5], ids]  # the last three tokens are drafts
    torch.testing.assert_close(found, filtered(logits, texts, TEMPERATURE, **filters))


@pytest.mark.parametrize("how", some_of(["replaced by a draw from p", "always kept"]))
def test_an_engine_that_verifies_wrongly_is_noticed(tmp_path, monkeypatch, how):
    monkeypatch.setattr(engine_module, "verify", wrong_verify(how))
    directory = make_small(tmp_path, "qwen3", 1)
    found, _ = answered(directory)
    assert probability(found, joint_distribution(directory, top_p=1.0)) < FALSE_ALARM / 1e6


@pytest.mark.slow
def test_the_loop_of_transformers_verifies_drawn_drafts(tmp_path):
    """transformers receives the logits from which the drafts were sampled, and verifies by the same rule."""
    directory = make_small(tmp_path, "qwen3", 2)
    accepted: list[int] = []

    class WithHeads(Qwen3ForCausalLM):
        def _get_candidate_generator(self, logits_processor, **kwargs):
            drafter: Any = DraftGenerator(MtpSteps(self.model, self.lm_head, heads, 2, Drafting()), logits_processor)
            drafter.update_candidate_strategy = lambda ids, scores, num_matches: accepted.append(int(num_matches))
            return drafter

    model: Any = WithHeads.from_pretrained(directory).eval()
    heads = load_heads(resolve_served(directory), model.model)
    torch.manual_seed(0)
    ids = torch.tensor([PROMPT])
    options = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": 3, "use_mtp": True}
    options["attention_mask"] = torch.ones_like(ids)
    found = [model.generate(ids, **options)[0, len(PROMPT) :].tolist() for _ in range(300)]
    assert probability(found, joint_distribution(directory, top_p=1.0)) > FALSE_ALARM
    assert 0.1 < sum(accepted) / len(accepted) < 1.9
