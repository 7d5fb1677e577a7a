"""Test conversion from Hugging Face to Megatron and back on tiny random models, bitwise, and all rejected cases."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.encoding.expert_stack import transposed_stacks
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf, stream_hf
from swiftlite.bridge.tensors import describe
from swiftlite.bridge.transfer import WeightsReport, load_hf
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from tests.messages import has_line, mentions, naming
from tests.model_tensors import tensors_of
from tests.tiers import once
from tests.tiny import (
    NEXT_LAYER_HEADS,
    VISUAL_PREFIX,
    WITH_SHARED_NORM,
    WRAPPED,
    carried_tensors,
    hub_name,
    make_tiny_hf,
    mtp_names,
    per_expert,
    promise,
)

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def build(hf_dir: Path, mesh, depth: int, dtype: torch.dtype = torch.float32, **overrides) -> GPTModel:
    """Return a Megatron model for a directory.

    All its values are NaN, so that values that are not loaded are detected.
    """
    hf_config = read_config(hf_dir) | overrides
    architecture = families.get(hf_config).architecture(hf_config)
    (model,) = build_model(architecture, hf_config, mesh=mesh, dtype=dtype, heads=Heads(depth))
    with torch.no_grad():
        for _, tensor in tensors_of(model):
            tensor.fill_(float("nan"))
    return model


def load(model: torch.nn.Module, hf_dir: Path, **options) -> WeightsReport:
    hf_config = read_config(hf_dir)
    return load_hf([model], hf_dir, families.get(hf_config), hf_config, **options)


def save(model: torch.nn.Module, source: Path, out_dir: Path, **options: Any) -> list[str]:
    hf_config = read_config(source)
    described = describe(source)
    dtypes = {key: tensor["dtype"] for key, tensor in described.items()}
    transposed = transposed_stacks({key: tensor["shape"] for key, tensor in described.items()})
    options = {"dtypes": dtypes, "transposed": transposed} | options
    return save_hf([model], out_dir, families.get(hf_config), hf_config, **options)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory with the safetensors package."""
    return {key: tensor for path in directory.glob("*.safetensors") for key, tensor in load_file(path).items()}


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert torch.equal(tensor, other[key]), key


def shard(hf_dir: Path, num_files: int) -> None:
    """Distribute a directory's tensors over several files with an index, as in large models."""
    tensors = list(load_file(hf_dir / "model.safetensors").items())
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(tensors[number::num_files])
        save_file(part, hf_dir / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (hf_dir / "model.safetensors").unlink()
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def change_tensors(hf_dir: Path, change) -> None:
    """Write model.safetensors again after `change(tensors)`."""
    tensors = load_file(hf_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "tied", "depth", "sharded"), once([*families.FAMILIES], [False, True], [1, 2], [False, True])
)
def test_round_trip_is_bit_exact(tmp_path, mesh, family, tied, depth, sharded):
    source = make_tiny_hf(tmp_path / "in", family, depth, tied, **SIZES)
    original = read_all(source)
    if sharded:
        shard(source, 3)
    model = build(source, mesh, depth)
    report = load(model, source)
    assert set(report.loaded) == {name for name, _ in tensors_of(model)}
    assert not report.initialized
    assert not report.dropped
    assert not any(tensor.isnan().any() for _, tensor in tensors_of(model))

    carried = tmp_path / "carried.safetensors" if family in WRAPPED else None
    if carried:
        save_file(carried_tensors(family), carried)
        assert set(report.carried) == carried_tensors(family).keys()
    files = save(model, source, tmp_path / "out", max_shard_bytes=50_000 if sharded else 10**9, carried=carried)
    assert (len(files) == 1) is not sharded
    assert_same_tensors(read_all(tmp_path / "out"), original)
    (tmp_path / "out" / "config.json").write_bytes((source / "config.json").read_bytes())
    assert audit_hf(tmp_path / "out", families.get(read_config(source))) == []


def test_report_of_one_rank_is_that_of_all(tmp_path, mesh):
    source = make_tiny_hf(tmp_path, "glm4_moe_lite", depth=1)
    report = load(build(source, mesh, depth=2), source, mtp_init="random")
    assert report.loaded
    assert report.initialized
    assert report.dropped
    assert report.over_all_ranks() == report


def test_mixed_precision_round_trip(tmp_path, mesh):
    """Each tensor is exported in its original dtype. bfloat16 values are unchanged by float32 parameters."""
    source = make_tiny_hf(tmp_path / "in", "qwen3", depth=1, dtype=torch.bfloat16)

    def widen_norms(tensors):
        tensors.update({key: tensor.float() for key, tensor in tensors.items() if "norm" in key})

    change_tensors(source, widen_norms)
    model = build(source, mesh, depth=1)
    load(model, source)
    save(model, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(source))


