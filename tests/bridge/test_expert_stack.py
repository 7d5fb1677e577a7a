"""Test experts in both forms of files, the router's bias, and the copies inside GLM-4.5's heads."""

import json
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from swiftlite import families
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.encoding.expert_stack import stack
from swiftlite.bridge.hf_config import read_config
from tests.bridge.test_transfer import (
    assert_same_tensors,
    build,
    change_tensors,
    load,
    read_all,
    refusal,
    save,
    shard,
)
from tests.messages import mention_each, mentions, naming
from tests.model_tensors import tensors_of
from tests.tiny import make_tiny_hf, make_tiny_model

MOE = ["glm4_moe", "qwen3_moe"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def check_directory(directory: Path, source: Path) -> list[str]:
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return audit_hf(directory, families.get(read_config(directory)))


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", MOE)
def test_stacked_experts_come_back_stacked(tmp_path, mesh, family, depth, sharded):
    """Experts of the trunk are stacked, those of the heads are not. Each is exported as it was stored."""
    source = make_tiny_hf(tmp_path / "in", family, depth, packed_experts=True)
    apart = make_tiny_hf(tmp_path / "apart", family, depth)
    assert GATE_UP in read_all(source)
    assert GATE_UP not in read_all(apart)
    original = read_all(source)
    if sharded:
        shard(source, 3)
    load(model := build(source, mesh, depth), source)
    load(same := build(apart, mesh, depth), apart)
    for (name, tensor), (_, other) in zip(tensors_of(model), tensors_of(same), strict=True):
        assert torch.equal(tensor, other), name
    save(model, source, tmp_path / "out", max_shard_bytes=50_000 if sharded else 10**9)
    assert_same_tensors(read_all(tmp_path / "out"), original)
    assert check_directory(tmp_path / "out", source) == []


@pytest.mark.parametrize("family", MOE)
def test_single_experts_are_stacked_as_transformers_does(tmp_path, family):
    """transformers has written both directories of the same model."""
    apart = read_all(make_tiny_hf(tmp_path / "apart", family))
    assert_same_tensors(stack(apart), read_all(make_tiny_hf(tmp_path / "stacked", family, packed_experts=True)))


@pytest.mark.parametrize("original_format", [True, False], ids=["apart", "stacked"])
@pytest.mark.parametrize("family", MOE)
def test_what_transformers_writes_is_read(tmp_path, mesh, family, original_format):
    """transformers 5 has stacked experts in memory. save_pretrained writes single experts unless the test asks for
    stacks.
    """
    torch.manual_seed(0)
    hf = make_tiny_model(family)
    hf.save_pretrained(tmp_path / "in", save_original_format=original_format)
    config = read_config(tmp_path / "in") | {"num_nextn_predict_layers": 0}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    assert (GATE_UP in read_all(tmp_path / "in")) is not original_format
    load(model := build(tmp_path / "in", mesh, depth=0), tmp_path / "in")
    save(model, tmp_path / "in", tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(tmp_path / "in"))
    check_directory(tmp_path / "out", tmp_path / "in")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same_tensors(dict(again.state_dict()), dict(hf.state_dict()))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_have_their_own_numbers(tmp_path, mesh, is_transposed):
    """Megatron's fc1 is [gate, up] of one expert. Transposed stacks are recognized even if matrices are square."""
    family = "qwen3_vl_moe" if is_transposed else "qwen3_moe"
    source = make_tiny_hf(tmp_path, family, packed_experts=not is_transposed, moe_intermediate_size=32)
    load(model := build(source, mesh, depth=0), source)
    stacks = {name.rpartition(".")[2]: tensor for name, tensor in read_all(source).items() if "layers.1.mlp.ex" in name}
    assert stacks["gate_up_proj"].shape == (4, 64, 64)
    for expert in range(4):
        prefix = f"decoder.layers.1.mlp.experts.local_experts.{expert}."
        for linear, name in {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}.items():
            matrix = stacks[name][expert]
            parameter = model.get_parameter(f"{prefix}{linear}.weight")
            assert torch.equal(parameter, matrix.T if is_transposed else matrix)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "model.layers.1.mlp.experts.3.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.ones(32, 64)}),
            "model.layers.1.mlp.experts.4.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.2.down_proj.weight": torch.ones(32, 64)}),
            "model.layers.1.mlp.experts.2.down_proj.weight [32, 64] config.json [64, 32]",
        ),
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), "model.layers.1.mlp.gate.weight"),
        (lambda t: t.pop(BIAS), f"{BIAS}"),
        (
            lambda t: t.pop("model.layers.1.mlp.shared_experts.gate_proj.weight"),
            "model.layers.1.mlp.shared_experts.gate_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(4, 64)}),
            "model.layers.0.mlp.gate.weight",  # a dense layer
        ),
    ],
)
def test_experts_that_do_not_fit(tmp_path, mesh, change, expected):
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", depth=1)
    change_tensors(source, change)
    assert mentions(refusal(build(source, mesh, depth=1), source), expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 64, 64), "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ((5, 64, 64), "model.layers.1.mlp.experts.4.up_proj.weight"),
        ((4, 96, 64), "model.layers.1.mlp.experts.0.gate_proj.weight [48, 64] config.json [32, 64]"),
        ((4, 63, 64), f"{GATE_UP}"),
        ((256, 64), f"{GATE_UP}"),
    ],
)
def test_stacks_that_do_not_fit(tmp_path, mesh, shape, expected):
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", packed_experts=True)
    change_tensors(source, lambda tensors: tensors.update({GATE_UP: torch.ones(shape)}))
    assert mentions(refusal(build(source, mesh, depth=0), source), expected)


