"""Test the plan of a run against computed examples."""

import math
import shlex

import pytest

from swiftlite.args.commands import DpoArgs, SftArgs
from swiftlite.base.heads import Heads
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.plan.text import nsys_line, render
from tests.messages import has_line


def test_plan_by_hand():
    args = SftArgs(global_batch_size=48, micro_batch_size=2, tensor_model_parallel_size=2, lr=2e-4, save_steps=7)
    plan = make_plan(args, world_size=8, checkpoint=Heads(1))
    assert plan.data_parallel_size == 4  # 8 processes / tensor parallel 2
    assert plan.heads.layers == 1
    assert plan.min_lr == pytest.approx(2e-5)
    assert plan.eval_steps == 7


@pytest.mark.parametrize(("asked", "present", "depth"), [(None, 0, 0), (None, 2, 2), (0, 2, 0), (1, 0, 1)])
def test_mtp_depth(asked, present, depth):
    assert make_plan(SftArgs(mtp_num_layers=asked), 1, Heads(present)).heads.layers == depth


def test_weights_of_depths():
    assert make_plan(SftArgs(), 1, Heads()).heads.weights == ()
    assert make_plan(SftArgs(), 1, Heads(2)).heads.weights == (0.5, 0.5)
    plan = make_plan(SftArgs(mtp_unroll=3, mtp_unroll_beta=0.5), 1, Heads(1))
    assert plan.heads.weights == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert (plan.heads.layers, plan.heads.drafts) == (1, 3)
    joint = make_plan(SftArgs(mtp_unroll=3, mtp_unroll_weights="joint"), 1, Heads(1)).heads
    assert joint.has_joint_weights
    assert joint.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert not make_plan(SftArgs(mtp_unroll_weights="joint"), 1, Heads(1)).heads.has_joint_weights  # a single draft


def test_constant_learning_rate_ends_where_it_began():
    args = SftArgs(lr=1e-3, lr_decay_style="constant", min_lr=1e-6)
    assert make_plan(args, 1, Heads()).min_lr == 1e-3


@pytest.mark.parametrize(
    ("samples", "epochs", "batch", "steps"),
    [(100, 1.0, 16, 7), (96, 1.0, 16, 6), (100, 0.5, 16, 4), (3, 1.0, 16, 1), (100, 3.0, 16, 19)],
)
def test_steps_show_every_row_in_every_epoch(samples, epochs, batch, steps):
    schedule = make_schedule(SftArgs(num_train_epochs=epochs, global_batch_size=batch), samples)
    assert schedule.steps == steps
    assert schedule.steps * batch >= samples * epochs > (schedule.steps - 1) * batch


def test_train_iters_win():
    args = SftArgs(train_iters=5, num_train_epochs=9, global_batch_size=4, lr_warmup_fraction=0.3)
    schedule = make_schedule(args, 10)
    assert (schedule.steps, schedule.warmup_steps) == (5, math.ceil(1.5))


def test_no_warmup():
    assert make_schedule(SftArgs(lr_warmup_fraction=0.0), 1000).warmup_steps == 0


def test_render_tells_layout_depth_and_files():
    args = SftArgs(model="m", dataset=["a.jsonl"], output_dir="out", mtp_num_layers=1, mtp_init="copy_last_layer")
    plan = make_plan(args, 4, Heads())
    text = render(args, plan, Heads(), make_schedule(args, 100))
    assert has_line(text, "4 = 4")
    assert has_line(text, "16 = 1 4")
    assert has_line(text, "MTP 1")
    assert has_line(text, "7 = 100 1")
    assert has_line(text, "1e-05 0.05 1e-06")
    assert "out/acceptance.json" in text


def test_render_shows_settings_of_megatron_core():
    args = SftArgs(
        model="m", dataset=["a.jsonl"], megatron_config={"moe_z_loss_coeff": 0.1, "check_for_nan_in_grad": True}
    )
    text = render(args, make_plan(args, 1, Heads()), Heads(), None)
    assert has_line(text, "moe_z_loss_coeff 0.1 check_for_nan_in_grad true")


