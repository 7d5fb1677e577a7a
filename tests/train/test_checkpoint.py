"""Checkpoints: a name means that all is there; what is damaged is named."""

import json
from pathlib import Path

import pytest
import torch

from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.model.gpt import GPTModel
from swiftlite.model.open import open_model, read_hf_model
from swiftlite.train.checkpoint import Checkpointer, load_checkpoint, read_state, resolve_checkpoint
from tests.tiny import make_tiny_hf


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory):
    return read_hf_model(make_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", depth=1))


@pytest.fixture
def open_chunks(hf_model, mesh):
    """Another copy of the same model, each time."""

    def open_chunks(heads: Heads = Heads(1), seed: int = 42) -> list[GPTModel]:
        mtp_init = "checkpoint" if heads.layers == 1 else "random"
        chunks, _ = open_model(hf_model, mesh, dtype=torch.float32, heads=heads, mtp_init=mtp_init, seed=seed)
        return chunks

    return open_chunks


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_weights_and_state_come_back(open_chunks, mesh, tmp_path):
    (chunk,) = chunks = open_chunks()
    expected = {name: torch.randn_like(parameter) for name, parameter in chunk.named_parameters()}
    chunk.load_state_dict(expected, strict=False)
    Checkpointer(tmp_path, mesh, chunks, None, {"torch_dtype": "float32"}).save(3, {"stream": [1, 2]})
    assert names(tmp_path) == {"checkpoint-3"}
    assert read_state(tmp_path / "checkpoint-3") == {"step": 3, "torch_dtype": "float32", "stream": [1, 2]}

    (other,) = fresh = open_chunks()
    load_checkpoint(tmp_path / "checkpoint-3", mesh, fresh)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in other.named_parameters())


def test_heads_may_stay_as_they_are(open_chunks, mesh, tmp_path):
    (chunk,) = chunks = open_chunks()
    for parameter in chunk.parameters():
        torch.nn.init.zeros_(parameter)
    Checkpointer(tmp_path, mesh, chunks, None, {}).save(1)
    (other,) = fresh = open_chunks()
    load_checkpoint(tmp_path / "checkpoint-1", mesh, fresh, with_heads=False)
    for name, parameter in other.named_parameters():
        assert bool(parameter.any()) == name.startswith("mtp."), name


@pytest.mark.parametrize(("keep", "left"), [(None, {1, 2, 10}), (2, {2, 10}), (1, {10})])
def test_the_newest_are_kept(open_chunks, mesh, tmp_path, keep, left):
    (tmp_path / "checkpoint-best").mkdir()  # somebody else's
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, {}, keep=keep)
    for step in (1, 2, 10):
        checkpointer.save(step)
    assert names(tmp_path) == {"checkpoint-best"} | {f"checkpoint-{step}" for step in left}
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_checkpoint_without_all_tensors_gets_no_name(open_chunks, mesh, tmp_path):
    chunks = open_chunks()
    checkpointer = Checkpointer(tmp_path, mesh, chunks, None, {"of no JSON": object()})
    with pytest.raises(TypeError):
        checkpointer.save(1)
    assert names(tmp_path) == {".checkpoint-1.writing"}
    Checkpointer(tmp_path, mesh, chunks, None, {}).save(2)
    assert names(tmp_path) == {"checkpoint-2"}  # what was left of the other is gone


def test_a_step_that_is_saved_again_replaces_the_first(open_chunks, mesh, tmp_path):
    chunks = open_chunks()
    Checkpointer(tmp_path, mesh, chunks, None, {"run": 1}).save(1)
    (tmp_path / "checkpoint-1" / "note.txt").write_text("of the first")
    Checkpointer(tmp_path, mesh, chunks, None, {"run": 2}).save(1)
    assert read_state(tmp_path / "checkpoint-1")["run"] == 2
    assert not (tmp_path / "checkpoint-1" / "note.txt").exists()


def test_a_checkpoint_is_found_by_itself_and_in_its_run(open_chunks, mesh, tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint"):
        resolve_checkpoint(tmp_path)
    Checkpointer(tmp_path, mesh, open_chunks(), None, {}).save(4)
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(tmp_path / "checkpoint-4") == tmp_path / "checkpoint-4"


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_state_that_cannot_be_read_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(UserError, match=r"trainer_state\.json is damaged"):
        read_state(tmp_path)


def test_a_damaged_file_is_named(open_chunks, mesh, tmp_path):
    chunks = open_chunks()
    Checkpointer(tmp_path, mesh, chunks, None, {}).save(1)
    file = next((tmp_path / "checkpoint-1").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="checkpoint-1 is damaged, or belongs to another model"):
        load_checkpoint(tmp_path / "checkpoint-1", mesh, chunks)


def test_another_model_is_named(open_chunks, mesh, tmp_path):
    Checkpointer(tmp_path, mesh, open_chunks(), None, {}).save(1)
    with pytest.raises(UserError, match=r"checkpoint-1 is damaged, or belongs to another model: .*mtp"):
        load_checkpoint(tmp_path / "checkpoint-1", mesh, open_chunks(Heads(2)))


def test_the_state_is_json_that_a_person_can_read(open_chunks, mesh, tmp_path):
    Checkpointer(tmp_path, mesh, open_chunks(), None, {"mtp_num_layers": 1}).save(7)
    text = (tmp_path / "checkpoint-7" / "trainer_state.json").read_text()
    assert text == json.dumps({"step": 7, "mtp_num_layers": 1}, indent=2)
