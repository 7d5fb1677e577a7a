"""Test config.json and safetensors files with any content: they are read as transformers or safetensors does, or
rejected.
"""

import json
import struct
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from swiftlite import families, rules
from swiftlite.args.commands import DoctorArgs
from swiftlite.bridge.audit import audit_hf, mtp_depth_on_disk
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import Checkpoint, scan
from swiftlite.families.index import FAMILIES
from swiftlite.model.attention.rope import RotaryEmbedding
from swiftlite.plan.cost import memory
from tests.faults.fuzzing import answer, damaged, fuzz, junk, scalars
from tests.messages import mentions
from tests.planned import planned, setup_of
from tests.tiers import some_of
from tests.tiny import make_tiny_hf


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request, tmp_path_factory) -> tuple[Path, dict]:
    """Return a directory and its config.json."""
    directory = make_tiny_hf(tmp_path_factory.mktemp(request.param) / "model", request.param, depth=1)
    return directory, json.loads((directory / "config.json").read_text())


def examine(directory: Path, mesh) -> None:
    """Run what `doctor`, its plan, and the beginning of every other command do with config.json."""
    hf_config = answer(read_config, directory, names=str(directory))
    if hf_config is None:
        return
    answer(rules.check, DoctorArgs(model=str(directory)))
    run = planned(model=directory)
    if answer(rules.check, run) is not None:
        answer(memory.estimate, hf_config, setup_of(run))
    family = answer(families.get, hf_config, directory)
    if family is None:
        return
    audit_hf(directory, family)
    mtp_depth_on_disk(directory, family, hf_config)
    architecture = family.architecture(hf_config)
    for part in architecture.sublayers:
        part.mcore_config()
    answer(RotaryEmbedding, {"head_dim": 8, **hf_config}, mesh.device.torch_device, torch.float32, names="config.json")


@fuzz
@given(data=st.data())
def test_any_value_in_a_config(model, mesh, data):
    directory, hf_config = model
    keys = data.draw(st.lists(st.sampled_from(sorted(hf_config)), min_size=1, max_size=3))
    changes = {key: data.draw(st.one_of(junk, scalars, st.just(None)), label=key) for key in keys}
    lost = data.draw(st.sets(st.sampled_from(sorted(hf_config)), max_size=1))
    changed = {key: value for key, value in (hf_config | changes).items() if key not in lost}
    (directory / "config.json").write_text(json.dumps(changed))
    examine(directory, mesh)


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("deepseek_v3", "num_hidden_layers", 10**9),
        ("deepseek_v3", "num_hidden_layers", None),
        ("deepseek_v3", "num_attention_heads", None),
        ("deepseek_v3", "num_experts_per_tok", None),
        ("deepseek_v3", "hidden_size", None),
        ("deepseek_v3", "vocab_size", None),
        ("deepseek_v3", "num_nextn_predict_layers", 10**9),
        ("glm4_moe", "n_group", None),
        ("glm4_moe", "first_k_dense_replace", None),
        ("qwen3", "num_attention_heads", 0),
        ("qwen3", "num_hidden_layers", 0),
        ("qwen3", "head_dim", 0),
        ("qwen3", "rope_parameters", "a"),
        ("qwen3", "rope_parameters", [1]),
        ("qwen3", "rope_theta", 10**400),
        ("qwen3", "rms_norm_eps", float("inf")),
        ("qwen3", "layer_types", 5),
        ("qwen3_moe", "decoder_sparse_step", None),
        ("glm4_moe_lite", "mlp_layer_types", 5),
        ("mistral", "sliding_window", "x"),
    ],
    indirect=["model"],
)
def test_values_that_broke_something_once(model, mesh, key, value):
    directory, hf_config = model
    (directory / "config.json").write_text(json.dumps(hf_config | {key: value}))
    examine(directory, mesh)


@pytest.mark.parametrize("model", some_of(sorted(FAMILIES), "qwen3", "qwen3_5"), indirect=True)
@fuzz
@given(data=st.data())
def test_any_bytes_of_a_config(model, mesh, data):
    directory, hf_config = model
    (directory / "config.json").write_bytes(data.draw(damaged(json.dumps(hf_config).encode())))
    examine(directory, mesh)


WHOLE = {"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.ones(()), "none": torch.ones(0, 2)}
places = st.one_of(st.integers(-1, 48), junk)
header_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from("F32 BF16 I8 F4 F8_E4M3 BOOL".split()), junk),
        "shape": st.one_of(st.lists(st.integers(-1, 6), max_size=3), junk),
        "data_offsets": st.one_of(st.lists(places, min_size=2, max_size=2), junk),
    },
)


def compare_with_package(directory: Path) -> None:
    """Check that a file is read or rejected exactly as by the safetensors package."""
    path = directory / "model.safetensors"
    try:
        expected = load_file(path)
    except (SafetensorError, KeyError, ValueError, OverflowError, RuntimeError, TypeError, AttributeError):
        expected = None
    entries, problems = scan(directory)
    if expected is None:
        assert problems
        assert all(str(path) in problem for problem in problems)
        return
    if problems:  # the package knows more types than weights have
        assert mentions(problems[0], f"{path}: dtype")
        return
    assert entries.keys() == expected.keys()
    with Checkpoint(directory) as checkpoint:
        for key, tensor in expected.items():
            assert torch.equal(checkpoint.read(key).view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@fuzz
@given(header=st.one_of(st.dictionaries(st.sampled_from("abc"), header_entries, max_size=3), junk), size=places)
@example(header={"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, size=9)
def test_any_header(tmp_path, header, size):
    encoded = json.dumps(header).encode()
    data = bytes(size) if isinstance(size, int) and 0 <= size <= 48 else b""
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    compare_with_package(tmp_path)


@fuzz
@given(content=damaged(save(WHOLE)))
def test_any_bytes_of_a_shard(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    compare_with_package(tmp_path)


@fuzz
@given(
    index=st.one_of(
        junk,
        st.fixed_dictionaries(
            {
                "weight_map": st.dictionaries(
                    st.sampled_from("abz"),
                    st.one_of(
                        junk,
                        st.sampled_from(["model.safetensors", "pipe.safetensors", "../x", "absent.safetensors", "."]),
                    ),
                )
            }
        ),
    )
)
@example(index=[[]])
def test_any_index(tmp_path, index):
    (tmp_path / "model.safetensors").write_bytes(save({"a": torch.ones(2), "b": torch.ones(3)}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = answer(Checkpoint, tmp_path, names=str(tmp_path))
    if checkpoint is not None:
        assert set(checkpoint.entries) <= {"a", "b"}
        checkpoint.__exit__()
