"""Test reading quantized matrices against the libraries that define their formats, for whole tensors and slices."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.bridge import tensors as files
from swiftlite.bridge.encoding.compressed_tensors import WeightArgs, WritableBlocks
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.encoding.fp8 import WritableFp8
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import read_config, write_patched
from swiftlite.bridge.tensors import Checkpoint, ShardedFiles, describe
from tests.messages import naming
from tests.tiers import some_of

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

Tensors = dict[str, torch.Tensor]
ROWS, COLUMNS = 32, 64
BLOCK = [10, 48]

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8-asymmetric": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8-words": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int4": ("pack-quantized", INT4),
    "int4-asymmetric": ("pack-quantized", INT4 | {"symmetric": False}),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int4-ordered": ("pack-quantized", INT4 | {"actorder": "group"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [10, 48]},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}


def scales_of(weight: torch.Tensor, weights: QuantizationArgs) -> Tensors:
    """Return scales and zero points, computed by the library from the largest and smallest numbers of each block."""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, weights.group_size or 0),
        "tensor_group": (1, weights.group_size or 0),
        "block": tuple(weights.block_structure or (0, 0)),
    }[str(weights.strategy)]
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    factors: Tensors = {}
    if weights.strategy == "tensor_group":
        factors["weight_global_scale"] = (448 * 6 / weight.abs().max()).float().reshape(1)
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    scale, zero_point = calculate_qparams(low, high, weights, global_scale=factors.get("weight_global_scale"))
    if weights.strategy == "tensor":
        scale, zero_point = scale.reshape(1), zero_point.reshape(1)
    return factors | {"weight_scale": scale, "weight_zero_point": zero_point}


def compress(scheme: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return the stored tensors of a matrix, and the matrix that the library decompresses from them."""
    format, options = SCHEMES[scheme]
    weights = QuantizationArgs(**options)
    both = QuantizationScheme(targets=["Linear"], weights=weights)
    state: dict[str, Any] = {"weight": weight} | scales_of(weight, weights)
    if weights.actorder:
        state["weight_g_idx"] = (torch.randperm(weight.shape[1]) % (weight.shape[1] // 16)).int()
    compressor = BaseCompressor.get_value_from_registry(format)
    stored: dict[str, Any] = compressor.compress(state, both)
    decompressed: Any = compressor.decompress(dict(stored), both)["weight"]
    if weights.strategy == "block":
        # The compressor infers the size of blocks from the shapes, which fails if they do not divide the matrix.
        decompressed = dequantize(stored["weight"], stored["weight_scale"], args=weights)
    kept = {name for name in stored if name != "weight_zero_point" or not weights.symmetric}
    return {f"x.{name}": stored[name].contiguous() for name in kept}, decompressed


def config_of(*schemes: str) -> dict[str, Any]:
    groups = {}
    for number, scheme in enumerate(schemes):
        format, weights = SCHEMES[scheme]
        groups[f"group_{number}"] = {"targets": ["Linear"], "weights": weights, "format": format}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "format": "mixed-precision"}


def write(directory: Path, tensors: Tensors, quantization: dict[str, Any]) -> dict[str, Any]:
    """Write the files of a quantized model with a single matrix, and return its config."""
    config = {"model_type": "qwen3", "quantization_config": quantization}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return config


@pytest.fixture(autouse=True, scope="module")
def eager():
    """Keep the library from compiling its rounding to FP4, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@st.composite
def parts(draw) -> tuple[slice, slice, int]:
    """Draw a slice, and the number of bytes that are read at once."""
    borders = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in (ROWS, COLUMNS)]
    return slice(*borders[0]), slice(*borders[1]), draw(st.sampled_from([1, 200, 600]))


def check_slices(directory: Path, config: dict[str, Any], whole: torch.Tensor, part: tuple[slice, slice, int]) -> None:
    *index, chunk_bytes = part
    with pytest.MonkeyPatch.context() as patch, Checkpoint(directory, format_of(config)) as checkpoint:
        patch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
        assert list(checkpoint.entries) == ["x.weight"]
        entry = checkpoint.entries["x.weight"]
        assert entry.shape == whole.shape
        target = torch.full(whole[tuple(index)].shape, -7.0, dtype=whole.dtype)
        checkpoint.read_into(target, "x.weight", tuple(index))
        assert torch.equal(target, whole[tuple(index)])
        assert torch.equal(checkpoint.read("x.weight").to(whole.dtype), whole)
    assert describe(directory) == {"x.weight": {"dtype": "bfloat16", "shape": list(whole.shape)}}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    some_of(
        product(SCHEMES, (torch.bfloat16, torch.float16)),
        *((scheme, torch.bfloat16) for scheme in SCHEMES),
        ("int4-asymmetric", torch.float16),
    ),
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(part=parts())
def test_numbers_are_those_of_the_library(tmp_path, scheme, dtype, part):
    torch.manual_seed(0)
    stored, whole = compress(scheme, torch.randn(ROWS, COLUMNS, dtype=dtype))
    check_slices(tmp_path, write(tmp_path, stored, config_of(scheme)), whole, part)


def test_groups_of_modules_have_their_own_bits(tmp_path):
    stored: Tensors = {}
    whole: Tensors = {}
    for name, scheme in (("a", "int4"), ("b", "fp8"), ("c", "int8")):
        own, whole[f"{name}.weight"] = compress(scheme, torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16))
        stored |= {key.replace("x.", f"{name}.", 1): tensor for key, tensor in own.items()}
    config = write(tmp_path, stored, config_of("fp8", "int4", "int8"))
    with Checkpoint(tmp_path, format_of(config)) as checkpoint:
        assert sorted(checkpoint.entries) == sorted(whole)
        assert all(torch.equal(checkpoint.read(name), tensor.float()) for name, tensor in whole.items())


# GPTQ and AWQ


def gptq(bits: int, group_size: int, version: str, ordered: bool) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Return the stored tensors of a matrix, packed by vLLM's functions; the matrix; and the settings in config.json.

    vLLM only reads symmetric matrices; here, zero points are arbitrary.
    """
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    size = COLUMNS if group_size == -1 else group_size
    groups = COLUMNS // size
    codes = torch.randint(0, 1 << bits, (COLUMNS, ROWS))
    zero_points = torch.randint(1, 1 << bits, (groups, ROWS))
    scales = torch.rand(groups, ROWS, dtype=torch.float16) + 0.1
    table = torch.arange(COLUMNS) // size
    if ordered:
        table = table[torch.randperm(COLUMNS)]
    is_first = int(version != "gptq_v2")
    stored = {
        "x.qweight": utils.gptq_pack(codes, bits, COLUMNS, ROWS),
        "x.qzeros": utils.pack_cols(zero_points - is_first, bits, groups, ROWS),
        "x.scales": scales,
        "x.g_idx": table.int(),
    }
    whole = (codes - zero_points[table]).half() * scales[table]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": ordered, "sym": False}
    return stored, whole.T, config | {"checkpoint_format": version}


def awq(group_size: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Return the same for AWQ."""
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    groups = COLUMNS // group_size
    codes = torch.randint(0, 16, (COLUMNS, ROWS))
    zero_points = torch.randint(0, 16, (groups, ROWS))
    scales = torch.rand(groups, ROWS, dtype=torch.float16) + 0.1
    stored = {
        "x.qweight": utils.awq_pack(codes, 4, COLUMNS, ROWS),
        "x.qzeros": utils.awq_pack(zero_points, 4, groups, ROWS),
        "x.scales": scales,
    }
    whole = (codes - zero_points.repeat_interleave(group_size, 0)).half() * scales.repeat_interleave(group_size, 0)
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return stored, whole.T, config


@pytest.mark.parametrize(
    "make",
    [
        lambda: gptq(4, 16, "gptq", ordered=False),
        lambda: gptq(8, -1, "gptq", ordered=False),
        lambda: gptq(4, 16, "gptq", ordered=True),
        lambda: gptq(2, 32, "gptq_v2", ordered=True),
        lambda: awq(16),
        lambda: awq(64),
    ],
    ids=["gptq4", "gptq8-channel", "gptq4-ordered", "gptq2-v2-ordered", "awq", "awq-64"],
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(part=parts())
def test_words_of_gptq_and_awq(tmp_path, make, part):
    torch.manual_seed(0)
    stored, whole, quantization = make()
    check_slices(tmp_path, write(tmp_path, stored, quantization), whole, part)


@pytest.mark.parametrize(
    ("biases", "kept"),
    [
        ({"x": 0, "y": 0}, []),  # AutoGPTQ 0.7 adds them
        ({"x": 0, "y": 1}, ["y.bias"]),
        ({"x": 0}, ["x.bias"]),  # of the model, in a file of another program
    ],
)
def test_biases_that_autogptq_adds(tmp_path, biases, kept):
    stored, _, quantization = gptq(4, 16, "gptq", ordered=False)
    tensors = {key.replace("x", module, 1): tensor.clone() for module in "xy" for key, tensor in stored.items()}
    for module, value in biases.items():
        tensors[f"{module}.bias"] = torch.full((ROWS,), value, dtype=torch.float16)
    config = write(tmp_path, tensors, quantization)
    with Checkpoint(tmp_path, format_of(config)) as checkpoint:
        assert sorted(checkpoint.entries) == sorted(["x.weight", "y.weight", *kept])


# FP8 without blocks


@pytest.mark.parametrize("shape", [(), (1,)], ids=["number", "one"])
def test_one_scale_per_matrix(tmp_path, shape):
    codes, scale = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), torch.rand(shape)
    stored = {"x.weight": codes, "x.weight_scale": scale, "x.input_scale": torch.rand(shape)}
    config = write(tmp_path, stored, {"quant_method": "fp8", "activation_scheme": "static"})
    with Checkpoint(tmp_path, format_of(config)) as checkpoint:
        assert list(checkpoint.entries) == ["x.weight"]
        assert torch.equal(checkpoint.read("x.weight"), codes.float() * scale)


# Writing


def _written(tmp_path: Path, weight: torch.Tensor, encoding: WritableEncoding) -> Tensors:
    out = ShardedFiles(tmp_path, {"x.weight": (torch.float32, tuple(weight.shape))}, 10**9, {"x.weight": encoding})
    out.create()
    half = ROWS // 2
    for rows in (slice(0, half), slice(half, ROWS)):
        out.write("x.weight", (rows, slice(None)), weight[rows])
    out.flush()
    out.publish()
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-channel", "fp8"])
def test_written_codes_are_those_of_the_library(tmp_path, monkeypatch, scheme, chunk_bytes):
    """In float32 all bits are equal; in bfloat16 the library also rounds before it rounds to codes."""
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    weight = torch.randn(ROWS, COLUMNS)
    weight[3] = 0
    stored, whole = compress(scheme, weight)
    group = WeightArgs.from_json(SCHEMES[scheme][1])
    written = _written(tmp_path, weight, WritableBlocks.of((ROWS, COLUMNS), group, torch.float32))
    assert written.keys() == stored.keys()
    for key, tensor in stored.items():
        assert written[key].dtype is tensor.dtype, key
        assert torch.equal(written[key].view(torch.uint8), tensor.view(torch.uint8)), key
    config = write(tmp_path, written, config_of(scheme))
    with Checkpoint(tmp_path, format_of(config)) as checkpoint:
        assert torch.equal(checkpoint.read("x.weight"), whole)


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (40, 70), (5, 130)])
def test_fp8_blocks_are_written(tmp_path, rows, columns):
    """Compare with the library, which computes in float32; sizes are not multiples of a block."""
    weight = torch.randn(rows, columns)
    weight[:16, :48] = 0
    args = QuantizationArgs.model_validate(SCHEMES["fp8-block"][1] | {"block_structure": [16, 48]})
    scale = scales_of(weight, args)["weight_scale"]
    scale[0, 0] = 1
    expected = quantize(weight, scale, torch.zeros_like(scale), args, dtype=torch.float8_e4m3fn)
    out = ShardedFiles(
        tmp_path,
        {"x.weight": (torch.float32, (rows, columns))},
        10**9,
        {"x.weight": WritableFp8.of((rows, columns), (16, 48))},
    )
    out.create()
    out.write("x.weight", (slice(None), slice(None)), weight)
    out.flush()
    out.publish()
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["x.weight_scale_inv"], scale)
    assert torch.equal(written["x.weight"].view(torch.uint8), expected.view(torch.uint8))
    config = write(tmp_path, written, {"quant_method": "fp8", "weight_block_size": [16, 48]})
    with Checkpoint(tmp_path, format_of(config)) as checkpoint:
        assert torch.equal(checkpoint.read("x.weight"), dequantize(expected, scale, args=args))


# What cannot be read


def damaged(scheme: str, changes: Tensors, removed: tuple[str, ...] = ()) -> Tensors:
    stored, _ = compress(scheme, torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16))
    return {key: tensor for key, tensor in (stored | changes).items() if key not in removed}


@pytest.mark.parametrize(
    ("scheme", "changes", "removed", "tokens"),
    [
        ("int8", {}, ("x.weight_scale",), "x.weight_scale"),
        ("int8", {"x.weight_scale": torch.ones(ROWS + 1, 1)}, (), "x.weight_scale 33 32"),
        ("int8", {"x.weight_scale": torch.ones(ROWS, 1).int()}, (), "x.weight_scale int32"),
        ("int4", {}, ("x.weight_shape",), "x.weight_shape"),
        ("int4", {"x.weight_scale": torch.ones(ROWS, 3)}, (), "x.weight_packed"),
        ("int4-asymmetric", {}, ("x.weight_zero_point",), "x.weight_zero_point"),
        ("int4-ordered", {}, ("x.weight_g_idx",), "x.weight_g_idx"),
        ("fp8", {"x.weight": torch.ones(ROWS, COLUMNS).to(torch.int8)}, (), "x.weight int8"),
        ("nvfp4", {}, ("x.weight_global_scale",), "x.weight_global_scale"),
    ],
)
def test_stored_tensors_that_do_not_match_are_named(tmp_path, scheme, changes, removed, tokens):
    config = write(tmp_path, damaged(scheme, changes, removed), config_of(scheme))
    with pytest.raises(UserError, match=naming(tokens)):
        Checkpoint(tmp_path, format_of(config))


@pytest.mark.parametrize(
    ("quantization", "tokens"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ("fp8", "fp8"),
        ({}, ""),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 fmt e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8 weight_block_size 128"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "gptq group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "gptq marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": True}, "gptq is_marlin_format"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*mlp": {"bits": 8}}},
            "gptq dynamic mlp",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "awq version gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, "awq zero_point"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors config_groups"),
        (config_of("int4") | {"sparsity_config": {"format": "sparse"}}, "compressed-tensors sparsity_config"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": {"weights": {}}}},
            "compressed-tensors marlin-24",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 3}}},
            },
            "compressed-tensors 3",
        ),
        ({"quant_method": "modelopt"}, "modelopt quant_algo missing"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"}, "modelopt ignore lm_head"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [5]}, "modelopt ignore 5"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt quant_algo NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"x": {"quant_algo": "W4A8_AWQ"}},
            },
            "modelopt quant_algo W4A8_AWQ",
        ),
    ],
)
def test_formats_that_are_not_supported_are_named(quantization, tokens):
    with pytest.raises(UserError, match=naming(f"config.json quantization_config {tokens}")):
        format_of({"model_type": "qwen3", "quantization_config": quantization})


def modelopt_tensors() -> tuple[Tensors, Tensors]:
    """Return the stored tensors of a matrix in each of ModelOpt's formats, and the matrices that they stand for.

    `tests/bridge/test_modelopt.py` compares with ModelOpt itself where it is installed.
    """
    rows, columns = 200, 320
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    per_block = torch.rand(2, 3) + 0.1
    blocks = per_block.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    per_row = torch.rand(rows) + 0.1
    exponents = torch.randint(120, 130, (rows, columns // 32), dtype=torch.uint8)
    stored = {
        "matrix": torch.tensor(0.25),
        "vector": torch.tensor([0.25]),
        "rows": per_row,
        "blocks": per_block,
        "spread": per_block[:, None, :, None].contiguous(),
        "exponents": exponents,
    }
    factors = {
        "matrix": torch.tensor(0.25),
        "vector": torch.tensor(0.25),
        "rows": per_row[:, None],
        "blocks": blocks,
        "spread": blocks,
        "exponents": torch.exp2(exponents.float() - 127).repeat_interleave(32, 1),
    }
    tensors = {f"{name}.weight": codes.clone() for name in stored}
    tensors |= {f"{name}.weight_scale": scale.clone() for name, scale in stored.items()}
    expected = {f"{name}.weight": codes.float() * factor for name, factor in factors.items()}
    return tensors | {"matrix.input_scale": torch.tensor(1.0), "x.k_scale": torch.tensor(1.0)}, expected


@pytest.mark.parametrize("part", [(slice(0, 200), slice(0, 320)), (slice(120, 131), slice(120, 140))])
def test_one_checkpoint_has_several_formats_of_modelopt(tmp_path, part):
    tensors, expected = modelopt_tensors()
    layers = {
        "matrix": {"quant_algo": "FP8"},
        "rows": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "blocks": {"quant_algo": "fp8_pb_wo"},
        "exponents": {"quant_algo": "MXFP8"},
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = write(tmp_path, tensors, quantization)
    with Checkpoint(tmp_path, format_of(config)) as checkpoint:
        assert checkpoint.entries.keys() == expected.keys()
        for name, matrix in expected.items():
            target = torch.empty_like(matrix[part])
            checkpoint.read_into(target, name, part)
            assert torch.equal(target, matrix[part])


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"rows.pre_quant_scale": torch.ones(320)}, "rows.weight rows.pre_quant_scale"),
        ({"blocks.weight_scale": torch.ones(2, 2)}, "blocks.weight_scale 2, 2"),
        ({"exponents.weight_scale": torch.ones(200, 9, dtype=torch.uint8)}, "exponents.weight_scale 200, 9"),
        ({"rows.weight": torch.zeros(200, 320, dtype=torch.int8)}, "rows.weight int8"),
        ({"rows.weight": torch.zeros(200, 320, dtype=torch.uint8)}, "rows.weight 1, 16"),
    ],
)
def test_tensors_of_modelopt_that_do_not_match_are_named(tmp_path, changes, tokens):
    tensors, _ = modelopt_tensors()
    config = write(tmp_path, tensors | changes, {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(UserError, match=naming(tokens)), Checkpoint(tmp_path, format_of(config)):
        pass


def test_the_file_of_modelopt_is_read_and_written(tmp_path):
    """The config.json of some of NVIDIA's models does not have the key. TensorRT-LLM reads the other file."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    file = tmp_path / "hf_quant_config.json"
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    config = read_config(tmp_path)
    found = config["quantization_config"]
    assert (found["quant_method"], found["quant_algo"], found["ignore"]) == ("modelopt", "NVFP4", ["lm_head"])
    assert found["kv_cache_scheme"]["num_bits"] == 8
    assert format_of(config) is not None
    (tmp_path / "out").mkdir()
    write_patched(tmp_path, tmp_path / "out", {"quantization_config": found | {"ignore": ["lm_head", "mtp*"]}})
    written = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert written["quantization"] == quantization | {"exclude_modules": ["lm_head", "mtp*"]}
    assert written["producer"] == {"name": "modelopt"}
    file.write_text("{}")
    with pytest.raises(UserError, match=naming("hf_quant_config.json")):
        read_config(tmp_path)
