"""Test that commands name the tensor if quantization_config does not describe the heads in the files.

Engines do not report this: they cast numbers to codes, the answers are correct, and no draft is accepted.
"""

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from swiftlite.bridge.hf_config import read_config
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.quantized import head_modules
from tests.e2e import vllm_here
from tests.e2e.conftest import Commands
from tests.engines.quantized_lists import change_quantization, list_plain, list_trunk
from tests.messages import mentions
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

quantized = pytest.importorskip("tests.quantized", exc_type=ImportError)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
BLOCK = quantized.BLOCK[0]


def make(directory: Path, family: str, name: str = "fp8_blocks", block: bool = False, **options) -> Path:
    plain = make_tiny_hf(directory / "plain", family, 1, dtype=torch.bfloat16, with_tokenizer=True)
    model = quantized.quantize_hf(plain, directory / "model", name, block=block, ignore=[], **options)
    list_trunk(model)
    return model


def listed(directory: Path) -> list[str]:
    return read_config(directory)["quantization_config"]["modules_to_not_convert"]


def with_names_of_files(directory: Path) -> Path:
    """MiMo: vLLM calls the layer of the head model.layers.2."""
    model = make(directory, "mimo")
    found = resolve_served(model)
    modules = head_modules(found.family, found.config, 0)
    names = [modules.prefix + name for name in modules.projections]
    change_quantization(model, modules_to_not_convert=[*listed(model), *names, *modules.others])
    return model


def with_one_shard_plain(directory: Path) -> Path:
    plain = "mtp.layers.0.self_attn.k_proj"
    model = make(directory, "qwen3", block=True, but=[plain])
    change_quantization(model, modules_to_not_convert=[*listed(model), plain, "mtp.fc"])
    return model


def with_forgotten_projection(directory: Path) -> Path:
    model = make(directory, "qwen3_next")
    list_plain(model, keeps_block=True)
    change_quantization(model, modules_to_not_convert=[name for name in listed(model) if name != "mtp.fc"])
    return model


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "names of the files": (with_names_of_files, "model.mtp_layers.0.self_attn.q_proj.weight"),
    "no list": (partial(make, family="glm4_moe"), "model.layers.2.self_attn.q_proj.weight"),
    "one shard of a merged module": (with_one_shard_plain, "mtp.layers.0.self_attn.k_proj.weight"),
    "forgotten projection": (with_forgotten_projection, "mtp.fc.weight"),
}
"""Functions that write such a model, and the tensor that messages must name."""


@pytest.fixture
def hosted(tmp_path, vllm_host) -> Commands:
    """Return commands whose process has imported vLLM."""
    (tmp_path / "rows.jsonl").write_text('{"query": "What is 1 plus 1?", "response": "It is 2."}\n' * 4)
    return Commands(tmp_path, vllm_host)


def train(commands: Commands) -> None:
    commands.ok(
        *"megatron sft --model model --dataset rows.jsonl --output_dir run --torch_dtype bfloat16 --train_iters 1 "
        "--micro_batch_size 2 --global_batch_size 2 --acceptance_samples 0 --split_dataset_ratio 0 --report_to none "
        "--lr 1e-3".split()
    )


EXPORT = f"export --to_hf --model run --output_dir out --quant_method fp8 --quant_block {BLOCK}".split()
SERVE = "infer --model model --infer_backend vllm --speculative mtp --val_dataset rows.jsonl --max_new_tokens 4".split()


@pytest.mark.parametrize("name", BROKEN)
def test_commands_name_the_tensor(hosted, name):
    make_broken, tensor = BROKEN[name]
    make_broken(hosted.directory)
    examined = hosted.run("doctor", "--model", "model")
    assert examined.returncode == 1
    assert mentions(examined.stdout, tensor)
    served = hosted.run(*SERVE)
    assert served.returncode != 0
    assert mentions(served.stderr, tensor)


@pytest.mark.parametrize("name", some_of(BROKEN, "one shard of a merged module", "forgotten projection"))
def test_an_export_does_not_repeat_the_defect(hosted, name):
    """A list is completed, and the message names the tensor. A module that is half quantized is refused."""
    make_broken, tensor = BROKEN[name]
    make_broken(hosted.directory)
    train(hosted)
    exported = hosted.run(*EXPORT)
    assert mentions(exported.stderr, tensor)
    if name == "one shard of a merged module":
        assert exported.returncode == 1
        assert mentions(exported.stderr, "--quant_heads keep")
        assert not (hosted.directory / "out").exists()
        hosted.ok(*EXPORT, "--quant_heads", "keep")
    else:
        assert exported.returncode == 0
    hosted.ok("doctor", "--model", "out")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["doctor", "--model", "model", "--engine", "vllm"], id="doctor", marks=pytest.mark.slow),
        pytest.param(SERVE, id="infer"),
    ],
)
def test_a_format_that_vllm_does_not_support_is_refused_before_the_start(hosted, command):
    """vLLM supports gptq only without zero points."""
    model = make(hosted.directory, "qwen3", "gptq_asym", block=True)
    list_plain(model, keeps_block=False)
    done = hosted.run(*command)
    assert done.returncode != 0
    assert mentions(done.stdout + done.stderr, "quantization_config sym=False --infer_backend")


@pytest.mark.parametrize(
    ("name", "has_amx", "word"), [("int8", True, "seed_oss"), ("int8", False, ""), ("fp8", True, "")]
)
def test_integers_of_one_family_are_refused_on_cpus_with_amx(tmp_path, vllm_host, name, has_amx, word):
    """vLLM's kernel for 8-bit integers on these CPUs requires inputs of two dimensions."""
    model = make(tmp_path, "seed_oss", name)
    problem = vllm_host.call(partial(vllm_here.refused_format, model, has_amx))
    assert bool(problem) == bool(word)
    assert mentions(problem, word)


@pytest.mark.parametrize(
    ("name", "has_avx512", "word"), [("int4", False, "AVX-512"), ("int4", True, ""), ("fp8", False, "")]
)
def test_packed_integers_are_refused_on_cpus_without_avx_512(tmp_path, vllm_host, name, has_avx512, word):
    """vLLM starts there, and fails at the first request."""
    problem = vllm_host.call(partial(vllm_here.refused_on, has_avx512, make(tmp_path, "qwen3", name)))
    assert bool(problem) == bool(word)
    assert mentions(problem, word)


def test_vllm_stops_at_uninitialized_scales(tmp_path, vllm_host):
    """vLLM itself refuses such a model with the options that swiftlite passes to it, and starts with its defaults."""
    model = make(tmp_path, "mimo", "int8")
    found = resolve_served(model)
    names = head_modules(found.family, found.config, 0)
    change_quantization(model, ignore=["lm_head", f"re:{re.escape(names.prefix)}.*"])
    assert vllm_host.call(partial(vllm_here.start_unchecked, model, is_tracked=False)) == ""
    refusal = vllm_host.call(partial(vllm_here.start_unchecked, model, is_tracked=True))
    assert mentions(refusal, "model.mtp_layers.2.mtp_block.self_attn.qkv_proj.weight_scale")
