"""Test the rules of batches, optimizer and layout, and that the problems of all rules are reported together."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.plan.heads import LR_ON_QUANTIZED_TRUNK
from tests.messages import mention_each, mentions
from tests.rules.good import EXPORT, SFT, SIZES, change_config, problems_of


@pytest.mark.parametrize(
    "args",
    [
        SFT,
        dataclasses.replace(SFT, dataset=["train.jsonl#2"], val_dataset=["val.jsonl"]),
        dataclasses.replace(SFT, output_dir="run", resume=True),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


def test_an_empty_directory_may_be_written(here):
    Path("out").mkdir()
    Path("hf").mkdir()
    assert rules.check(SFT) == []
    assert rules.check(EXPORT) == []


def test_min_lr_is_below_lr(here):
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, min_lr=1e-3))
    assert mentions(problem, "--min_lr 0.001 --lr 1e-05")
    assert mentions(hint, "--lr --min_lr")


def test_min_lr_is_below_the_default_of_quantized_models(here):
    heads = dataclasses.replace(SFT, model="mtp2", mtp_mode="heads_only", min_lr=LR_ON_QUANTIZED_TRUNK)
    ((problem, _),) = problems_of(heads)
    assert mentions(problem, f"--min_lr {LR_ON_QUANTIZED_TRUNK} --lr 1e-05")
    path = Path("mtp2/config.json")
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    rules.check(heads)
    ((problem, _),) = problems_of(dataclasses.replace(heads, min_lr=2 * LR_ON_QUANTIZED_TRUNK))
    assert mentions(problem, f"--lr {LR_ON_QUANTIZED_TRUNK}")


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "hint"),
    [(16, 1, 6, "12 18 24"), (4, 1, 6, "6 12 18"), (5, 2, 1, "4 6 8"), (13, 4, 2, "8 16 24")],
)
def test_global_batch_size_names_near_sizes(here, batch, micro, world_size, hint):
    args = dataclasses.replace(SFT, global_batch_size=batch, micro_batch_size=micro)
    ((problem, told),) = problems_of(args, world_size)
    assert mentions(problem, f"--global_batch_size {batch} --micro_batch_size {micro} {world_size}")
    assert mentions(told, hint)
    sizes = [int(word.strip(",")) for word in hint.split() if word.strip(",").isdigit()]
    for size in sizes:
        rules.check(dataclasses.replace(args, global_batch_size=size), world_size)


def test_gradients_in_bfloat16_require_weights_in_bfloat16(here):
    args = dataclasses.replace(SFT, grad_reduce_in_bf16=True, torch_dtype="float32")
    ((problem, hint),) = problems_of(args)
    assert mentions(problem, "--grad_reduce_in_bf16 --torch_dtype float32")
    assert mentions(hint, "--torch_dtype bfloat16")
    assert rules.check(dataclasses.replace(args, torch_dtype="bfloat16"), world_size=1) == []


def test_8bit_moments_require_torchao(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, optimizer="adamw_8bit"))
    assert mentions(problem, "--optimizer adamw_8bit torchao")
    assert mentions(hint, "pip install torchao")
    assert rules.check(SFT) == []


def test_data_parallel_is_what_tensor_parallel_leaves(here):
    args = dataclasses.replace(SFT, tensor_model_parallel_size=2, global_batch_size=3)
    assert rules.check(args, world_size=6) == []  # 6 / 2 = 3 data-parallel ranks


def test_tensor_parallel_needs_its_processes(here):
    args = dataclasses.replace(SFT, tensor_model_parallel_size=2)
    ((problem, hint),) = problems_of(args, world_size=1)
    assert mentions(problem, "--tensor_model_parallel_size 2 1")
    assert "NPROC_PER_NODE=2 swiftlite" in hint


def test_tensor_parallel_divides_heads_groups_and_ffn(here):
    args = dataclasses.replace(SFT, tensor_model_parallel_size=4)
    assert mention_each(
        problems_of(args, world_size=4),
        [
            "--tensor_model_parallel_size 4 num_attention_heads 6 1 2 3",
            "--tensor_model_parallel_size 4 num_key_value_heads 2 1",
        ],
    )


@pytest.mark.parametrize(
    ("family", "key"),
    [("qwen3_moe", "num_experts"), ("qwen3_moe", "num_local_experts"), ("glm4_moe", "n_routed_experts")],
)
def test_experts_have_a_key_of_each_family(here, family, key):
    """The keys are those of Qwen3 on the hub, of Qwen3 in transformers 5, and of GLM-4.5 and DeepSeek-V3."""
    sizes = {"model_type": family, key: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    change_config(**sizes)
    args = dataclasses.replace(SFT, expert_model_parallel_size=3)
    assert any(
        mention_each([problem], ["--expert_model_parallel_size 3 4 1 2"]) for problem in problems_of(args, world_size=3)
    )


COUNTED = sorted(SIZES.keys() - {"rms_norm_eps", "max_position_embeddings"})  # by these a layout is checked


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gpt2"}, {"model_type": None}, *({key: None} for key in COUNTED)],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_is_not_known_is_not_looked_at(here, change):
    """Only the family reports what is missing in config.json."""
    change_config(**change)
    parallel = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    args = dataclasses.replace(SFT, **parallel, recompute_modules=["moe", "mla_up_proj"], moe_aux_loss_coeff=0.5)
    problems = [problem for problem, _ in problems_of(args, world_size=5) if not mentions(problem, "5")]
    assert len(problems) == 1
    assert mentions(problems[0], "--model plain/config.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lr": 0.0}, "--lr 0.0 0"),
        ({"lr": -1e-5}, "--lr -1e-05 0"),
        ({"lr": math.nan}, "--lr nan 0"),
        ({"lr": math.inf}, "--lr inf 0"),
        ({"split_dataset_ratio": 1.0}, "--split_dataset_ratio 1.0 0 1"),
        ({"lr_warmup_fraction": 1.5}, "--lr_warmup_fraction 1.5 0 1"),
        ({"micro_batch_size": 0}, "--micro_batch_size 0 1"),
        ({"tensor_model_parallel_size": 0}, "--tensor_model_parallel_size 0 1"),
        ({"mtp_num_layers": -1}, "--mtp_num_layers -1 0"),
        ({"mtp_unroll": 0}, "--mtp_unroll 0 1"),
        ({"mtp_clip_grad": -0.5}, "--mtp_clip_grad -0.5 0"),
        ({"mtp_unroll_beta": 0.0}, "--mtp_unroll_beta 0.0 0 1"),
        ({"mtp_loss_scaling_factor": 0.0}, "--mtp_loss_scaling_factor 0.0 0"),
        ({"seed": -1}, "--seed -1 0 4294967296"),
    ],
)
def test_numbers_out_of_range(here, change, problem):
    assert mention_each(problems_of(dataclasses.replace(SFT, **change)), [problem])


@pytest.mark.parametrize("name", ["seed", "lr_warmup_fraction", "acceptance_samples", "clip_grad", "weight_decay"])
def test_zero_is_in_range(here, name):
    rules.check(dataclasses.replace(SFT, **{name: 0}))


def test_all_problems_come_together(here):
    args = SftArgs(dataset=["nowhere.jsonl"], lr=-1.0, global_batch_size=3, mtp_mode="heads_only")
    problems = [problem for problem, _ in problems_of(args, world_size=2)]
    assert len(problems) == 5  # heads_only waits for a model to look at
    assert {problem.split()[0] for problem in problems} == {
        "--model",
        "--dataset",
        "--output_dir",
        "--lr",
        "--global_batch_size",
    }


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (
            dataclasses.replace(SFT, val_dataset=["val.jsonl"], split_dataset_ratio=0.1),
            "--split_dataset_ratio 0.1 --val_dataset",
        ),
        (dataclasses.replace(SFT, train_iters=3, num_train_epochs=2.0), "--num_train_epochs 2.0 --train_iters"),
        (dataclasses.replace(SFT, lr_decay_style="constant", min_lr=0.0), "--min_lr 0.0 --lr_decay_style constant"),
        (dataclasses.replace(SFT, mtp_loss_scaling_factor=0.3), "--mtp_loss_scaling_factor 0.3"),
        (dataclasses.replace(SFT, mtp_unroll=3), "--mtp_unroll 3"),
        (dataclasses.replace(SFT, model="mtp2", mtp_unroll_beta=0.5), "--mtp_unroll_beta 0.5 --mtp_unroll 1"),
        (
            dataclasses.replace(SFT, model="mtp2", mtp_unroll_weights="joint"),
            "--mtp_unroll_weights joint --mtp_unroll 1",
        ),
        (
            dataclasses.replace(
                SFT, mtp_unroll=3, mtp_unroll_weights="joint", mtp_unroll_beta=0.5, mtp_mode="heads_only"
            ),
            "--mtp_unroll_beta 0.5 --mtp_unroll_weights joint",
        ),
        (dataclasses.replace(SFT, mtp_loss="tv"), "--mtp_loss tv"),
        (dataclasses.replace(SFT, mtp_clip_grad=0.5), "--mtp_clip_grad 0.5"),
        (
            dataclasses.replace(SFT, model="mtp2", mtp_num_layers=0, mtp_init="random"),
            "--mtp_init random --mtp_num_layers 0",
        ),
        (dataclasses.replace(SFT, split_dataset_ratio=0, eval_steps=5), "--eval_steps 5 --split_dataset_ratio 0"),
        (
            dataclasses.replace(SFT, model="mtp2", acceptance_samples=0, acceptance_max_new_tokens=5),
            "--acceptance_max_new_tokens 5 --acceptance_samples 0",
        ),
        (dataclasses.replace(SFT, val_dataset=["./train.jsonl#1"]), "./train.jsonl#1 --dataset --val_dataset"),
        (
            dataclasses.replace(SFT, ddp_bucket_size=1000, overlap_grad_reduce=False),
            "--ddp_bucket_size 1000 --overlap_grad_reduce",
        ),
    ],
)
def test_a_setting_without_effect_is_noted(here, args, note):
    assert any(mentions(found, note) for found in rules.check(args))


def test_stages_need_a_pipeline(here):
    staged = dataclasses.replace(SFT, pipeline_model_parallel_layout="Et*2|t*2L")
    assert mention_each(
        problems_of(staged), ["--pipeline_model_parallel_layout Et*2|t*2L 2 --pipeline_model_parallel_size 1"]
    )
    ((problem, _),) = problems_of(dataclasses.replace(SFT, pipeline_model_parallel_layout="Et*99999999999|tL"))
    assert mentions(problem, "--pipeline_model_parallel_layout 99999999999")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer_impl transformer_engine NVIDIA"),
        ({"attention_backend": "flash"}, "--attention_backend flash NVIDIA"),
        ({"attention_backend": "te"}, "--attention_backend te --transformer_impl transformer_engine"),
        ({"attention_backend": "te", "context_parallel_size": 2}, "--attention_backend te --context_parallel_size 2"),
        ({"attention_backend": "te", "mtp_unroll": 2}, "--attention_backend te --mtp_unroll 2"),
    ],
)
def test_kernels_that_are_not_here_are_refused(here, monkeypatch, options, problem):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = problems_of(dataclasses.replace(SFT, **options), world_size=2)
    assert any(mentions(text, problem) for text, _ in found), found


FP8 = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers_at_start_in_bf16": 9}, "--num_layers_at_start_in_bf16 9 2"),
        ({}, "--fp8_format hybrid 2 1 bfloat16"),
        ({"num_layers_at_start_in_bf16": 0, "fp8_recipe": "mxfp8"}, "--fp8_format hybrid 32"),
    ],
)
def test_low_precision_has_layers_and_matrices(here, options, words):
    change_config(intermediate_size=48, num_hidden_layers=2)
    problems = [problem for problem, _ in problems_of(dataclasses.replace(SFT, **FP8, **options))]
    assert any(mentions(problem, words) for problem in problems), problems


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "muon"}, None),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, "--optimizer muon --use_distributed_optimizer"),
        ({"lr_decay_style": "inverse-square-root"}, None),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_fraction": 0.0}, "--lr_decay_style --lr_warmup_fraction"),
        ({"lr_decay_style": "WSD", "lr_warmup_fraction": 0.5, "lr_wsd_decay_fraction": 0.5}, None),
        (
            {"lr_decay_style": "WSD", "lr_warmup_fraction": 0.5, "lr_wsd_decay_fraction": 0.75},
            "--lr_warmup_fraction 0.5 --lr_wsd_decay_fraction 0.75",
        ),
    ],
)
def test_optimizer_and_schedule_fit(here, options, message):
    args = dataclasses.replace(SFT, **options)
    if message is None:
        assert rules.check(args) == []
        return
    ((problem, hint),) = problems_of(args)
    assert mentions(f"{problem} {hint}", message)
