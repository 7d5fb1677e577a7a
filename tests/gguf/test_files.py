"""Test that GGUF files contain every tensor, and can be converted back to the same files."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.families import FAMILIES as FAMILIES_OF_MODELS
from swiftlite.families.resolved import resolve
from swiftlite.families.serving.llamacpp import ARCHITECTURES
from swiftlite.gguf.metadata import EXACT
from swiftlite.gguf.read import GgufFile
from swiftlite.gguf.write import write_draft_gguf, write_gguf
from tests.engines.gemma4_assistant_reference import (
    PREFIX,
    config_for,
    declare,
    make_trunk,
    random_assistant,
    settings_of,
)
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import ALIKE, GEMMA4_E, LLAMACPP_SIZES, make_tiny_hf

FAMILIES = some_of(ARCHITECTURES, *(family for family in ARCHITECTURES if family not in ALIKE))
E_SIZES = GEMMA4_E | {"vocab_size_per_layer_input": 320}
"""Sizes of a Gemma 4 like E2B with the test tokenizer, whose last layer with keys of its own has a sliding window."""
DENSE = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def back(file: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Convert a GGUF file back, and return the tensors."""
    directory.mkdir()
    content = GgufFile(file)
    content.write_small_files(directory)
    content.write_weights(directory)
    return load_file(directory / "model.safetensors")


def write(directory: Path, file: Path, gguf_type) -> Path:
    write_gguf(resolve(directory), file, gguf_type)
    return file


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_is_bitwise_identical(tmp_path, family, dtype):
    sizes = LLAMACPP_SIZES.get(family, {})
    source = make_tiny_hf(tmp_path / "source", family, depth=1, dtype=dtype, with_tokenizer=True, **sizes)
    file = write(source, tmp_path / "model.gguf", TYPES[dtype])
    before, after = load_file(source / "model.safetensors"), back(file, tmp_path / "back")
    towers = {name for name in before if name.startswith("model.visual.")}
    assert after.keys() == before.keys() - towers
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor, before[name]), name
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((source / name).read_text())


