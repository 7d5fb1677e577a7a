"""Test that --megatron_config accepts only settings that reach megatron-core, and explains why it refuses others."""

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer as stock_buffers
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from swiftlite.args.commands import SftArgs
from swiftlite.args.docs import options
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.families.index import FAMILIES
from swiftlite.families.resolved import resolve
from swiftlite.model import build
from swiftlite.model.open import open_model
from swiftlite.plan import megatron_config
from swiftlite.plan.megatron_config import SETTINGS, megatron_names, setting_problems, settings_of
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.runtime.device import current_device
from swiftlite.train import optim
from tests.messages import mentions
from tests.tiny import make_tiny_hf

DOCS = Path(__file__).parents[2] / "docs"
CLASSES: dict[str, Any] = {
    "TransformerConfig": TransformerConfig,
    "DistributedDataParallelConfig": DistributedDataParallelConfig,
    "OptimizerConfig": OptimizerConfig,
}
VALUES = {name: True if setting.type is bool else 0.25 for name, setting in SETTINGS.items()}
VALUES["decoupled_weight_decay"] = False
GIVEN = {owner: {name: VALUES[name] for name in VALUES if SETTINGS[name].owner == owner} for owner in CLASSES}


def fields_of(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class) if not field.name.startswith("_")}


@pytest.mark.parametrize("name", SETTINGS)
def test_types_are_those_of_megatron_core(name):
    setting = SETTINGS[name]
    kind = get_args(setting.type)[0] if get_args(setting.type) else setting.type
    annotation = get_type_hints(CLASSES[setting.owner])[name]
    assert kind in (annotation, *get_args(annotation))
    assert [owner for owner, config_class in CLASSES.items() if name in fields_of(config_class)] == [setting.owner]


@pytest.mark.parametrize("name", SETTINGS)
def test_values_differ_from_the_defaults(name):
    field = inspect.signature(CLASSES[SETTINGS[name].owner]).parameters[name]
    assert VALUES[name] != field.default


