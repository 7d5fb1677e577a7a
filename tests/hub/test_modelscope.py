"""Test the package `modelscope` with a server on this machine that has the routes of ModelScope.

The package is not in the requirements: `pip install modelscope`.
"""

import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.hub.asking import answers, description_of, local_model, start
from tests.hub.conftest import ROWS
from tests.hub.server import files_of
from tests.messages import mentions

needs_modelscope = pytest.mark.skipif(importlib.util.find_spec("modelscope") is None, reason="pip install modelscope")
TOKEN = "ms-0123456789"


class Site(ThreadingHTTPServer):
    """A hub with repositories by `models/ORG/NAME` or `datasets/ORG/NAME`: their files by name.

    Attributes:
        private: repositories that require TOKEN.
        asked: paths of requests for files.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.asked: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "MODELSCOPE_HOME": "home/.modelscope"}


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        words = url.path.removeprefix("/api/v1/").split("/")
        repository, action = "/".join(words[:3]), "/".join(words[3:])
        files = self.server.repositories.get(repository)
        is_allowed = TOKEN in f"{self.headers.get('Authorization')} {self.headers.get('Cookie')}"
        if files is None or query.get("Revision", "master") != "master":
            self._send(404, {"Code": 10010205001, "Message": "not found", "Success": False})
        elif repository in self.server.private and not is_allowed:
            self._send(403, {"Code": 10010203003, "Message": "no permission", "Success": False})
        elif action == "repo":
            self.server.asked.append(query["FilePath"])
            self._send(200, files[query["FilePath"]])
        elif action in ("repo/files", "repo/tree"):
            listed = [_entry(name, content) for name, content in files.items()]
            if int(query.get("PageNumber", "1")) > 1:
                listed = []
            self._send(200, {"Code": 200, "Success": True, "Data": {"Files": listed}})
        else:
            self._send(200, {"Code": 200, "Success": True, "Data": {}})

    do_HEAD = do_GET

    def _send(self, status: int, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    base = name.rpartition("/")[2]
    return {"Path": name, "Name": base, "Type": "blob", "Size": len(content), "Sha256": digest, "Revision": digest[:8]}


@pytest.fixture
def site(tiny) -> Iterator[Site]:
    with Site() as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        site.repositories["models/org/tiny"] = files_of(tiny) | {"model.gguf": b"x", "original/a.safetensors": b"x"}
        site.repositories["datasets/org/rows"] = {"README.md": b"", "rows.jsonl": ROWS}
        site.repositories["models/org/secret"] = files_of(tiny)
        site.private.add("models/org/secret")
        yield site
        site.shutdown()


@needs_modelscope
def test_a_name_becomes_a_directory_with_what_is_needed(site, tiny, tmp_path):
    (described,) = answers(None, tmp_path / "home", description_of("ms:org/tiny"), **site.environment)
    assert (Path(described) / "config.json").is_file()
    assert "model.safetensors" not in site.asked
    (directory,) = answers(None, tmp_path / "home", local_model("ms:org/tiny"), **site.environment)
    assert directory == described
    assert {name: (Path(directory) / name).read_bytes() for name in files_of(tiny)} == files_of(tiny)
    assert not (Path(directory) / "model.gguf").exists()
    assert not (Path(directory) / "original").exists()
    site.asked.clear()
    offline = {"HF_HUB_OFFLINE": "1", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    known = {"SWIFTLITE_COMMITS": '{"ms:models/org/tiny@main": "master"}', "USE_MODELSCOPE": "1"}
    for changes in (offline, known):
        name = "org/tiny" if changes is known else "ms:org/tiny"
        (again,) = answers(None, tmp_path / "home", local_model(name), **site.environment | changes)
        assert again == directory
    assert site.asked == []


@needs_modelscope
def test_what_cannot_be_read_is_explained(site, tmp_path):
    environment = site.environment
    names = ("ms:org/nothing", "ms:org/tiny@v9", "ms:org/secret")
    missing, revision, private = answers(None, tmp_path / "home", *map(local_model, names), **environment)
    assert mentions(missing, "UserError ms:org/nothing MODELSCOPE_API_TOKEN")
    assert mentions(revision, "UserError ms:org/tiny@v9 v9")
    assert mentions(private, "UserError ms:org/secret MODELSCOPE_API_TOKEN")
    (allowed,) = answers(
        None, tmp_path / "home", local_model("ms:org/secret"), **environment, MODELSCOPE_API_TOKEN=TOKEN
    )
    assert (Path(allowed) / "model.safetensors").is_file()
    (offline,) = answers(None, tmp_path / "home", local_model("ms:org/tiny"), **environment, HF_HUB_OFFLINE="1")
    assert mentions(offline, "UserError ms:org/tiny HF_HUB_OFFLINE")


@needs_modelscope
def test_a_site_that_does_not_answer_is_explained(tmp_path):
    environment = {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:9", "MODELSCOPE_HOME": "home"}
    (unreachable,) = answers(None, tmp_path / "home", local_model("ms:org/tiny"), **environment)
    assert mentions(unreachable, "UserError ms:org/tiny MODELSCOPE_ENDPOINT")


def test_the_package_is_named_if_it_is_missing(tmp_path):
    code = "tests.hub.test_modelscope:without_the_package"
    (problem,) = answers(None, tmp_path / "home", (code, "ms:org/tiny"))
    assert mentions(problem, "UserError ms:org/tiny pip install modelscope")


def without_the_package(name: str) -> Path:
    import sys

    from swiftlite.hub.model import local_model as resolve

    sys.modules["modelscope"] = None  # pyright: ignore[reportArgumentType]
    return resolve(name)


@needs_modelscope
def test_a_run_trains_on_names_of_modelscope(site, tmp_path):
    words = """megatron sft --model ms:org/tiny --dataset ms:org/rows#20 --output_dir run --train_iters 2
        --global_batch_size 2 --max_length 64 --torch_dtype float32 --acceptance_samples 0""".split()
    done = start(None, tmp_path, *words, **site.environment, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "commits.json").read_text()) == {
        "ms:models/org/tiny@main": "master",
        "ms:datasets/org/rows@main": "master",
    }
    assert len([name for name in site.asked if name == "model.safetensors"]) == 1
