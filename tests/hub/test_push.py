"""Test that the real client pushes exports of a real run to a hub on this machine."""

import shutil
from pathlib import Path

import pytest

from swiftlite.hub.name import HubName
from swiftlite.hub.push import push
from tests.hub.asking import answers, local_model, start
from tests.hub.server import TOKEN, files_of
from tests.messages import has_line, mentions

EXPORT = ("export", "--to_hf", "--model", "run", "--output_dir", "hf", "--push_to_hub")


@pytest.fixture
def here(run, tmp_path):
    """Return a directory that contains the run."""
    shutil.copytree(run / "run", tmp_path / "run")
    return tmp_path


@pytest.mark.gloo
def test_an_export_is_pushed_with_its_card(hub, here):
    done = start(hub, here, *EXPORT, "me/new", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert has_line(done.stderr, f"hf {hub.url}/me/new/commit/")
    repository = hub.repositories["models/me/new"]
    pushed = dict(repository.commits[repository.resolve("main")])
    del pushed[".gitattributes"]  # the hub's own
    assert pushed == files_of(here / "hf")
    assert repository.private
    card = pushed["README.md"].decode()
    assert "base_model: org/tiny\ndatasets:\n- org/rows\n" in card
    assert "vllm serve me/new --speculative-config" in card
    (directory,) = answers(hub, here / "home", local_model("me/new"), HF_TOKEN=TOKEN)
    assert {name: content for name, content in pushed.items() if name != "README.md"} == files_of(Path(directory))
    assert not [path for path in here.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def pushed(directory: str, name: str, is_private: bool) -> None:
    push(Path(directory), HubName("model", name), is_private=is_private)


def pushing(directory: Path, name: str, is_private: bool = True) -> tuple:
    """Return the arguments of a push without an export."""
    return (f"{__name__}:pushed", str(directory), name, is_private)


def test_a_repository_is_public_if_asked_and_stays_what_it_was(hub, tiny, tmp_path):
    home = tmp_path / "home"
    done = answers(hub, home, pushing(tiny, "me/open", False), pushing(tiny, "me/open"), HF_TOKEN=TOKEN)
    assert done == ["None", "None"]
    repository = hub.repositories["models/me/open"]
    assert not repository.private
    assert files_of(tiny).items() <= repository.commits[repository.resolve("main")].items()


def test_shards_of_an_earlier_push_do_not_stay(hub, tiny, tmp_path):
    """An engine would read these shards too."""
    kept = {"notes.md": b"kept", "adapter/adapter_model.safetensors": b"kept"}
    hub.add("me/old", {"model-00001-of-00002.safetensors": b"x", "model.safetensors.index.json": b"{}"} | kept)
    answers(hub, tmp_path / "home", pushing(tiny, "me/old"), HF_TOKEN=TOKEN)
    repository = hub.repositories["models/me/old"]
    assert repository.commits[repository.resolve("main")] == files_of(tiny) | kept


def test_a_push_that_fails_says_how_to_go_on(hub, tiny, tmp_path):
    home = tmp_path / "home"
    (unknown,) = answers(hub, home, pushing(tiny, "me/new"), HF_TOKEN="hf_anotherTokenOfNobody")
    (foreign,) = answers(hub, home, pushing(tiny, "other/new"), HF_TOKEN=TOKEN)
    assert mentions(unknown, f"UserError: {tiny} me/new {hub.url}")
    assert mentions(foreign, f"UserError: {tiny} other/new hf upload --private other/new {tiny}")
    assert "hf_" not in unknown + foreign