def test_render_shows_how_tokens_reach_their_experts():
    args = SftArgs(
        model="m", dataset=["a.jsonl"], moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"
    )
    text = render(args, make_plan(args, 1, Heads()), Heads(), None)
    assert has_line(text, "dispatch flex hybridep")
    args = SftArgs(model="m", dataset=["a.jsonl"], moe_shared_expert_overlap=True)
    text = render(args, make_plan(args, 1, Heads()), Heads(), None)
    assert has_line(text, "dispatch shared")
    assert not has_line(text, "dispatch alltoall")


def test_render_shows_instances_of_the_optimizer():
    args = SftArgs(
        model="m", dataset=["a.jsonl"], num_distributed_optimizer_instances=2, use_distributed_optimizer=True
    )
    assert has_line(render(args, make_plan(args, 4, Heads()), Heads(), None), "optimizer 2")


def test_render_shows_moments_on_the_host():
    args = SftArgs(model="m", dataset=["a.jsonl"], optimizer_cpu_offload=True, optimizer_offload_fraction=0.25)
    assert has_line(render(args, make_plan(args, 1, Heads()), Heads(), None), "25% host")


def test_render_of_a_quantized_model():
    args = SftArgs(model="m", dataset=["a.jsonl"], output_dir="out", mtp_num_layers=0)
    text = render(args, make_plan(args, 1, Heads()), Heads(), None, "compressed-tensors (pack-quantized)")
    assert has_line(text, "quantization compressed-tensors pack-quantized")


def test_render_without_heads_has_no_acceptance_file():
    args = SftArgs(model="m", dataset=["a.parquet"], output_dir="out", mtp_num_layers=0, split_dataset_ratio=0)
    text = render(args, make_plan(args, 1, Heads(2)), Heads(2), None)
    assert has_line(text, "MTP 0 2")
    assert "acceptance.json" not in text


def test_render_names_heads_that_are_not_kept():
    args = SftArgs(model="m", dataset=["a.jsonl"], output_dir="out", mtp_mode="heads_only", drafter="eagle3.1")
    plan = make_plan(args, 1, Heads(kind="eagle3", features=(1, 2, 3)))
    assert has_line(render(args, plan, Heads(2), None), "drafter eagle3 2 mtp")
    assert has_line(render(args, plan, Heads(1, kind="eagle3"), None), "drafter 1 eagle3")
    assert not has_line(render(args, plan, Heads(), None), "drafter mtp")


def test_render_without_held_out_rows_has_no_acceptance_file():
    args = SftArgs(model="m", dataset=["a.jsonl"], output_dir="out", mtp_num_layers=1, split_dataset_ratio=0)
    assert "acceptance.json" not in render(args, make_plan(args, 1, Heads(1)), Heads(1), None)


@pytest.mark.parametrize(
    ("options", "is_written"),
    [({}, True), ({"loss_type": "kto"}, True), ({"loss_type": "orpo"}, False), ({"ref_logprobs_cache": "c"}, False)],
)
def test_render_names_reference_log_probabilities(options, is_written):
    args = DpoArgs(model="m", dataset=["a.jsonl"], output_dir="out", **options)
    text = render(args, make_plan(args, 1, Heads()), Heads(), None)
    assert ("out/reference/" in text) is is_written


def test_the_plan_says_how_to_start_nsys():
    args = SftArgs(model="a model", output_dir="a run", profile_steps=[3, 5], profile_kind="nsys")
    words = shlex.split(nsys_line(args))
    assert words[:2] == ["nsys", "profile"]
    assert words[words.index("--output") + 1] == "a run/profile/steps-3-5"
    started = words[words.index("swiftlite") :]
    assert started[:5] == ["swiftlite", "megatron", "sft", "--model", "a model"]
    assert started[started.index("--profile_steps") :][:3] == ["--profile_steps", "3", "5"]
