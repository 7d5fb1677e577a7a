"""Test that changes of config.json leave all other keys unchanged."""

import json

import pytest

from swiftlite.base.errors import UserError
from swiftlite.bridge.hf_config import REMOVE, digest_of_trunk, dtype_change, patch, read_config, write_patched
from tests.messages import naming
from tests.tiny import make_tiny_hf

TEXT = """{
  "architectures": ["Qwen3ForCausalLM"],
    "rope_scaling": {"factor": 1e1,   "num_nextn_predict_layers": 7},
  "num_nextn_predict_layers" : 1 ,
  "torch_dtype": "bfloat16",
  "rms_norm_eps": 1e-06,
  "no_number": [NaN, Infinity, -Infinity],
  "long": 123456789012345678901234567890,
  "name": "a \\"quoted\\" { name, é \\u00e9 \\ud800"
}
"""
CONFIG = json.loads(TEXT)


@pytest.fixture
def out(tmp_path):
    """Return a directory to write to, next to a directory with `TEXT` as its config.json."""
    (tmp_path / "config.json").write_bytes(TEXT.encode())
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_only_the_value_changes():
    patched, difference = patch(CONFIG, {"num_nextn_predict_layers": 2})
    assert list(patched) == list(CONFIG)
    assert {key for key in CONFIG if patched[key] is not CONFIG[key]} == {"num_nextn_predict_layers"}
    assert difference == ["num_nextn_predict_layers: 1 -> 2"]
    assert CONFIG["num_nextn_predict_layers"] == 1


def test_a_new_key_follows_the_last_one():
    patched, difference = patch(CONFIG, {"mtp": [1, "é"]})
    assert list(patched) == [*CONFIG, "mtp"]
    assert difference == ['mtp: (none) -> [1, "é"]']


def test_a_drafter_is_named_by_its_kind():
    drafter = {"kind": "gemma4_assistant", "layers": 1, "config": {"model_type": "gemma4_assistant"}}
    assert patch({"drafter": drafter}, {"drafter": REMOVE}) == ({}, ["drafter: gemma4_assistant, layers 1 -> (none)"])


def test_a_value_that_is_there_already_is_no_difference():
    same = {"torch_dtype": "bfloat16", "rope_scaling": {"factor": 10, "num_nextn_predict_layers": 7}}
    assert patch(CONFIG, same) == (CONFIG, [])


def test_several_changes_at_once():
    changes = {"torch_dtype": "float32", "architectures": [], "new": "\u2028", "name": REMOVE, "absent": REMOVE}
    patched, difference = patch(CONFIG, changes)
    assert patched == {key: value for key, value in CONFIG.items() if key != "name"} | {
        "torch_dtype": "float32",
        "architectures": [],
        "new": "\u2028",
    }
    assert [line.split(":")[0] for line in difference] == ["architectures", "name", "new", "torch_dtype"]
    assert difference[1].endswith("-> (none)")


def test_without_a_change_the_file_is_copied_byte_for_byte(out):
    windows = TEXT.replace("\n", "\r\n").encode()
    (out.parent / "config.json").write_bytes(windows)
    assert write_patched(out.parent, out, {"torch_dtype": "bfloat16", "absent": REMOVE}) == []
    assert (out / "config.json").read_bytes() == windows


def test_what_is_written_differs_in_the_changed_key_alone(out):
    assert write_patched(out.parent, out, {"num_nextn_predict_layers": 0}) == ["num_nextn_predict_layers: 1 -> 0"]
    written = read_config(out)
    assert list(written) == list(CONFIG)
    # As text, where NaN is NaN, and 10 is not 10.0.
    assert json.dumps(written | {"num_nextn_predict_layers": 1}) == json.dumps(CONFIG)
    assert '"rms_norm_eps": 1e-06,' in (out / "config.json").read_text()


def test_a_key_that_is_there_twice_has_its_last_value(out):
    (out.parent / "config.json").write_text('{"a": 1, "b": 2, "a": 3}')
    assert write_patched(out.parent, out, {"b": REMOVE}) == ["b: 2 -> (none)"]
    assert read_config(out) == {"a": 3}


def test_dtype_is_declared_under_the_key_in_use():
    assert dtype_change({"torch_dtype": "bfloat16"}, "float32") == {"torch_dtype": "float32"}
    assert dtype_change({"dtype": "bfloat16"}, "float32") == {"dtype": "float32"}
    assert dtype_change({}, "float32") == {"dtype": "float32"}
    assert dtype_change({"dtype": "float32"}, "float32") == {}


def test_unreadable_config(tmp_path):
    with pytest.raises(UserError, match=naming("config.json")):
        read_config(tmp_path)
    with pytest.raises(UserError, match=naming("config.json")):
        read_config(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=naming("config.json JSON")):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=naming("config.json JSON")):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match=naming("config.json JSON")):
        read_config(tmp_path)


def test_the_digest_of_a_trunk_does_not_depend_on_its_heads():
    trunk = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"], "hidden_size": 64}
    with_heads = trunk | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*", "dtype": "bfloat16"}
    assert digest_of_trunk(with_heads) == digest_of_trunk(trunk)
    assert digest_of_trunk(trunk | {"hidden_size": 128}) != digest_of_trunk(trunk)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_heads_that_config_json_does_not_declare_are_counted(tmp_path, family):
    """In Nemotron-H, `mtp.layers.1` is the second layer of the first head."""
    directory = make_tiny_hf(tmp_path, family, depth=2)
    config = json.loads((directory / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    assert read_config(directory)["num_nextn_predict_layers"] == 2
