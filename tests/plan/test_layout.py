"""Test computations on layouts. tests/rules tests the messages."""

import re

import pytest

from swiftlite.args.config import Problem
from swiftlite.args.fields import ParallelLayout
from swiftlite.families.index import known_architecture
from swiftlite.plan.layout import decoder_layers_per_stage, layout_problems, states_sent, tower_outputs_sent
from tests.messages import mention_each, mentions
from tests.plan.test_memory import CONFIGS


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (ParallelLayout(pipeline_model_parallel_size=4), [6, 6, 6, 6]),
        (ParallelLayout(pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2), [3] * 8),
        (ParallelLayout(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=3), [3, 7, 7, 7]),
        (ParallelLayout(pipeline_model_parallel_size=4, decoder_last_pipeline_num_layers=0), [8, 8, 8, 0]),
        (ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*20|t*4L"), [20, 4]),
    ],
)
def test_layers_of_each_stage(layout, layers):
    assert decoder_layers_per_stage(layout, 24) == layers


@pytest.mark.parametrize("family", CONFIGS)
def test_what_ranks_share_is_named_once(family):
    """GLM-4.5 has two kinds of layers, and all layers of Qwen3 have the same heads."""
    layout = ParallelLayout(tensor_model_parallel_size=7, sequence_parallel=True, expert_model_parallel_size=3)
    architecture = known_architecture(CONFIGS[family])
    assert architecture is not None
    problems = layout_problems(layout, architecture, 0)
    assert len(problems) == len(set(problems))
    words = " ".join(problem for problem, _ in problems)
    assert words.count("num_attention_heads, 8") == words.count("vocab_size, 1000") == 1
    assert bool(re.search(r"\d experts", words)) is architecture.has_experts
    assert ("kv_lora_rank" in words) is False  # 56 = 8 * 7
    assert ("q_lora_rank, 48" in words) is family.startswith("deepseek")


def test_a_model_that_is_not_known_is_judged_by_the_layout_alone():
    layout = ParallelLayout(tensor_model_parallel_size=1, sequence_parallel=True, pipeline_model_parallel_size=3)
    assert mention_each(
        [problem for problem, _ in layout_problems(layout, None, 0)],
        ["--sequence_parallel true --tensor_model_parallel_size 1"],
    )


@pytest.mark.parametrize(
    ("stages", "num_ranks", "num_drafts", "before_norm", "sent"),
    [
        ("Et*2|t*2mL", 2, 1, True, [1]),
        ("Et*4|mL", 2, 1, False, [1]),
        ("Et*4|mL", 2, 1, True, [2]),
        ("Et*4|mL", 2, 0, True, [1]),
        ("Et*2|t*2|m|L", 4, 2, True, [1, 2, 3]),
        ("Et*4|mm|L", 3, 2, False, [1, 3]),
        ("Et*2|t|t|mL", 2, 1, True, [1, 1, 2]),  # two virtual stages each
        (None, 4, 1, True, [1, 1, 1]),
    ],
)
def test_states_that_cross(stages, num_ranks, num_drafts, before_norm, sent):
    layout = ParallelLayout(pipeline_model_parallel_size=num_ranks, pipeline_model_parallel_layout=stages)
    assert states_sent(layout, 4, num_drafts, before_norm) == sent


@pytest.mark.parametrize(
    ("stages", "num_ranks", "num_drafts", "num_deepstack", "sent"),
    [
        ("Et*2|t*2mL", 2, 1, 0, [1]),
        ("Et*2|t*2mL", 2, 0, 0, [0]),
        ("Et|t*3|m|L", 4, 1, 0, [1, 1, 0]),
        ("Et|t*3|m|L", 4, 1, 2, [3, 1, 0]),
        ("Et|t*3L", 2, 0, 2, [3]),
        ("Et*2|t*2L", 2, 0, 2, [0]),
        ("Et|t|t|tmL", 2, 1, 0, [1, 1, 1]),  # two virtual stages each
        (None, 4, 1, 3, [4, 4, 1]),
    ],
)
def test_outputs_of_a_tower_that_cross(stages, num_ranks, num_drafts, num_deepstack, sent):
    layout = ParallelLayout(pipeline_model_parallel_size=num_ranks, pipeline_model_parallel_layout=stages)
    assert tower_outputs_sent(layout, 4, num_drafts, num_deepstack) == sent


def test_heads_with_output_layers_are_on_the_stage_of_the_losses():
    architecture = known_architecture(CONFIGS["step3p5"])

    def problems(stages: str) -> list[Problem]:
        size = stages.count("|") + 1
        layout = ParallelLayout(pipeline_model_parallel_size=size, pipeline_model_parallel_layout=stages)
        return layout_problems(layout, architecture, 1)

    assert problems("Et*4|t*4mL") == problems("Et*4|t*4|mL") == []
    ((problem, hint),) = problems("Et*4|t*4m|L")
    assert mentions(problem, "--pipeline_model_parallel_layout Et*4|t*4m|L")
    assert "m" in hint