@pytest.mark.parametrize(
    ("family", "sizes"),
    some_of(
        [
            ("gemma4", {}),
            ("gemma4_unified", {}),
            ("nemotron_h", DENSE),
            ("gemma4_text", E_SIZES | {"num_kv_shared_layers": 2}),
        ],
        ("gemma4", {}),
        ("gemma4_text", E_SIZES | {"num_kv_shared_layers": 2}),
    ),
)
def test_a_round_trip_of_a_trunk_is_bitwise_identical(tmp_path, family, sizes):
    source = make_tiny_hf(tmp_path / "source", family, dtype=torch.bfloat16, with_tokenizer=True, **sizes)
    before = load_file(source / "model.safetensors")
    after = back(write(source, tmp_path / "model.gguf", "bf16"), tmp_path / "back")
    hf_config = resolve(source).config
    assert after.keys() == {name for name in before if not FAMILIES_OF_MODELS[family].is_carried(hf_config, name)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_norms_with_small_weights_keep_their_bits(tmp_path):
    """1 + weight loses bits of small weights, so the file also contains the weights."""
    source = make_tiny_hf(tmp_path / "source", "qwen3_5_text", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1e-12)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    file = write(source, tmp_path / "model.gguf", "bf16")
    assert f"{EXACT}model.norm.weight" in GGUFReader(file).fields
    assert torch.equal(back(file, tmp_path / "back")["model.norm.weight"], tensors["model.norm.weight"])


@pytest.mark.parametrize("gguf_type", ["q8_0", "q4_0", "f16"])
def test_types_of_tensors(tmp_path, gguf_type):
    """The decoder layer of the head is never coarser than q8_0; vectors are float32."""
    source = make_tiny_hf(
        tmp_path / "source", "qwen3", depth=1, with_tokenizer=True, hidden_size=64, intermediate_size=96
    )
    file = write(source, tmp_path / "model.gguf", gguf_type)
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    trunk, head = tensors["blk.0.ffn_up.weight"], tensors["blk.2.ffn_up_shexp.weight"]
    assert trunk.tensor_type is GGMLQuantizationType[gguf_type.upper()]
    assert head.tensor_type is GGMLQuantizationType["Q8_0" if gguf_type == "q4_0" else gguf_type.upper()]
    assert tensors["blk.0.attn_norm.weight"].tensor_type is GGMLQuantizationType.F32
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    read = back(file, tmp_path / "back")["model.layers.0.mlp.up_proj.weight"]
    half_step = {"q8_0": weight.abs().max() / 127 / 2, "q4_0": weight.abs().max() / 8, "f16": 1e-3}[gguf_type]
    # bfloat16, in which the source is, rounds once more
    assert (read.float() - weight.float()).abs().max() <= half_step + weight.abs().max() / 256


def test_a_tensor_without_a_place_is_named(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, with_tokenizer=True)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=naming("model.layers.0.self_attn.extra.weight")):
        write(source, tmp_path / "model.gguf", "bf16")


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}, "rope_type llama3"),
        ("mistral", {"sliding_window": 8}, "sliding_window 8"),
        ("qwen3", {"intermediate_size": 40}, "intermediate_size 40 32"),
        ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor 1.2"),
        ("qwen3", {"rope_parameters": YARN | {"mscale": 1.0}}, "mscale mscale_all_dim"),
        ("gemma4_text", {}, "gemma4 --mtp strip vllm"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}, "MLP experts"),
        (
            "nemotron_h",
            {
                "layers_block_type": ["linear_attention", "full_attention", "mlp", "mlp"],
                "mtp_hybrid_override_pattern": "*",
            },
            "MTP head without experts",
        ),
    ],
)
def test_what_llamacpp_cannot_compute_is_named(tmp_path, family, change, named):
    source = make_tiny_hf(tmp_path / "source", family, depth=1, with_tokenizer=True)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=naming(named)):
        write(source, tmp_path / "model.gguf", "bf16")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (E_SIZES, "num_kv_shared_layers sliding_attention full_attention"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types sliding_attention"),
    ],
)
def test_layers_of_gemma_4_that_llamacpp_does_not_have_are_named(tmp_path, sizes, named):
    """In llama.cpp, layers can only share the keys of the last layers of each kind if these are next to each other."""
    source = make_tiny_hf(tmp_path / "source", "gemma4_text", with_tokenizer=True, **sizes)
    with pytest.raises(UserError, match=naming(named)):
        write(source, tmp_path / "model.gguf", "bf16")


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4"])
def test_the_file_of_a_trunk_does_not_declare_a_drafter_in_another_file(tmp_path, family):
    source = make_trunk(tmp_path / "source", family, with_tokenizer=True)
    before = json.loads((source / "config.json").read_text())
    before.get("text_config", before).pop("num_nextn_predict_layers", None)
    add_assistant_to(source)
    assert resolve(source).heads.kind == "gemma4_assistant"
    back(write(source, tmp_path / "model.gguf", "f32"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == before


def add_assistant_to(source: Path) -> None:
    """Add an assistant, which an export declares in `text_config`, if there is one."""
    config = json.loads((source / "config.json").read_text())
    tensors, sizes = load_file(source / "model.safetensors"), settings_of(source)
    own = {PREFIX + name: tensor for name, tensor in random_assistant(sizes).state_dict().items()}
    own.pop(PREFIX + "lm_head.weight")
    save_file(tensors | own, source / "model.safetensors", {"format": "pt"})
    drafter = {"kind": "gemma4_assistant", "layers": 1, "feature_layers": [2, 3], "config": config_for(sizes).to_dict()}
    config.get("text_config", config)["drafter"] = drafter
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("changed", "named"), [({"hidden_size": 64}, "hidden_size 64"), ({}, "layer_types")])
def test_an_assistant_that_llamacpp_does_not_run_is_named(tmp_path, changed, named):
    number = 1 if changed else 2  # of the layers with full attention
    kinds = ["sliding_attention"] * (3 - number) + ["full_attention"] * number
    source = make_tiny_hf(
        tmp_path / "source", "gemma4_text", tied=True, with_tokenizer=True, num_hidden_layers=3, layer_types=kinds
    )
    own = config_for(json.loads((source / "config.json").read_text())).to_dict()
    declare(source, {**own, "text_config": own["text_config"] | changed}, (2 - number, 2))
    with pytest.raises(UserError, match=naming(named)):
        write_draft_gguf(resolve(source), tmp_path / "draft.gguf", "bf16")


def test_a_draft_vocabulary_stays_in_the_config(tmp_path):
    """llama.cpp does not use it: it drafts from all tokens."""
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, with_tokenizer=True)
    config = json.loads((source / "config.json").read_text()) | {"mtp_draft_vocab": "0 1 2"}
    (source / "config.json").write_text(json.dumps(config))
    file = write(source, tmp_path / "model.gguf", "f32")
    back(file, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_several_heads_are_refused(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=2, with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--mtp_unroll")):
        write(source, tmp_path / "model.gguf", "bf16")


def test_a_constant_that_was_changed_is_named(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "gemma4_text", with_tokenizer=True)
    file = write(source, tmp_path / "model.gguf", "bf16")
    (constant,) = [tensor for tensor in GGUFReader(file).tensors if tensor.name == "rope_freqs.weight"]
    with file.open("r+b") as opened:
        opened.seek(constant.data_offset)
        opened.write(bytes(4))
    with pytest.raises(UserError, match=naming("model.gguf rope_freqs.weight")):
        back(file, tmp_path / "back")


@pytest.mark.parametrize("size", [10, 3000, -100])
def test_a_cut_file_is_named(tmp_path, size):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, with_tokenizer=True)
    file = write(source, tmp_path / "model.gguf", "bf16")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=naming("cut.gguf")):
        back(cut, tmp_path / "back")


def test_a_file_of_others_is_named(tmp_path):
    from gguf import GGUFWriter

    file = tmp_path / "other.gguf"
    writer = GGUFWriter(file, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(UserError, match=naming("other.gguf")):
        GgufFile(file)


def test_a_tokenizer_that_llamacpp_does_not_have_is_named(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, with_tokenizer=True)
    content = json.loads((source / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=naming("tokenizer.json <Whitespace>")):
        write(source, tmp_path / "model.gguf", "bf16")
