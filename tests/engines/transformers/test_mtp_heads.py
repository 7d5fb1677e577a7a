"""Test swiftlite's drafts against a reference without a cache, and in transformers' loop."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from swiftlite.base.drafting import Drafting
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.transformers.draft_generator import DraftGenerator
from swiftlite.engines.transformers.mtp_heads import MtpSteps, load_heads
from tests.engines.reference import UNDECIDED, Reference, convention, follow, with_vocab, write_trained
from tests.tiers import some_of
from tests.tiny import ALIKE, CLASSES, make_tiny_hf, mtp_names

NOT_HERE = (*ALIKE, "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # tests/acceptance/test_held_out_images.py


@pytest.mark.parametrize(
    ("family", "depth", "num_tokens"),
    # Dense, with each kind of experts and attention, and with each kind of head inputs.
    some_of(
        [
            *((family, 2, 2) for family in sorted(CLASSES) if family not in NOT_HERE),
            *(("qwen3_next", 1, 2), ("qwen3", 2, 4), ("qwen3", 1, 3)),
        ],
        ("mimo", 2, 2),
        ("mistral3", 2, 2),  # a language model in a wrapper
        ("qwen3_next", 1, 2),
        ("qwen3", 2, 4),
    ),
)
def test_counts_equal_a_reference_without_cache(trained, family, depth, num_tokens):
    directory, prompts = trained(family, depth)
    engine = start_engine(
        "transformers", EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=num_tokens)
    )
    completions = engine.generate(prompts, Sampling(20))
    reference = Reference.load(directory, family, depth)
    follow(reference, convention("transformers", family).drafting)
    expected, counts = reference.simulate(prompts, 20, num_tokens)
    assert [completion.token_ids for completion in completions] == expected
    assert engine.draft_counts().drafts == counts.drafts
    assert engine.draft_counts().drafted == counts.drafted
    assert engine.draft_counts().accepted_per_position == counts.accepted_per_position
    # The check has teeth only where some drafts are right and some wrong, at every position that has a head of its own.
    for accepted in counts.accepted_per_position[:depth]:
        assert 0.1 < accepted / counts.drafts < 0.9


@pytest.mark.parametrize("family", some_of(["mistral", "phi3"], "mistral"))
def test_heads_have_the_window_of_all_layers(tmp_path, family):
    prompts = write_trained(tmp_path / "model", family, depth=1, sliding_window=6)
    config = EngineConfig(resolve_served(tmp_path / "model"), "float32", num_speculative_tokens=3)
    engine = start_engine("transformers", config)
    completions = engine.generate(prompts, Sampling(20))
    reference = Reference.load(tmp_path / "model", family, depth=1)
    expected, counts = reference.simulate(prompts, 20, 3)
    assert [completion.token_ids for completion in completions] == expected
    assert engine.draft_counts().accepted_per_position == counts.accepted_per_position
    reference.trunk.config.layer_types = ["full_attention"]  # the heads of this reference have no window
    assert reference.simulate(prompts, 20, 3)[1] != counts


@pytest.mark.parametrize(("depth", "num_tokens"), some_of([(1, 3), (2, 2), (2, 4)], (2, 4)))
def test_drafts_end_behind_the_first_unsure_one(trained, depth, num_tokens):
    directory, prompts = trained("qwen3", depth)
    engine = start_engine(
        "transformers", EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=num_tokens)
    )
    reference = Reference.load(directory, "qwen3", depth)
    follow(reference, convention("transformers", "qwen3").drafting)
    before = engine.draft_counts()
    for confidence in (0.3, 0.9):
        completions = engine.generate(prompts, Sampling(20, draft_confidence=confidence))
        expected, counts = reference.simulate(prompts, 20, num_tokens, confidence)
        assert [completion.token_ids for completion in completions] == expected
        found = engine.draft_counts().since(before)
        assert (found.drafts, found.drafted, found.accepted_per_position) == (
            counts.drafts,
            counts.drafted,
            counts.accepted_per_position,
        )
        assert counts.drafts < counts.drafted < counts.drafts * num_tokens
        before = engine.draft_counts()


@pytest.mark.parametrize("family", some_of(["mimo", "glm4_moe"], "mimo"))
def test_heads_for_another_engine_are_run_as_it_runs_them(trained, tmp_path, family):
    directory, prompts = trained(family, 1, "sglang")
    fed = convention("sglang", family).drafting
    reference = follow(Reference.load(directory, family, 1), fed)
    expected, counts = reference.simulate(prompts, 20, 3)
    follow(reference, convention("vllm", family).drafting)
    assert reference.simulate(prompts, 20, 3)[1] != counts
    shutil.copytree(directory, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | {"mtp_drafting": fed.to_json()}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    engine = start_engine(
        "transformers", EngineConfig(resolve_served(tmp_path / "model"), "float32", num_speculative_tokens=3)
    )
    assert [completion.token_ids for completion in engine.generate(prompts, Sampling(20))] == expected
    assert engine.draft_counts().accepted_per_position == counts.accepted_per_position


@pytest.mark.parametrize(("family", "depth"), some_of([("qwen3", 2), ("llama", 1), ("qwen3_next", 1)], ("qwen3", 2)))
def test_drafts_are_of_the_draft_vocabulary(trained, tmp_path, family, depth):
    directory, prompts = trained(family, depth)
    reference = follow(Reference.load(directory, family, depth), convention("transformers", family).drafting)
    _, counts_of_all = reference.simulate(prompts, 20, 2)
    reference.draft_vocab = [token for token in range(reference.trunk.config.vocab_size) if token % 4]
    model = with_vocab(directory, tmp_path / "model", reference.draft_vocab)
    engine = start_engine("transformers", EngineConfig(resolve_served(model), "float32", num_speculative_tokens=2))
    clear = [prompt for prompt in prompts if reference.closest_choice(prompt, 20, 2) > UNDECIDED]
    completions = engine.generate(clear, Sampling(20))
    answers, counts = reference.simulate(clear, 20, 2)
    assert [completion.token_ids for completion in completions] == answers
    assert engine.draft_counts().accepted_per_position == counts.accepted_per_position
    assert 0 < counts.acceptance_rate < counts_of_all.acceptance_rate


@pytest.mark.parametrize("family", some_of(["qwen3", "mimo"]))
def test_swapped_projection_halves_are_noticed_by_counts_alone(trained, family, tmp_path):
    directory, prompts = trained(family, 1)
    names, _ = mtp_names(family, 0)
    tensors = load_file(directory / "model.safetensors")
    first, second = tensors[names["projection"]].chunk(2, dim=1)
    tensors[names["projection"]] = torch.cat((second, first), dim=1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())

    configs = [
        EngineConfig(resolve_served(model), "float32", num_speculative_tokens=1) for model in (directory, tmp_path)
    ]
    engines = [start_engine("transformers", config) for config in configs]
    right, wrong = (engine.generate(prompts, Sampling(20)) for engine in engines)
    assert right == wrong
    rates = [engine.draft_counts().accepted / engine.draft_counts().drafted for engine in engines]
    assert rates[0] > 0.3
    assert rates[1] < 0.05


def test_no_head_accepts_by_chance(tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    engine = start_engine("transformers", EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=1))
    engine.generate([[1, 2, 3], [4], [5, 6]], Sampling(40))
    counts = engine.draft_counts()
    assert counts.drafted > 60
    assert counts.accepted / counts.drafted < 0.2


def test_the_drafter_works_in_the_loop_of_transformers(trained):
    directory, prompts = trained("qwen3", 2)
    accepted = []

    class WithHeads(Qwen3ForCausalLM):
        def _get_candidate_generator(self, **kwargs):
            drafter: Any = DraftGenerator(MtpSteps(self.model, self.lm_head, heads, 2, Drafting()))
            drafter.update_candidate_strategy = lambda ids, scores, num_matches: accepted.append(int(num_matches))
            return drafter

    model: Any = WithHeads.from_pretrained(directory).eval()
    heads = load_heads(resolve_served(directory), model.model)
    greedy: Any = Qwen3ForCausalLM.from_pretrained(directory).eval()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        # use_mtp only chooses assisted generation here; WithHeads brings the heads
        assert model.generate(ids, use_mtp=True, **options).tolist() == greedy.generate(ids, **options).tolist()
    assert sum(accepted) > 20


def test_heads_of_attention_only(tmp_path):
    """Those of Nemotron-H without experts."""
    kinds = ["linear_attention", "mlp", "full_attention", "mlp"]
    prompts = write_trained(tmp_path / "model", "nemotron_h", depth=1, layers_block_type=kinds)
    config = EngineConfig(resolve_served(tmp_path / "model"), "float32", num_speculative_tokens=3)
    engine = start_engine("transformers", config)
    completions = engine.generate(prompts, Sampling(20))
    reference = Reference.load(tmp_path / "model", "nemotron_h", depth=1)
    expected, counts = reference.simulate(prompts, 20, 3)
    assert [completion.token_ids for completion in completions] == expected
    assert engine.draft_counts().accepted_per_position == counts.accepted_per_position
