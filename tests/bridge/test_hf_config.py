"""config.json is patched, never written anew."""

import json

import pytest

from swiftlite.bridge.hf_config import REMOVE, dtype_change, patch, read_config, write_patched
from swiftlite.errors import UserError

TEXT = """{
  "architectures": ["Qwen3ForCausalLM"],
    "rope_scaling": {"factor": 1e1,   "num_nextn_predict_layers": 7},
  "num_nextn_predict_layers" : 1 ,
  "torch_dtype": "bfloat16",
  "name": "a \\"quoted\\" { name, é \\u00e9"
}
"""


def test_only_the_value_changes():
    text, difference = patch(TEXT, {"num_nextn_predict_layers": 2})
    assert text == TEXT.replace('layers" : 1 ,', 'layers" : 2 ,')
    assert difference == ["num_nextn_predict_layers: 1 -> 2"]


def test_a_new_key_follows_the_last_one():
    text, difference = patch(TEXT, {"mtp": [1, "é"]})
    assert text == TEXT.replace('\\u00e9"\n}', '\\u00e9",\n  "mtp": [1, "é"]\n}')
    assert difference == ['mtp: (none) -> [1, "é"]']


def test_a_value_that_is_there_already_changes_nothing():
    assert patch(TEXT, {"torch_dtype": "bfloat16", "rope_scaling": {"factor": 10, "num_nextn_predict_layers": 7}}) == (
        TEXT,
        [],
    )


@pytest.mark.parametrize("text", ["{}", "{ }", '{"a":1}', '{"a":1,"b":{"c":"}"}}', '{"a": 1, "a": 2}', '\n{"a":[]\n}'])
def test_result_is_the_old_object_with_the_changes(text):
    changes = {"a": {"x": None}, "new": "\u2028", "other": 3}
    patched, difference = patch(text, changes)
    assert json.loads(patched) == json.loads(text) | changes
    assert len(difference) == 3


def test_several_changes_at_once():
    text, difference = patch(TEXT, {"torch_dtype": "float32", "architectures": [], "name": "x"})
    assert json.loads(text) == json.loads(TEXT) | {"torch_dtype": "float32", "architectures": [], "name": "x"}
    assert len(difference) == 3


@pytest.mark.parametrize(
    "text", [TEXT, "{}", '{"a":1}', '{"a":1,"b":{"a":2}}', '{"b":2, "a" : [1] }', '{"a": 1, "a": 2}']
)
@pytest.mark.parametrize("key", ["a", "b", "torch_dtype", "architectures", "name"])
def test_removed(text, key):
    before = json.loads(text)
    patched, difference = patch(text, {key: REMOVE, "new": 1})
    assert json.loads(patched) == {k: v for k, v in before.items() if k != key} | {"new": 1}
    assert any(line.startswith(f"{key}: ") and line.endswith("-> (none)") for line in difference) is (key in before)


def test_what_is_around_a_removed_key_stays():
    assert patch(TEXT, {"torch_dtype": REMOVE})[0] == TEXT.replace('"torch_dtype": "bfloat16",\n  ', "")
    assert patch(TEXT, {"name": REMOVE})[0] == TEXT[: TEXT.index(',\n  "name"')] + "\n}\n"


def test_write_patched(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_bytes(TEXT.encode())
    assert write_patched(source, out, {}) == []
    assert (out / "config.json").read_bytes() == TEXT.encode()
    assert write_patched(source, out, {"num_nextn_predict_layers": 0}) == ["num_nextn_predict_layers: 1 -> 0"]
    assert read_config(out)["num_nextn_predict_layers"] == 0


def test_line_endings_stay(tmp_path):
    (tmp_path / "config.json").write_bytes(TEXT.replace("\n", "\r\n").encode())
    out = tmp_path / "out"
    out.mkdir()
    write_patched(tmp_path, out, {"extra": 1})
    expected = TEXT.replace('\\u00e9"\n}', '\\u00e9",\n  "extra": 1\n}').replace("\n", "\r\n")
    assert (out / "config.json").read_bytes() == expected.encode()


def test_dtype_is_declared_under_the_key_in_use():
    assert dtype_change({"torch_dtype": "bfloat16"}, "float32") == {"torch_dtype": "float32"}
    assert dtype_change({"dtype": "bfloat16"}, "float32") == {"dtype": "float32"}
    assert dtype_change({}, "float32") == {"dtype": "float32"}
    assert dtype_change({"dtype": "float32"}, "float32") == {}


def test_unreadable_config(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path)
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match="not valid JSON"):
        read_config(tmp_path)
