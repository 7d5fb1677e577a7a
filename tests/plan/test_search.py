"""Test which layouts `doctor --plan --gpu_type` tries, and their order."""

from typing import Any

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.plan.cost.gpus import GPUS
from swiftlite.plan.cost.memory import usable_bytes
from swiftlite.plan.cost.search import has_layout, larger, ranked
from swiftlite.plan.facts import Facts
from swiftlite.plan.kernels import PLANNED_MACHINE
from swiftlite.plan.layout import data_parallel_size, layout_of
from tests.planned import QWEN3_8B

H100 = GPUS["H100"]
QWEN3_30B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def args(**options) -> SftArgs:
    given: dict[str, Any] = {"global_batch_size": 64, "max_length": 4096}
    return SftArgs(**{**given, **options})


def on(hf_config: dict[str, Any], num_gpus: int = 8) -> Facts:
    return Facts(num_gpus, hf_config, machine=PLANNED_MACHINE)


def test_the_fastest_comes_first_and_all_fit():
    found = ranked(args(), on(QWEN3_8B), H100, 80)
    speeds = [candidate.step.tokens_per_second for candidate in found]
    assert speeds == sorted(speeds, reverse=True)
    assert all(candidate.bytes <= usable_bytes(80) for candidate in found)
    best = found[0].args
    assert best.tensor_model_parallel_size * best.pipeline_model_parallel_size > 1  # 8 x 16.4 GB of state do not fit
    assert best.sequence_parallel is (best.tensor_model_parallel_size > 1)


def test_more_memory_is_never_slower():
    speeds = [ranked(args(), on(QWEN3_8B), H100, memory)[0].step.tokens_per_second for memory in (40, 80, 160)]
    assert speeds == sorted(speeds)


def test_instances_divide_the_replicas_and_need_memory():
    found = ranked(args(num_distributed_optimizer_instances=2), on(QWEN3_8B), H100, 80)
    assert found
    for candidate in found:
        assert data_parallel_size(layout_of(candidate.args), 8) * candidate.args.context_parallel_size % 2 == 0
    layouts = {layout_of(candidate.args): candidate.bytes for candidate in found}
    single = {layout_of(each.args): each.bytes for each in ranked(args(micro_batch_size=1), on(QWEN3_8B), H100, 80)}
    assert any(layouts[layout] > single[layout] for layout in layouts.keys() & single.keys())


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_model_parallel_size": 8},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3},
        {"context_parallel_size": 4, "tensor_model_parallel_size": 2},
        {"micro_batch_size": 2},
        {"recompute_granularity": "full"},
        {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 6},
    ],
)
def test_what_is_given_stays(given):
    found = ranked(args(**given), on(QWEN3_8B), H100, 80)
    assert found
    for candidate in found:
        assert {name: getattr(candidate.args, name) for name in given} == given


def test_nothing_is_recomputed_without_need():
    kinds = {candidate.args.recompute_granularity for candidate in ranked(args(), on(QWEN3_8B), H100, 80)}
    assert "none" in kinds
    in_less = {candidate.args.recompute_granularity for candidate in ranked(args(), on(QWEN3_8B, 4), H100, 50)}
    assert "full" in in_less


def test_interleaved_stages_have_micro_batches_for_all():
    for candidate in ranked(args(global_batch_size=24), on(QWEN3_8B, 16), H100, 80):
        if candidate.args.num_virtual_stages_per_pipeline_rank:
            assert candidate.step.num_micro_batches % candidate.args.pipeline_model_parallel_size == 0
        assert candidate.step.num_micro_batches == int(candidate.step.num_micro_batches)


def test_layers_that_do_not_divide_leave_the_last_stage_fewer():
    odd = QWEN3_8B | {"num_hidden_layers": 37}
    found = ranked(args(pipeline_model_parallel_size=4), on(odd), H100, 80)
    assert {candidate.args.decoder_last_pipeline_num_layers for candidate in found} == {7}


def test_experts_are_shared_inside_a_machine():
    best = ranked(args(global_batch_size=256, pipeline_model_parallel_size=2), on(QWEN3_30B, 16), H100, 80)[0]
    assert 1 < best.args.expert_model_parallel_size <= 8


def test_matrices_fit_low_precision_on_every_layout():
    """12,304 / 16 is odd, so a part of this matrix on several ranks is not a multiple of 16."""
    low = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid"}
    config = QWEN3_8B | {"intermediate_size": 12304}
    found = ranked(args(**low), on(config), H100, 80)
    assert {candidate.args.tensor_model_parallel_size for candidate in found} == {1}
    assert {candidate.args.tensor_model_parallel_size for candidate in ranked(args(), on(config), H100, 80)} > {1}


def test_how_many_gpus_it_takes():
    assert ranked(args(), on(QWEN3_8B, 1), H100, 80) == []
    more = larger(args(), on(QWEN3_8B, 1), H100, 80)
    assert more == (4, 256)  # 147 GB of state: two are too few
    assert ranked(args(global_batch_size=256), on(QWEN3_8B, 4), H100, 80)
    assert (
        larger(args(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), on(QWEN3_8B, 1), H100, 0.01) is None
    )


def test_a_batch_that_no_layout_divides():
    assert has_layout(args(), on(QWEN3_8B), H100)
    odd = args(global_batch_size=3)  # seven stages of six layers leave the last none
    assert has_layout(odd, on(QWEN3_8B, 7), H100) is False
