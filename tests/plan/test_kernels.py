"""Test the kernels that `auto` selects, and settings that are rejected."""

import dataclasses
import importlib.util

import pytest
import torch

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import DistributedArgs, KernelArgs
from swiftlite.base.errors import OptionError
from swiftlite.base.heads import Heads
from swiftlite.bridge.join import GATE_UP
from swiftlite.bridge.rows import Row
from swiftlite.plan.kernels import Kernels, Machine, choose, this_machine
from swiftlite.plan.low_precision import LowPrecision, low_precision_misfit
from swiftlite.plan.run import make_plan
from swiftlite.plan.text import render
from tests.messages import has_line, naming

CPU = Machine()
GPU = Machine(is_cuda=True, has_transformer_engine=True, packed_kernel="torch_varlen")
FLASH = dataclasses.replace(GPU, packed_kernel="flash_attn")
HOPPER = dataclasses.replace(GPU, capability=9.0)
CUDNN = dataclasses.replace(HOPPER, has_cudnn_frontend=True)
PLAIN = Machine(is_cuda=True)
AMPERE = Machine(is_cuda=True, capability=8.0)
NEWER = dataclasses.replace(GPU, flash_impls=("FA3", "FA4"))
PLAIN_TE = Machine(is_cuda=True, has_transformer_engine=True)
TE = {"transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("options", "machine", "is_float32", "expected"),
    [
        ({}, CPU, False, Kernels()),
        ({}, GPU, False, Kernels(attention="torch_varlen", is_fused=True, has_grouped_experts=True)),
        (
            {},
            HOPPER,
            False,
            Kernels(attention="torch_varlen", is_fused=True, has_grouped_experts=True, prefers_cudnn=True),
        ),
        (
            {"attention_backend": "cudnn"},
            GPU,
            False,
            Kernels(attention="torch_varlen", is_fused=True, has_grouped_experts=True, prefers_cudnn=True),
        ),
        (
            {"attention_backend": "cudnn"},
            CUDNN,
            False,
            Kernels("local", "torch_varlen", True, True, prefers_cudnn=True, packs_with_cudnn=True),
        ),
        ({}, CUDNN, False, Kernels("local", "torch_varlen", True, True, prefers_cudnn=True)),
        (
            {"attention_backend": "flash"},
            HOPPER,
            False,
            Kernels(attention="torch_varlen", is_fused=True, has_grouped_experts=True),
        ),
        (
            {"deterministic_mode": True},
            HOPPER,
            False,
            Kernels(attention="torch_varlen", is_fused=True, has_grouped_experts=True, is_deterministic=True),
        ),
        ({}, FLASH, False, Kernels(attention="flash_attn", is_fused=True, has_grouped_experts=True)),
        ({}, FLASH, True, Kernels(is_fused=True)),
        ({}, PLAIN, False, Kernels(is_fused=True, has_grouped_experts=True)),
        ({"fused_kernels": "none", "attention_backend": "sdpa"}, FLASH, False, Kernels()),
        ({"attention_backend": "flash"}, FLASH, False, Kernels("local", "flash_attn", True, True)),
        (
            {"transformer_impl": "transformer_engine", "attention_backend": "te"},
            GPU,
            True,
            Kernels("transformer_engine", "te", True, True),
        ),
        ({"attention_backend": "flash4"}, NEWER, False, Kernels("local", "torch_varlen", True, True, flash_impl="FA4")),
        (
            {"fp8_format": "hybrid", "num_layers_at_start_in_bf16": 2},
            CPU,
            False,
            Kernels(low_precision=LowPrecision("hybrid", "rowwise", 2, is_local=True)),
        ),
        (
            {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"},
            PLAIN,
            False,
            Kernels("local", "sdpa", True, True, LowPrecision("e4m3", "tensorwise", is_local=True)),
        ),
        (
            TE | {"fp8_format": "hybrid"},
            PLAIN_TE,
            False,
            Kernels("transformer_engine", "sdpa", True, True, LowPrecision("hybrid", "blockwise")),
        ),
        (
            TE | {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "num_layers_at_end_in_bf16": 0},
            PLAIN_TE,
            False,
            Kernels("transformer_engine", "sdpa", True, True, LowPrecision("e4m3", "mxfp8", bf16_at_end=0)),
        ),
        (
            TE | {"fp4_format": "e2m1"},
            PLAIN_TE,
            False,
            Kernels("transformer_engine", "sdpa", True, True, LowPrecision("e2m1", "nvfp4")),
        ),
    ],
)
def test_what_is_chosen(options, machine, is_float32, expected):
    assert choose(KernelArgs(**options), machine, is_float32=is_float32, head=128) == expected


def test_auto_leaves_large_heads_to_torch():
    assert choose(KernelArgs(), FLASH, is_float32=False, head=320).attention == "sdpa"
    assert not choose(KernelArgs(), HOPPER, is_float32=False, head=192).prefers_cudnn


@pytest.mark.parametrize(
    ("options", "machine", "is_float32", "head", "problem"),
    [
        (TE, CPU, False, 64, "--transformer_impl transformer_engine NVIDIA"),
        (TE, PLAIN, False, 64, "--transformer_impl transformer_engine transformer-engine pip"),
        ({"attention_backend": "te"}, GPU, False, 64, "--attention_backend te --transformer_impl transformer_engine"),
        ({"attention_backend": "flash"}, CPU, False, 64, "--attention_backend flash NVIDIA"),
        ({"attention_backend": "flash"}, PLAIN, False, 64, "--attention_backend flash flash-attn varlen_attn"),
        ({"attention_backend": "flash"}, GPU, True, 64, "--attention_backend flash --torch_dtype float32"),
        ({"attention_backend": "flash"}, GPU, False, 320, "--attention_backend flash 320 256"),
        ({"attention_backend": "flash3"}, GPU, False, 64, "--attention_backend flash3 flash-attn 3"),
        ({"attention_backend": "flash4"}, CPU, False, 64, "--attention_backend flash4 NVIDIA"),
        ({"attention_backend": "flash4"}, NEWER, True, 64, "--attention_backend flash4 --torch_dtype float32"),
        ({"attention_backend": "cudnn"}, CPU, False, 64, "--attention_backend cudnn NVIDIA"),
        ({"attention_backend": "cudnn"}, GPU, True, 64, "--attention_backend cudnn --torch_dtype float32"),
        ({"attention_backend": "cudnn"}, GPU, False, 192, "--attention_backend cudnn 192 128"),
        (
            {"attention_backend": "cudnn", "deterministic_mode": True},
            GPU,
            False,
            64,
            "--attention_backend cudnn --deterministic_mode",
        ),
        ({"fp4_format": "e2m1"}, GPU, False, 64, "--fp4_format e2m1 --transformer_impl transformer_engine"),
        (
            {"fp8_format": "hybrid", "fp8_recipe": "mxfp8"},
            GPU,
            False,
            64,
            "--fp8_recipe mxfp8 --transformer_impl transformer_engine",
        ),
        (
            TE | {"fp8_format": "hybrid", "fp8_recipe": "rowwise"},
            PLAIN_TE,
            False,
            64,
            "--fp8_recipe rowwise --transformer_impl local",
        ),
        ({"fp8_format": "hybrid"}, AMPERE, False, 64, "--fp8_format hybrid rowwise 8.9 8.0"),
        ({"fp8_format": "hybrid"}, CPU, True, 64, "--fp8_format hybrid --torch_dtype float32"),
        (TE | {"fp8_format": "hybrid"}, CPU, False, 64, "--transformer_impl transformer_engine NVIDIA"),
        (TE | {"fp8_format": "hybrid"}, GPU, True, 64, "--fp8_format hybrid --torch_dtype float32"),
        (TE | {"fp8_format": "hybrid", "fp4_format": "e2m1"}, GPU, False, 64, "--fp4_format e2m1 --fp8_format hybrid"),
        (TE | {"fp8_recipe": "mxfp8"}, GPU, False, 64, "--fp8_recipe mxfp8 --fp8_format"),
    ],
)
def test_what_cannot_be_had_is_refused(options, machine, is_float32, head, problem):
    with pytest.raises(OptionError, match=naming(problem)):
        choose(KernelArgs(**options), machine, is_float32=is_float32, head=head)


def test_this_machine_is_what_can_be_imported():
    machine = this_machine(is_cuda=False)
    assert machine.has_transformer_engine is (importlib.util.find_spec("transformer_engine") is not None)
    if machine.packed_kernel == "torch_varlen":
        assert {"scale", "window_size"} <= {
            *importlib.import_module("torch.nn.attention.varlen").varlen_attn.__annotations__
        }
    assert torch.__version__


@pytest.mark.parametrize(
    ("words", "expected"),
    [("scale, is_causal", None), ("scale, window_size", "torch_varlen"), ("window_size, enable_gqa", "torch_varlen")],
    ids=["2.10", "2.11", "2.13"],
)
def test_torch_packs_rows_from_the_release_that_has_windows(words, expected, tmp_path, monkeypatch):
    """Causal attention aligned to the lower right requires `window_size`. Grouped heads require no argument."""
    file = tmp_path / "nn" / "attention" / "varlen.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def varlen_attn(query, key, value, *, {words}): ...")
    monkeypatch.setattr(torch.__spec__, "origin", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("swiftlite.plan.kernels._has_file", lambda package, path: False)
    assert this_machine(is_cuda=True).packed_kernel == expected


@pytest.mark.parametrize(
    ("options", "world_size", "is_cuda", "expected"),
    [
        ({}, 1, True, (False, False, False)),
        ({}, 2, False, (False, False, False)),
        ({}, 2, True, (True, True, True)),
        ({"context_parallel_size": 2}, 2, True, (True, True, True)),
        ({"tensor_model_parallel_size": 2}, 2, True, (False, False, False)),
        ({"overlap_grad_reduce": False}, 2, True, (True, False, False)),
        ({"use_distributed_optimizer": True}, 2, False, (True, False, False)),
    ],
)
def test_ranks_share_on_gpus_unless_told_otherwise(options, world_size, is_cuda, expected):
    plan = make_plan(SftArgs(**options), world_size, Heads(), Machine(is_cuda=is_cuda))
    found = plan.distributed
    assert isinstance(found, DistributedArgs)
    assert (found.use_distributed_optimizer, found.overlap_grad_reduce, found.overlap_param_gather) == expected


@pytest.mark.parametrize(
    ("options", "machine", "expected"),
    [
        ({}, CPU, 1),
        ({}, GPU, 64),
        ({"context_parallel_size": 3}, GPU, 192),
        ({"padding_free": True, "micro_batch_size": 2}, GPU, 1),
        (TE | {"fp8_format": "hybrid", "padding_free": True, "micro_batch_size": 2}, PLAIN_TE, 16),
        ({"fp8_format": "hybrid", "padding_free": True, "micro_batch_size": 2}, GPU, 1),
        (TE | {"fp4_format": "e2m1", "context_parallel_size": 3}, PLAIN_TE, 192),
    ],
)
def test_padded_rows_of_gpus_have_few_lengths(options, machine, expected):
    assert make_plan(SftArgs(**options), 3, Heads(), machine).row_multiple == expected


@pytest.mark.parametrize(
    ("row", "ranks", "expected"),
    [
        (Row("linear_proj.weight", {"o_proj.weight": (64, 96)}), 2, 0),
        (Row("linear_proj.weight", {"o_proj.weight": (64, 96)}), 4, 24),
        (Row("linear_proj.weight", {"o_proj.weight": (72, 96)}), 1, 72),
        (Row("linear_fc1.weight", {"gate.weight": (24, 64), "up.weight": (24, 64)}, GATE_UP), 1, 0),
        (Row("linear_fc1.weight", {"gate.weight": (24, 64), "up.weight": (24, 64)}, GATE_UP), 2, 24),
        (Row("mlp.router.weight", {"gate.weight": (6, 64)}), 1, 0),
        (Row("linear_q_down_proj.weight", {"q_a_proj.weight": (24, 64)}), 1, 0),
    ],
)
def test_matrices_that_low_precision_does_not_take(row, ranks, expected):
    assert low_precision_misfit(row, ranks, 16) == expected


def test_the_plan_says_so():
    args = SftArgs(model="m", dataset=["d.jsonl"], output_dir="o")
    text = render(args, make_plan(args, 2, Heads(), FLASH), Heads(), None)
    assert has_line(text, "flash-attn")
    assert has_line(text, "RMSNorm SwiGLU")
    alone = dataclasses.replace(args, use_distributed_optimizer=False, overlap_grad_reduce=False)
    assert text != render(alone, make_plan(alone, 2, Heads(), FLASH), Heads(), None)
