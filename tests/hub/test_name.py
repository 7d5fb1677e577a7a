import dataclasses

import pytest

from swiftlite.hub.name import HubName, dataset_name, hub_names, model_name, served_name
from tests.rules.good import SFT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Change to a working directory with a model and a file of rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "hf").mkdir(parents=True)
    (tmp_path / "rows").write_text("")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("model", "org/name")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("model", "Qwen/Qwen3-0.6B", "v1.0")),
        ("org/name@refs/pr/1", HubName("model", "org/name", "refs/pr/1")),
        ("runs/hf@main", HubName("model", "runs/hf", "main")),
        ("ms:org/name@v1", HubName("model", "org/name", "v1", is_of_modelscope=True)),
        ("runs/hf", None),  # it exists
        ("runs/hg", None),  # a slip: what it lies in exists
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("a/b/c", None),
        ("gpt2", None),
        ("org/name.gguf", None),
        ("org/name@", None),
        ("org/name@../x", None),
        ("", None),
    ],
)
def test_names_of_models(text, name):
    assert model_name(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("dataset", "org/name")),
        ("org/name:sub", HubName("dataset", "org/name", subset="sub")),
        ("org/name:sub/test", HubName("dataset", "org/name", subset="sub", split="test")),
        ("org/name:/train_sft@v2", HubName("dataset", "org/name", "v2", split="train_sft")),
        ("ms:org/name:sub", HubName("dataset", "org/name", subset="sub", is_of_modelscope=True)),
        ("org/name@refs/convert/parquet", HubName("dataset", "org/name", "refs/convert/parquet")),
        ("data/train.jsonl", None),
        ("runs/rows", None),
        ("rows", None),
        ("org/name:a/b/c", None),
    ],
)
def test_names_of_datasets(text, name):
    assert dataset_name(text) == name
    if name is not None:
        assert str(name) == text


def test_names_of_served_models(tmp_path, monkeypatch):
    assert served_name("org/name@v1") == "org/name"
    assert served_name("runs/hf/") == "hf"
    assert served_name("org/name", "other") == served_name("runs/hf", "other") == "other"
    monkeypatch.chdir(tmp_path)
    assert served_name(".") == tmp_path.name
    assert served_name("..") == tmp_path.parent.name
    assert served_name("model.gguf") == "model.gguf"


def test_all_names_of_a_command():
    args = dataclasses.replace(SFT, model="org/m@v1", dataset=["org/d#500", "rows", "org/e:sub#5"], val_dataset=[])
    assert [str(name) for name in hub_names(args)] == ["org/m@v1", "org/d", "org/e:sub"]
