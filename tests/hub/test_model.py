"""Test the real huggingface_hub with a hub on this machine."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from swiftlite.hub import commits
from tests.hub.asking import answers, dataset, description_of, local_model
from tests.hub.server import TOKEN, environment, files_of
from tests.messages import has_line, mentions, naming
from tests.tiers import some_of


def asked_for(hub) -> set[str]:
    """Return the names of the downloaded files."""
    return {path.rpartition("/")[2] for method, path in hub.asked if method == "GET" and "/resolve/" in path}


def test_a_directory_stays_what_it_is(tmp_path):
    """huggingface_hub is not even imported."""
    code = (
        "import sys; from swiftlite.hub.model import local_model; print(local_model('some/dir/x'), local_model('.'));"
        "print([name for name in ('huggingface_hub', 'datasets', 'torch', 'tqdm.auto') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "some/dir/x .\n[]\n"


def test_a_name_becomes_a_directory_with_what_is_needed_and_no_more(hub, tiny, tmp_path):
    directory, again = answers(hub, tmp_path / "home", local_model("org/tiny"), local_model("org/tiny"))
    assert directory == again
    assert files_of(Path(directory)) == files_of(tiny)


def test_config_json_comes_before_the_weights(hub, tmp_path):
    (directory,) = answers(hub, tmp_path / "home", description_of("org/tiny"))
    assert (Path(directory) / "config.json").is_file()
    assert "model.safetensors" not in asked_for(hub)
    (whole,) = answers(hub, tmp_path / "home", local_model("org/tiny"))
    assert whole == directory
    assert (Path(directory) / "model.safetensors").is_file()


def test_a_revision_is_a_tag_or_a_commit(hub, tiny, tmp_path):
    repository = hub.repositories["models/org/tiny"]
    first = repository.resolve("main")
    repository.tags["v1"] = first
    second = repository.commit(files_of(tiny) | {"config.json": b"{}"})
    found = answers(
        hub,
        tmp_path / "home",
        *map(local_model, ("org/tiny@v1", "org/tiny", f"org/tiny@{first}")),
    )
    assert [Path(directory).name for directory in found] == [first, second, first]


def test_what_is_here_is_not_asked_for_again(hub, tmp_path):
    commit = hub.repositories["models/org/tiny"].resolve("main")
    (before,) = answers(hub, tmp_path / "home", local_model("org/tiny"))
    hub.asked.clear()
    (named,) = answers(hub, tmp_path / "home", local_model(f"org/tiny@{commit}"))
    (offline,) = answers(hub, tmp_path / "home", local_model("org/tiny"), HF_HUB_OFFLINE="1")
    known = json.dumps({"models/org/tiny@main": commit})
    (of_a_rank,) = answers(hub, tmp_path / "home", local_model("org/tiny"), SWIFTLITE_COMMITS=known)
    assert before == named == offline == of_a_rank
    assert hub.asked == []


def test_a_download_that_is_cut_goes_on_where_it_stopped(hub, tmp_path):
    """huggingface_hub writes 10 MB at a time, and keeps them if a download is interrupted."""
    weights = random.Random(0).randbytes(25_000_000)
    hub.add("org/large", {"config.json": b"{}", "model.safetensors": weights})
    hub.cut["model.safetensors"] = [11_000_000, 2]  # twice, after so many bytes each
    (directory,) = answers(hub, tmp_path / "home", local_model("org/large"))
    assert (Path(directory) / "model.safetensors").read_bytes() == weights
    megabyte = 1024 * 1024
    assert hub.ranges == [f"model.safetensors bytes={10 * megabyte}-", f"model.safetensors bytes={20 * megabyte}-"]


def test_a_killed_download_leaves_nothing_that_looks_whole(hub, tiny, tmp_path):
    """Complete files are not downloaded again."""
    hub.stalled.add("model.safetensors")
    code = (
        "from swiftlite.hub.model import description_of, local_model\n"
        "description_of('org/tiny')\nlocal_model('org/tiny')"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=environment(hub, tmp_path / "home"), cwd=tmp_path)
    assert hub.has_stalled.wait(60)
    child.kill()
    child.wait()
    hub.stalled.clear()
    (offline,) = answers(hub, tmp_path / "home", local_model("org/tiny"), HF_HUB_OFFLINE="1")
    assert mentions(offline, "UserError: org/tiny HF_HUB_OFFLINE")
    hub.asked.clear()
    (directory,) = answers(hub, tmp_path / "home", local_model("org/tiny"))
    assert files_of(Path(directory)) == files_of(tiny)
    assert "config.json" not in asked_for(hub)


def test_what_cannot_be_had_says_what_to_type(hub, tmp_path):
    hub.add("org/gated", {"config.json": b"{}"}).gated = True
    hub.add("org/private", {"config.json": b"{}"}).private = True
    hub.add("org/bin", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    names = ("org/nope", "org/private", "org/gated", "org/tiny@v9", "org/bin", "org/x--y")
    missing, private, gated, revision, unsafe, impossible = answers(hub, tmp_path / "home", *map(local_model, names))
    assert mentions(missing, f"UserError: {hub.url} org/nope hf auth login HF_TOKEN")
    assert mentions(private, f"UserError: {hub.url} org/private hf auth login HF_TOKEN")
    assert mentions(gated, f"UserError: org/gated {hub.url}/org/gated hf auth login")
    assert mentions(revision, "UserError: org/tiny v9")
    assert mentions(unsafe, "UserError: org/bin *.safetensors")
    assert mentions(impossible, "UserError: org/x--y")
    assert not any(path.endswith("pytorch_model.bin") for _, path in hub.asked)


def test_a_token_opens_what_is_private_and_is_never_shown(hub, tiny, tmp_path):
    hub.add("org/private", files_of(tiny)).private = True
    (directory,) = answers(hub, tmp_path / "home", local_model("org/private"), HF_TOKEN=TOKEN)
    assert files_of(Path(directory)) == files_of(tiny)
    (wrong,) = answers(hub, tmp_path / "other", local_model("org/private"), HF_TOKEN="hf_anotherTokenOfNobody")
    assert mentions(wrong, f"UserError: {hub.url} hf auth login HF_TOKEN")


@pytest.mark.parametrize("status", some_of([403, 429, 500], 429))
def test_a_hub_that_refuses(hub, tmp_path, status):
    hub.broken = status
    (answer,) = answers(hub, tmp_path / "home", local_model("org/tiny"))
    names = {403: "org/tiny", 429: hub.url, 500: f"org/tiny {hub.url}"}
    assert mentions(answer, f"UserError: {names[status]}")
    assert answer.count("\n") == 1


def test_no_network_and_nothing_in_the_cache(tmp_path):
    home = tmp_path / "home"
    offline, rows = answers(None, home, local_model("org/tiny@v1"), dataset("org/rows"), HF_HUB_OFFLINE="1")
    assert mentions(offline, "UserError: org/tiny@v1 HF_HUB_OFFLINE hf download org/tiny --revision v1")
    assert mentions(rows, "UserError: org/rows HF_HUB_OFFLINE hf download --repo-type dataset org/rows")
    (unreachable,) = answers(None, home, local_model("org/tiny"), HF_ENDPOINT="http://127.0.0.1:9")
    assert mentions(unreachable, "UserError: org/tiny http://127.0.0.1:9")


def test_a_full_disk(hub, tmp_path):
    """/dev/full cannot be a directory, so the test raises the error that the library would raise."""
    code = (
        "import errno, os\n"
        "from swiftlite.hub.name import HubName\n"
        "from swiftlite.hub.refusal import refusals\n"
        "with refusals(HubName('model', 'org/tiny')):\n"
        "    with open('/dev/full', 'wb', buffering=0) as file:\n"
        "        file.write(b'x')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(hub, tmp_path / "home"), capture_output=True, text=True
    )
    home = tmp_path / "home"
    assert has_line(done.stderr, f"org/tiny {home} No space left on device")
    assert has_line(done.stderr, "export HF_HOME=DIR")


def test_commits_are_kept_beside_a_run(tmp_path, monkeypatch):
    from swiftlite.base.errors import UserError
    from swiftlite.hub.name import HubName

    monkeypatch.setenv(commits.VARIABLE, "{}")
    name, other = HubName("model", "org/tiny"), HubName("dataset", "org/rows", "v1")
    assert commits.revision_of(other) == "v1"
    commits.note(name, "a" * 40)
    commits.note(other, "b" * 40)
    assert commits.revision_of(name) == "a" * 40
    commits.write_commits(tmp_path, [name])
    assert commits.read_commits(tmp_path) == {"models/org/tiny@main": "a" * 40}
    commits.check_commits(tmp_path)
    commits.keep({name.key: "c" * 40})
    with pytest.raises(UserError, match=naming(f"org/tiny {'a' * 40} {'c' * 40}")):
        commits.check_commits(tmp_path)
    for damage in ("[]", '{"x": 1}', "{"):
        (tmp_path / commits.COMMITS_FILE).write_text(damage)
        with pytest.raises(UserError, match=naming(str(tmp_path / commits.COMMITS_FILE))):
            commits.read_commits(tmp_path)
    assert commits.read_commits(tmp_path / "nowhere") == {}
