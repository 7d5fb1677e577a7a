"""Test the rules of `megatron sft` for adapters: all messages, and that a usual command is valid."""

from dataclasses import replace

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs, PtArgs
from swiftlite.plan.kernels import Machine
from tests.messages import mentions
from tests.rules.good import SFT, problems_of

LORA = replace(SFT, tuner_type="lora")


@pytest.mark.parametrize(
    "args",
    [
        LORA,
        replace(LORA, target_modules=["q_proj", "mlp.down_proj"], lora_modules_to_save=["embed_tokens", "norm"]),
        replace(LORA, model="mtp2", mtp_mode="heads_only"),
        replace(LORA, mtp_num_layers=1, mtp_init="fit_last_layer"),
    ],
)
def test_good_options_pass(here, args):
    rules.check(args)


@pytest.mark.parametrize("command", [type(SFT), PtArgs, DpoArgs])
@pytest.mark.parametrize("options", [{}, {"use_dora": True, "lora_rank": 3}])
def test_adapters_stand_beside_transformer_engine_s_layers(here, monkeypatch, command, options):
    gpu = Machine(is_cuda=True, has_transformer_engine=True, packed_kernel="torch_varlen")
    monkeypatch.setattr(rules, "this_machine", lambda is_cuda: gpu)
    of_run = {"model": "plain", "dataset": ["train.jsonl"], "output_dir": "out"}
    rules.check(command(**of_run, tuner_type="lora", transformer_impl="transformer_engine", **options))


@pytest.mark.parametrize(
    ("args", "problem", "hint"),
    [
        (
            replace(SFT, lora_rank=4, use_rslora=True, use_dora=True),
            "--lora_rank --use_rslora --use_dora --tuner_type",
            "--tuner_type lora",
        ),
        (replace(LORA, lora_rank=64), "--lora_rank 64 hidden_size 48", "--tuner_type full"),
        (replace(LORA, target_modules=[]), "--target_modules", ""),
        (replace(LORA, target_modules=["q_proj", "nosuch"]), "--target_modules nosuch", "down_proj gate_proj k_proj"),
        (replace(LORA, target_modules=["query"]), "--target_modules query", "down_proj gate_proj k_proj"),
        (replace(LORA, target_modules=["lm_head"]), "--target_modules lm_head", "--lora_modules_to_save lm_head"),
        (replace(LORA, lora_modules_to_save=["nrm"]), "--lora_modules_to_save nrm", "embed_tokens"),
        (
            replace(LORA, lora_modules_to_save=["layers.1.input_layernorm"]),
            "--lora_modules_to_save layers.1.input_layernorm",
            "input_layernorm",
        ),
        (replace(LORA, lora_modules_to_save=["q_proj"]), "--lora_modules_to_save q_proj", "--target_modules q_proj"),
        (replace(LORA, mtp_num_layers=1, mtp_init="random", mtp_tuner="lora"), "--mtp_tuner lora", "--mtp_tuner"),
        (replace(LORA, model="mtp2", mtp_mode="heads_only", mtp_tuner="full"), "--mtp_mode heads_only", "--tuner_type"),
        (
            replace(LORA, model="mtp2", mtp_mode="heads_only", mtp_tuner="frozen"),
            "--mtp_mode heads_only",
            "--mtp_tuner lora",
        ),
        (
            replace(LORA, model="mtp2", mtp_mode="heads_only", lora_modules_to_save=["norm"]),
            "--lora_modules_to_save",
            "",
        ),
        (
            replace(LORA, model="mtp2", mtp_mode="heads_only", draft_vocab=8),
            "--draft_vocab 8",
            "--tuner_type megatron sft --mtp_mode heads_only",
        ),
        (replace(LORA, model="mtp2", draft_vocab=8), "--draft_vocab 8", ""),
    ],
)
def test_each_message(here, args, problem, hint):
    ((found, advice),) = problems_of(args)
    assert mentions(found, problem)
    assert mentions(advice, hint)
