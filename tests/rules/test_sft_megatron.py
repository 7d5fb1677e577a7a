"""Test that --megatron_config is refused if a setting has no effect in the run."""

import dataclasses

import pytest

from swiftlite import rules
from tests.messages import mentions
from tests.rules.good import SFT, change_config, problems_of


def having(settings, **changes):
    return dataclasses.replace(SFT, megatron_config=settings, **changes)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({"moe_z_loss_coeff": 0.1}, {}, "no experts"),
        ({"moe_router_force_load_balancing": True}, {}, "no experts"),
        ({"moe_permute_fusion": True}, {}, "all experts"),
        ({"overlap_p2p_comm_warmup_flush": True}, {}, "virtual"),
        ({"disable_bf16_reduced_precision_matmul": True}, {"torch_dtype": "float32"}, "--torch_dtype float32"),
        ({"reduce_scatter_with_fp32_accumulation": True}, {}, "--use_distributed_optimizer"),
        ({"reduce_scatter_with_fp32_accumulation": True}, {"use_distributed_optimizer": True}, "--grad_reduce_in_bf16"),
        (
            {"pad_buckets_for_high_nccl_busbw": True},
            {"use_distributed_optimizer": False},
            "--use_distributed_optimizer",
        ),
        ({"nccl_ub": True}, {}, "GPUs"),
        ({"decoupled_lr": 0.1}, {"mtp_mode": "heads_only", "model": "mtp2"}, "--mtp_mode heads_only"),
        ({"decoupled_lr": 0.1}, {"tuner_type": "lora"}, "--tuner_type lora"),
        ({"decoupled_min_lr": 0.0}, {}, "decoupled_lr"),
        (
            {"decoupled_lr": 0.1, "decoupled_min_lr": 0.0},
            {"lr_decay_style": "constant"},
            "--lr_decay_style constant",
        ),
        ({"decoupled_weight_decay": False}, {"weight_decay": 0.0}, "--weight_decay 0"),
        ({"apply_wd_to_qk_layernorm": True}, {"weight_decay": 0.0}, "--weight_decay 0"),
        ({"apply_wd_to_qk_layernorm": True}, {"tuner_type": "lora"}, "--tuner_type lora"),
    ],
)
def test_a_setting_without_effect(here, settings, changes, reason):
    args = having(settings, **changes)
    ((problem, hint),) = problems_of(args)
    *_, name = settings
    assert mentions(problem, f"--megatron_config {name} {reason}")
    assert mentions(hint, name)


def test_torchao_has_only_decoupled_weight_decay(here):
    *_, (problem, _) = problems_of(having({"decoupled_weight_decay": False}, optimizer="adamw_8bit"))
    assert mentions(problem, "--megatron_config decoupled_weight_decay --optimizer adamw_8bit")


def test_norms_of_queries_are_required(here):
    change_config(model_type="llama")
    ((problem, _),) = problems_of(having({"apply_wd_to_qk_layernorm": True}))
    assert mentions(problem, "--megatron_config apply_wd_to_qk_layernorm norms")


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_z_loss_coeff": -1.0},  # and the model has no experts
        {"decoupled_min_lr": -1.0},  # and decoupled_lr is not set
        {"decoupled_lr": 1e-9, "mtp_mode": "heads_only"},  # and below its minimum
    ],
)
def test_a_setting_has_one_problem(here, settings):
    changes = {name: settings.pop(name) for name in list(settings) if name == "mtp_mode"}
    changes |= {"model": "mtp2"} if changes else {}
    assert len(problems_of(having(settings, **changes))) == 1


def test_a_disabled_setting_needs_nothing(here):
    assert rules.check(having({"overlap_p2p_comm_warmup_flush": False, "moe_permute_fusion": False})) == []
    assert rules.check(having({"decoupled_weight_decay": True}, weight_decay=0.0)) == []


def test_settings_with_an_effect(here):
    settings = {"check_for_nan_in_grad": True, "disable_bf16_reduced_precision_matmul": True}
    assert rules.check(having(settings)) == []
    assert rules.check(having({"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-5})) == []
    assert rules.check(having({"decoupled_lr": 1e-4}, tuner_type="lora", lora_modules_to_save=["lm_head"])) == []
    reduced = {"use_distributed_optimizer": True, "grad_reduce_in_bf16": True}
    assert rules.check(having({"reduce_scatter_with_fp32_accumulation": True}, **reduced)) == []


def test_decoupled_lr_is_above_its_minimum(here):
    ((problem, hint),) = problems_of(having({"decoupled_lr": 1e-8}))
    assert mentions(problem, "--megatron_config decoupled_lr 1e-08 1e-06")
    assert mentions(hint, "decoupled_min_lr")
    assert rules.check(having({"decoupled_lr": 1e-8, "decoupled_min_lr": 0.0})) == []
    assert rules.check(having({"decoupled_lr": 1e-8}, lr_decay_style="constant")) == []


def test_unknown_settings_are_reported_once(here):
    ((problem, _),) = problems_of(having({"hidden_size": 4}))
    assert mentions(problem, "--megatron_config hidden_size")
