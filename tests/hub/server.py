"""Run a hub on this machine, with the routes that huggingface_hub and datasets use, and with errors that can occur.

Neither client is replaced; they are directed to this hub by HF_ENDPOINT.
"""

import base64
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_thisIsTheTokenOfTheTests"
Files = dict[str, bytes]


@dataclass
class Repository:
    """The commits of a repository, oldest first. A revision is main, a tag or a commit.

    Attributes:
        gated: whether files require a token with access; no token has access.
        private: whether the repository seems not to exist without a token.
    """

    commits: dict[str, Files] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Files) -> str:
        """Add a commit with exactly these files; return its name."""
        content = b"".join(name.encode() + body for name, body in sorted(files.items()))
        sha = hashlib.sha1(content + str(len(self.commits)).encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha

    def resolve(self, revision: str) -> str | None:
        if revision == "main":
            return next(reversed(self.commits), None)
        return self.tags.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The content, the requests and the faults of the server.

    Attributes:
        url: address for HF_ENDPOINT.
        asked: (method, path) of every request.
        authorizations: authorization headers of requests.
        cut: by file name, the number of bytes after which the connection breaks, and how often this still happens.
        broken: status with which every request is answered.
        stalled: files of which only half is sent, followed by a minute without data; `has_stalled` is then set.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    authorizations: Counter[str] = field(default_factory=Counter)
    uploads: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    broken: int = 0
    stalled: set[str] = field(default_factory=set)
    has_stalled: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, files: Files, kind: str = "models") -> Repository:
        """Add a repository with one commit."""
        repository = self.repositories.setdefault(f"{kind}/{name}", Repository())
        repository.commit(files)
        return repository


def files_of(directory: Path) -> Files:
    """Return the files of a directory as the files of a commit."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub until the end of the context."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub | None, home: Path, **changes: str) -> dict[str, str]:
    """Return the environment variables of a process that uses this hub, with a separate cache."""
    left_out = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "SWIFTLITE_COMMITS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out and "_proxy" not in name.lower()}
    ours = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if hub is not None:
        ours["HF_ENDPOINT"] = hub.url
    return {**kept, **ours, **changes}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.asked.append((self.command, path))
        self.hub.authorizations[self.headers.get("Authorization", "")] += 1
        if self.hub.broken:
            self._send(self.hub.broken, {"error": "broken"})
        elif path.startswith("/upload/"):
            self.hub.uploads[path.removeprefix("/upload/")] = body
            self._send(200, {})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            self._of_repository(path, parse_qs(url.query), body)

    def _of_repository(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        """Answer /api/KIND/ORG/NAME/... and /[datasets/]ORG/NAME/resolve/REVISION/FILE."""
        words = path.strip("/").split("/")
        is_api = words[0] == "api"
        if is_api:
            words = words[1:]
        elif words[0] != "datasets":
            words = ["models", *words]
        repository = self.hub.repositories.get("/".join(words[:3]))
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.headers.get("Authorization") and not is_known:
            self._send(401, {"error": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.private and not is_known):
            self._send(
                401 if not is_known else 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        elif is_api:
            self._api(words, repository, query, body)
        elif repository.gated:
            self._send(403 if is_known else 401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        else:
            self._resolve(repository, words[4], "/".join(words[5:]))

    def _api(self, words: list[str], repository: Repository, query: dict[str, list[str]], body: bytes) -> None:
        action = words[3] if len(words) > 3 else "revision"
        revision = words[4] if len(words) > 4 else "main"
        sha = repository.resolve(revision)
        if action == "preupload":
            files = [entry["path"] for entry in json.loads(body)["files"]]
            self._send(200, {"files": [_upload(path) for path in files]})
        elif action == "commit":
            self._commit("/".join(words[1:3]), repository, body)
        elif sha is None:
            self._send(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        elif action == "revision":
            siblings = [{"rfilename": name} for name in repository.commits[sha]]
            name = "/".join(words[1:3])
            described = {"_id": "1", "id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []}
            self._send(200, {**described, "downloads": 0, "likes": 0})
        elif action == "tree":
            self._send(200, _entries(repository.commits[sha], "/".join(words[5:]), "recursive" in query))
        elif action == "paths-info":
            asked = parse_qs(body.decode()).get("paths", []) if b"=" in body else json.loads(body)["paths"]
            found = [entry for path in asked for entry in _entries(repository.commits[sha], path, True, exact=True)]
            self._send(200, found)
        else:
            self._send(404, {"error": "no such route"}, {"X-Error-Code": "EntryNotFound"})

    def _resolve(self, repository: Repository, revision: str, name: str) -> None:
        sha = repository.resolve(revision)
        if sha is None:
            return self._send(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        content = repository.commits[sha].get(name)
        if content is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            return self._send(404, {"error": "no such file"}, headers)
        first = 0
        if wanted := self.headers.get("Range"):
            self.hub.ranges.append(f"{name} {wanted}")
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first = int(start)
            content_end = int(end) + 1 if end else len(content)
        else:
            content_end = len(content)
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", sha)
        self.send_header("Accept-Ranges", "bytes")
        part = content[first:content_end]
        self.send_header("Content-Length", str(len(part)))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{content_end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        limit = self.hub.cut.get(name, [0, 0])
        if limit[1] > 0:
            limit[1] -= 1
            self.wfile.write(part[: limit[0]])
            self.close_connection = True
            self.connection.close()
            return None
        if name in self.hub.stalled:
            self.wfile.write(part[: len(part) // 2])
            self.hub.has_stalled.set()
            time.sleep(60)
            return None
        self.wfile.write(part)
        return None

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
        key = f"{asked.get('type') or 'model'}s/{name}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid username or password."})
        if name.startswith("other/"):
            return self._send(403, {"error": "You don't have the rights to create a model under this namespace"})
        if key in self.hub.repositories:
            return self._send(409, {"error": "exists", "url": f"{self.hub.url}/{name}"})
        visibility = asked.get("visibility")
        private = asked.get("private") or visibility == "private"
        self.hub.repositories[key] = Repository(private=bool(private))
        self.hub.repositories[key].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return self._send(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for entry in asked["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/upload/{entry['oid']}", "header": {}}}
            objects.append({"oid": entry["oid"], "size": entry["size"], "actions": upload})
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, body: bytes) -> None:
        sha = repository.resolve("main")
        files = dict(repository.commits[sha]) if sha else {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files)
        self._send(200, {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status >= 400:
            self.send_header("X-Error-Message", str(content.get("error", "")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _upload(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _entries(files: Files, folder: str, recursive: bool, exact: bool = False) -> list[dict[str, Any]]:
    """Return the files and folders in a folder in the format of /tree and /paths-info."""
    found: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        if exact and path == folder:
            return [_file(path, content)]
        if folder and not path.startswith(f"{folder}/"):
            continue
        inside = path.removeprefix(f"{folder}/") if folder else path
        first, _, rest = inside.partition("/")
        directory = f"{folder}/{first}" if folder else first
        if exact:
            return [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}]
        if rest:
            found.setdefault(directory, {"type": "directory", "path": directory, "oid": "0" * 40, "size": 0})
        if recursive or not rest:
            found[path] = _file(path, content)
    return list(found.values())


def _file(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