def test_each_name_is_in_one_table():
    tables = [SETTINGS, *(vars(megatron_config)[name] for name in ("_RENAMED", "_FROM_MODEL", "_SET", "_REASONS"))]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert set(names) <= megatron_names()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_documentation_lists_the_settings(language):
    text = (DOCS / language / "parallel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:model|DDP|optimizer) \|", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(SETTINGS)


def test_names_are_read_from_the_source():
    expected = set().union(*map(fields_of, [*CLASSES.values(), MLATransformerConfig]))
    assert expected <= megatron_names()
    assert not {name for name in megatron_names() if name.startswith("_")}


def test_settings_reach_the_config_of_the_model(monkeypatch):
    for kernel in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        monkeypatch.setattr(moe_utils, f"fused_{kernel}", print, raising=False)  # of Transformer Engine; never called
    given = GIVEN["TransformerConfig"]
    virtual = ParallelLayout(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    architecture = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 1, "activation_func": "silu"}
    common: dict[str, Any] = {"device": current_device(), "dtype": torch.bfloat16, "mtp_num_layers": 1}
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        config = build.build_config(architecture, **common, layout=virtual, settings=given)
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    assert {name: getattr(config, name) for name in given} == given


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory):
    return resolve(make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3_moe", depth=1))


def test_settings_reach_ddp_and_optimizer(hf_model, mesh, monkeypatch):
    monkeypatch.setattr(stock_buffers, "dist_reduce_scatter_func", before := stock_buffers.dist_reduce_scatter_func)
    args = SftArgs(train_iters=2, megatron_config=VALUES, use_distributed_optimizer=True, grad_reduce_in_bf16=True)
    assert list(setting_problems(args.megatron_config)) == []
    buffers_on_gpus = {"nccl_ub": False}  # tests/train/test_megatron_options.py
    model_settings = {"moe_z_loss_coeff": 0.25}
    chunks, _ = open_model(hf_model, mesh, dtype=torch.bfloat16, mcore_config=model_settings)
    assert all(chunk.config.moe_z_loss_coeff == 0.25 for chunk in chunks)
    given = settings_of(args.megatron_config, "DistributedDataParallelConfig")
    assert given == GIVEN["DistributedDataParallelConfig"]
    given |= buffers_on_gpus
    wrapped = optim.wrap_model(chunks, mesh, torch.bfloat16, args, given)
    assert {name: getattr(wrapped[0].ddp_config, name) for name in given} == given
    assert stock_buffers.dist_reduce_scatter_func is not before
    plan = make_plan(args, 1, Heads(1))
    optimizer, _ = optim.make_optimizer(args, plan, make_schedule(args, 1), wrapped, mesh)
    given = GIVEN["OptimizerConfig"]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        assert {name: getattr(part.config, name) for name in given} == given


def test_what_swiftlite_sets_is_refused(hf_model, mesh, monkeypatch):
    """Record what swiftlite passes to the config classes."""
    passed: set[str] = set()

    def recording(config_class: Any) -> Any:
        def construct(**arguments: Any) -> Any:
            passed.update(arguments)
            return config_class(**arguments)

        return construct

    monkeypatch.setattr(build, "TransformerConfig", recording(TransformerConfig))
    monkeypatch.setattr(optim, "DistributedDataParallelConfig", recording(DistributedDataParallelConfig))
    monkeypatch.setattr(optim, "OptimizerConfig", recording(OptimizerConfig))
    args = SftArgs(train_iters=2)
    chunks, _ = open_model(hf_model, mesh, dtype=torch.bfloat16)
    wrapped = optim.wrap_model(chunks, mesh, torch.bfloat16, args)
    optim.make_optimizer(args, make_plan(args, 1, Heads(1)), make_schedule(args, 1), wrapped, mesh)
    assert {"bf16", "num_layers", "adam_eps", "overlap_grad_reduce"} <= passed
    assert not passed & set(SETTINGS)
    known = megatron_config._SET | megatron_config._FROM_MODEL | set(megatron_config._RENAMED) | set(options(SftArgs))
    assert passed - known == set()


def test_settings_of_every_family_are_refused(tmp_path):
    for name in FAMILIES:
        hf_model = resolve(make_tiny_hf(tmp_path / name, name))
        fields = set(hf_model.family.architecture(hf_model.config).mcore_config()) & megatron_names()
        assert fields <= megatron_config._FROM_MODEL, name


@pytest.mark.parametrize(
    ("given", "problem", "hint"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size", "--tensor_model_parallel_size"),
        ({"bf16": True}, "bf16", "--torch_dtype"),
        ({"bucket_size": 3}, "bucket_size", "--ddp_bucket_size"),
        ({"hidden_size": 3}, "hidden_size config.json", "hidden_size"),
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss", "calculate_per_token_loss"),
        ({"loss_scale": 2.0}, "loss_scale", "remove loss_scale"),
        ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion", "docs/en/parallel.md"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl CUDA", "docs/en/parallel.md"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm", "docs/en/parallel.md"),
        ({"moe_z_los_coef": 0.1}, "moe_z_los_coef", "moe_z_loss_coeff"),
        ({"hiden_size": 0.1}, "hiden_size", "hidden_size"),
        ({"q!": 1}, "q!", "check_for_nan_in_grad"),
        ({"moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff -1.0 0", ""),
        ({"moe_z_loss_coeff": True}, "moe_z_loss_coeff true 0", ""),
        ({"moe_z_loss_coeff": math.inf}, "moe_z_loss_coeff Infinity finite 0", ""),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload", "--optimizer_cpu_offload"),
        ({"moe_enable_deepep": True}, "moe_enable_deepep", "--moe_flex_dispatcher_backend"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type", "--moe_token_dispatcher_type"),
        ({"decoupled_lr": "0.1"}, 'decoupled_lr "0.1"', ""),
        ({"decoupled_lr": None}, "decoupled_lr null", ""),
        ({"check_for_nan_in_grad": 1}, "check_for_nan_in_grad 1", ""),
    ],
)
def test_refusals(given, problem, hint):
    ((found, suggestion),) = setting_problems(given)
    assert mentions(found, f"--megatron_config {problem}")
    assert mentions(suggestion, hint)