def test_router_bias_stays_float32(tmp_path, mesh):
    """The bias is bitwise unchanged by a bfloat16 model, and by the cast in training's wrapper."""
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", depth=1, dtype=torch.bfloat16)
    original = read_all(source)
    assert original[BIAS].dtype is torch.float32
    assert not torch.equal(original[BIAS].bfloat16().float(), original[BIAS])
    inner = build(source, mesh, depth=1, dtype=torch.bfloat16)
    load(inner, source)
    wrapped = Float16Module(inner.config, inner)
    router = inner.get_submodule("decoder.layers.1.mlp.router")
    assert router.get_buffer("local_tokens_per_expert").dtype is torch.float32
    assert torch.equal(router.get_buffer("expert_bias"), original[BIAS])
    save(wrapped, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), original)


COPIES = {
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_head_of_its_own_is_refused(tmp_path, mesh, copy):
    """megatron-core's heads share the trunk's embedding and output layer, so a different one would be lost silently."""
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", depth=1)
    change_tensors(source, lambda tensors: tensors[copy][5, 5].add_(1))
    with pytest.raises(Exception, match=naming(f"{copy} {COPIES[copy]} 0")):
        load(build(source, mesh, depth=1), source)
    # Heads that are dropped, or started anew, may be what they like.
    load(build(source, mesh, depth=0), source)
    load(build(source, mesh, depth=1), source, mtp_init="copy_last_layer")
    assert mention_each(audit_hf(source, families.get(read_config(source))), [f"{copy} {COPIES[copy]}"])


def test_copies_that_are_absent_stay_absent(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", depth=1)
    original = read_all(source)
    change_tensors(source, lambda tensors: [tensors.pop(copy) for copy in COPIES])
    load(model := build(source, mesh, depth=1), source)
    save(model, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), {key: original[key] for key in original if key not in COPIES})


def test_copies_of_a_tied_model(tmp_path, mesh):
    """Both copies equal the embedding."""
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", depth=1, tied=True)
    load(model := build(source, mesh, depth=1), source)
    save(model, source, tmp_path / "out")
    written = read_all(tmp_path / "out")
    for copy in COPIES:
        assert torch.equal(written[copy], written["model.embed_tokens.weight"])


def test_copies_of_another_shape(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "glm4_moe", depth=1)
    key = "model.layers.2.shared_head.head.weight"
    change_tensors(source, lambda tensors: tensors.update({key: torch.ones(64, 64)}))
    assert mentions(refusal(build(source, mesh, depth=1), source), f"{key} [64, 64] config.json [128, 64]")


def test_experts_in_both_forms(tmp_path):
    """A file with experts in both forms is ambiguous, and is rejected."""
    source = make_tiny_hf(tmp_path, "qwen3_moe")
    stacked = read_all(make_tiny_hf(tmp_path / "stacked", "qwen3_moe", packed_experts=True))
    save_file(read_all(source) | {GATE_UP: stacked[GATE_UP]}, source / "model.safetensors")
    assert mention_each(audit_hf(source, families.get(read_config(source))), [f"{GATE_UP}"])