def test_parameters_get_their_own_dtype(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3")
    model = build(source, mesh, depth=0, dtype=torch.bfloat16)
    load(model, source)
    original = read_all(source)["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(model.get_parameter("decoder.layers.1.mlp.linear_fc2.weight"), original.bfloat16())


def test_directories_of_an_export_are_created(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3")
    load(model := build(source, mesh, depth=0), source)
    assert save(model, source, tmp_path / "results" / "first") == ["model.safetensors"]
    assert_same_tensors(read_all(tmp_path / "results" / "first"), read_all(source))


def test_dtypes_of_an_export(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3", depth=1)
    model = build(source, mesh, depth=1)
    load(model, source)

    def dtypes_written(name: str, dtypes) -> set[torch.dtype]:
        save(model, source, tmp_path / name, dtypes=dtypes)
        return {tensor.dtype for tensor in read_all(tmp_path / name).values()}

    assert dtypes_written("own", None) == {torch.float32}
    assert dtypes_written("one", "bfloat16") == {torch.bfloat16}
    # A tensor that the source lacked follows most of the others.
    trunk = {key: "float16" for key in read_all(source) if not key.startswith("mtp.")}
    assert dtypes_written("most", trunk) == {torch.float16}


def test_streamed_buckets(tmp_path, mesh):
    """Tensors are whole, and no bucket is larger than its maximum unless a single tensor is.

    Dtypes are those of an export.
    """
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, tied=True)
    hf_config, original = read_config(source), read_all(source)
    model = build(source, mesh, 1)
    load(model, source)
    family, limit = families.get(hf_config), 20_000
    dtypes: dict[str, Any] = dict.fromkeys(original, "float32") | {"mtp.fc.weight": "bfloat16"}
    streamed: dict[str, torch.Tensor] = {}
    for part in ("trunk", "heads"):
        buckets = list(stream_hf([model], family, hf_config, part, dtypes=dtypes, bucket_bytes=limit))
        sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
        assert all(len(bucket) == 1 or size <= limit for bucket, size in zip(buckets, sizes, strict=True))
        assert all(family.is_mtp(hf_config, key) is (part == "heads") for bucket in buckets for key in bucket)
        assert any(len(bucket) > 1 for bucket in buckets)
        for bucket in buckets:
            assert streamed.keys().isdisjoint(bucket)
            streamed |= bucket
    original["mtp.fc.weight"] = original["mtp.fc.weight"].bfloat16()
    assert_same_tensors(streamed, original)
    streamed["model.norm.weight"].zero_()  # what was handed out is the caller's
    assert dict(tensors_of(model))["decoder.final_layernorm.weight"].all()
    assert list(stream_hf([build(source, mesh, 0)], family, hf_config, "heads")) == []


def test_mimo_halves_are_swapped(tmp_path, mesh):
    """MiMo's projection reads [hidden, embedding]; megatron-core's reads [embedding, hidden]."""
    source = make_tiny_hf(tmp_path / "in", "mimo", depth=1)
    hidden_part, embedding_part = torch.full((64, 64), 1.0), torch.full((64, 64), 2.0)

    def mark(tensors):
        tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat([hidden_part, embedding_part], dim=1)

    change_tensors(source, mark)
    model = build(source, mesh, depth=1)
    load(model, source)
    assert torch.equal(
        model.get_parameter("mtp.layers.0.eh_proj.weight"), torch.cat([embedding_part, hidden_part], dim=1)
    )


def test_qwen3_next_halves_are_not(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3", depth=1)
    model = build(source, mesh, depth=1)
    load(model, source)
    assert torch.equal(model.get_parameter("mtp.layers.0.eh_proj.weight"), read_all(source)["mtp.fc.weight"])


def test_padded_vocabulary(tmp_path, mesh):
    """A Megatron vocabulary can be larger than the file's. Zeros are added on load and removed on export."""
    source = make_tiny_hf(tmp_path / "in", "llama")
    model = build(source, mesh, depth=0, vocab_size=160)
    load(model, source)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weight = model.get_parameter(name)
        assert weight.shape[0] == 160
        assert weight[:128].abs().min() > 0
        assert weight[128:].abs().max() == 0
    save(model, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(source))


def test_wrapped_models(tmp_path, mesh):
    """The wrappers that training adds to a model must not matter."""
    source = make_tiny_hf(tmp_path / "in", "qwen3", depth=1, dtype=torch.bfloat16)
    inner = build(source, mesh, depth=1, dtype=torch.bfloat16)
    config = DistributedDataParallelConfig()
    wrapped = DistributedDataParallel(inner.config, config, Float16Module(inner.config, inner))
    load(wrapped, source)
    save(wrapped, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(source))


def test_tied_head_in_the_file(tmp_path, mesh):
    """The files of some tied models contain a copy of the embedding. It is checked, and written again."""
    source = make_tiny_hf(tmp_path / "in", "qwen2", tied=True)

    def add_copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(source, add_copy)
    model = build(source, mesh, depth=0)
    load(model, source)
    save(model, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(source))

    def change_copy(tensors):
        tensors["lm_head.weight"][7, 7] += 1

    change_tensors(source, change_copy)
    with pytest.raises(UserError, match=naming("lm_head.weight model.embed_tokens.weight")):
        load(model, source)


def test_output_directory_in_use(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "llama")
    model = build(source, mesh, depth=0)
    load(model, source)
    with pytest.raises(UserError, match=naming("model.safetensors")):
        save(model, source, source)


def test_failed_save_leaves_no_file(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "llama")
    model = build(source, mesh, depth=0)
    load(model, source)
    # Halfway through come numbers that cannot be read: the shape fits, the memory is gone.
    down = model.get_submodule("decoder.layers.1.mlp.linear_fc2")
    down.register_parameter(
        "weight", torch.nn.Parameter(model.get_parameter("decoder.layers.1.mlp.linear_fc2.weight").to("meta"))
    )
    with pytest.raises(NotImplementedError):
        save(model, source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("depth", [0, 1])
def test_old_rotary_buffers_are_dropped_by_name(tmp_path, mesh, depth):
    source = make_tiny_hf(tmp_path / "in", "llama", depth)
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(source, lambda tensors: tensors.update({key: torch.ones(16)}))
    report = load(build(source, mesh, depth), source)
    assert report.dropped == (key,)
    assert key in str(report)


def refusal(model: GPTModel, source: Path, **options) -> str:
    """Return the error of a rejected load, after checking that it has not changed the model."""
    with pytest.raises(UserError) as raised:
        load(model, source, **options)
    assert all(tensor.isnan().all() for _, tensor in tensors_of(model))
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "model.layers.1.self_attn.k_proj.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "extra"),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            "model.layers.2.input_layernorm.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(95, 64)}),
            "model.layers.0.mlp.up_proj.weight [95, 64] config.json [96, 64]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(1, 64)}),
            "model.norm.weight [1, 64] config.json [64]",
        ),
    ],
)
def test_checkpoint_and_config_disagree(tmp_path, mesh, change, expected):
    source = make_tiny_hf(tmp_path / "in", "qwen3", depth=1)
    change_tensors(source, change)
    problem, *lines = refusal(build(source, mesh, depth=1), source).splitlines()
    assert mentions(problem, f"{source} Megatron")
    assert any(mentions(line, expected) for line in lines)


def test_model_and_config_disagree(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3")
    changes = {"intermediate_size": 128, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    message = refusal(build(source, mesh, depth=0, **changes), source)
    assert has_line(message, "decoder.layers.2.mlp.linear_fc1.weight")
    assert has_line(message, "decoder.layers.0.mlp.linear_fc2.weight [64, 128]")


def drop_mtp(tensors: dict) -> None:
    for key in [key for key in tensors if "mtp" in key]:
        del tensors[key]


def test_mtp_asked_for_but_not_there(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3")
    message = refusal(build(source, mesh, depth=1), source)
    assert mentions(message, f"--mtp_num_layers 1 {source}")
    assert mentions(message, "--mtp_init fit_last_layer random")


def test_mtp_promised_but_not_there(tmp_path, mesh):
    """transformers' save_pretrained writes such directories."""
    source = make_tiny_hf(tmp_path / "in", "mimo", depth=1)
    change_tensors(source, drop_mtp)
    message = refusal(build(source, mesh, depth=1), source)
    assert has_line(message, f"--mtp_num_layers 1 {source} config.json")


def test_mtp_of_another_depth(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "mimo", depth=2)
    message = refusal(build(source, mesh, depth=1), source)
    assert has_line(message, "--mtp_num_layers 1 config.json 2")
    assert has_line(message, "--mtp_num_layers 2 --mtp_init")


def test_mtp_there_but_not_promised(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen3", depth=1)
    config = read_config(source) | {"num_nextn_predict_layers": 0}  # absent, the tensors are counted
    (source / "config.json").write_text(json.dumps(config))
    assert has_line(refusal(build(source, mesh, depth=1), source), "--mtp_num_layers 1 config.json 0")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_mtp_incomplete(tmp_path, mesh, family):
    source = make_tiny_hf(tmp_path / "in", family, depth=2)
    projection = mtp_names(family, 1)[0]["projection"]
    change_tensors(source, lambda tensors: tensors.pop(projection))
    message = refusal(build(source, mesh, depth=2), source)
    assert has_line(message, f"{source} 1 2")
    assert projection in message


def test_more_mtp_tensors_than_promised(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "mimo", depth=2)
    config = read_config(source) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    assert mentions(refusal(build(source, mesh, depth=1), source), "model.mtp_layers.1.input_proj.weight")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_heads_can_be_dropped_and_are_named(tmp_path, mesh, family):
    source = make_tiny_hf(tmp_path / "in", family, depth=2)
    original = read_all(source)
    report = load(model := build(source, mesh, depth=0), source)
    behind_the_trunk = family in NEXT_LAYER_HEADS
    behind = tuple(hub_name(family, f"model.layers.{number}.") for number in (2, 3))
    prefixes = behind if behind_the_trunk else ("mtp.", "model.mtp_", "model.mtp.")
    assert set(report.dropped) == {key for key in per_expert(original) if key.startswith(prefixes)}
    save(model, source, tmp_path / "out")
    left = (*prefixes, *VISUAL_PREFIX.values())
    trunk = {key: tensor for key, tensor in original.items() if not key.startswith(left)}
    assert_same_tensors(read_all(tmp_path / "out"), trunk)


def test_random_heads_with_experts(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "glm4_moe")
    load(model := build(source, mesh, depth=1), source, mtp_init="random")
    mixture = {
        name: tensor for name, tensor in tensors_of(model) if name.startswith("mtp.layers.0.transformer_layer.mlp")
    }
    for name, tensor in mixture.items():
        # 0.02, as of 256 numbers (the router) to 4096; the bias that levels the choice of experts begins level.
        assert tensor.std().item() == (0 if name.endswith("expert_bias") else pytest.approx(0.02, rel=0.2)), name
    assert len({tensor.flatten()[0].item() for tensor in mixture.values()}) == len(mixture)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_copy_last_layer(tmp_path, mesh, family):
    source = make_tiny_hf(tmp_path / "in", family)
    report = load(model := build(source, mesh, depth=2), source, mtp_init="copy_last_layer")
    parameters = dict(tensors_of(model))
    assert set(report.initialized) == {name for name in parameters if name.startswith("mtp.")}
    assert set(report.initialized) | set(report.loaded) == set(parameters)
    assert set(report.initialized.values()) == {"copy_last_layer"}
    last = {}
    sources = families.FAMILIES[family].architecture(read_config(source)).mtp_sources
    for number, is_mlp in zip(sources, (False, True), strict=True):
        prefix = f"decoder.layers.{number}."
        names = {name: name.removeprefix(prefix) for name in parameters if name.startswith(prefix)}
        last |= {inner: parameters[name] for name, inner in names.items() if ("mlp" in inner) == is_mlp}
    for head in ("mtp.layers.0.", "mtp.layers.1."):
        for name, parameter in last.items():
            assert torch.equal(parameters[f"{head}transformer_layer.{name}"], parameter)
        if family not in WITH_SHARED_NORM:
            final_norm = parameters["decoder.final_layernorm.weight"]
            assert torch.equal(parameters[f"{head}final_layernorm.weight"], final_norm)
        assert torch.equal(parameters[f"{head}eh_proj.weight"], torch.cat([torch.eye(64), 0.2 * torch.eye(64)], dim=1))

    # The export has heads that load like any others.
    save(model, source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_bytes((source / "config.json").read_bytes())
    promise(tmp_path / "out", 2)
    again = build(tmp_path / "out", mesh, depth=2)
    assert not load(again, tmp_path / "out").initialized
    for name, tensor in tensors_of(again):
        assert torch.equal(tensor, parameters[name])


def test_random_heads_follow_the_seed(tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "in", "qwen2", depth=1)

    def heads(seed: int) -> dict[str, torch.Tensor]:
        report = load(model := build(source, mesh, depth=1), source, mtp_init="random", seed=seed)
        assert set(report.dropped) == {key for key in read_all(source) if "mtp" in key}
        return {name: dict(tensors_of(model))[name] for name in report.initialized}

    first, again, other = heads(1), heads(1), heads(2)
    projection = "mtp.layers.0.eh_proj.weight"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[projection], other[projection])
    assert first[projection].std().item() == pytest.approx(0.02, rel=0.05)  # of 8192 numbers: 1 % is one sigma
    assert first["mtp.layers.0.enorm.weight"].eq(1).all()
    assert first["mtp.layers.0.transformer_layer.self_attention.linear_qkv.bias"].eq(0).all()


def test_weights_of_whole_numbers(tmp_path, mesh):
    """A cast would use codes as numbers, and training would start at a loss of 1e10."""
    hf_dir = make_tiny_hf(tmp_path, "qwen3", depth=1)
    tensors = load_file(hf_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].int()
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=naming("lm_head.weight torch.int32")):
        load(build(hf_dir, mesh, 1), hf_dir)
