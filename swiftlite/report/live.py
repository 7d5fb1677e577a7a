"""Serve the pages of runs on this machine, also while the runs are in progress.

A page is made from the files of the runs when a browser requests it. An open page asks every few seconds whether a file
has changed (`templates/live.js`), and then shows the new page. Several runs have a page of their comparison, with links
to the page of each run.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.report.comparison import comparison_page
from swiftlite.report.page import Page, render
from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import run_page

ADDRESS = "127.0.0.1"
PORT = 6006
"""Default port, which is also TensorBoard's."""
SCRIPT = "/live.js"
LOCAL_NAMES = (ADDRESS, "localhost")
"""Host names of requests that are answered. Otherwise a website whose name resolves to 127.0.0.1 could read pages."""
INVALID_FILES = (AttributeError, KeyError, TypeError, ValueError)
"""Errors that modified files of a run cause."""


class LivePages:
    """The pages of runs, by the path in their address.

    Args:
        directories: directories of the runs.
    """

    def __init__(self, directories: Sequence[Path]):
        self._sources: dict[str, Sequence[Path]] = {"/": directories}
        if len(directories) > 1:
            for number, directory in enumerate(directories, 1):
                self._sources[f"/{number}"] = [directory]
        self._links = [(name_of(paths), path) for path, paths in self._sources.items()]
        self._rendered: dict[str, tuple[str, bytes]] = {}
        self._lock = Lock()

    def version(self, path: str) -> str | None:
        """Return a text that changes with the files of a page; None if there is no such page."""
        if path not in self._sources:
            return None
        states = [_state(directory) for directory in self._sources[path]]
        return hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()

    def html(self, path: str) -> bytes:
        """Return a page; it is made again only after a file has changed.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: a file of a run is invalid.
        """
        with self._lock:
            # The version is computed first: a file that changes while it is read makes the next request read it again.
            version = self.version(path) or ""
            known, html = self._rendered.get(path, ("", b""))
            if known != version:
                page = page_of(self._sources[path])
                if len(self._links) > 1:
                    page = replace(page, links=self._links)
                html = render(page, script=SCRIPT)
                self._rendered[path] = version, html
            return html


def page_of(directories: Sequence[Path]) -> Page:
    """Return the page of a run, or the comparison of several runs."""
    if len(directories) == 1:
        return run_page(read_run(directories[0]))
    return comparison_page(directories)


def name_of(directories: Sequence[Path]) -> str:
    """Return the text of a link to a page."""
    if len(directories) == 1:
        return directories[0].absolute().name
    return "Comparison"


def _state(directory: Path) -> list[tuple[str, int, int]]:
    """Return the path, time and size of each file that a page of a run can be made from."""
    found = []
    for path in sorted([*directory.glob("*.json*"), *directory.glob("rollouts/*"), *directory.glob("profile/*")]):
        try:
            status = path.stat()
        except FileNotFoundError:  # the run has just replaced or deleted it
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size))
    return found


def _handler(pages: LivePages) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests with these pages."""

    class Handler(BaseHTTPRequestHandler):
        """Answer GET requests."""

        def do_GET(self) -> None:
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in LOCAL_NAMES:
                return self._text(HTTPStatus.FORBIDDEN, f"open this page as http://{ADDRESS}")
            if self.path == SCRIPT:
                script = files("swiftlite.report").joinpath("templates/live.js").read_bytes()
                return self._answer(HTTPStatus.OK, "text/javascript", script)
            version = pages.version(self.path)
            if version is None:
                return self._text(HTTPStatus.NOT_FOUND, "there is no such page")
            if self.headers.get("If-None-Match") == version:
                return self._answer(HTTPStatus.NOT_MODIFIED, "text/html", b"", version)
            try:
                html = pages.html(self.path)
            except INVALID_FILES as error:
                return self._text(HTTPStatus.INTERNAL_SERVER_ERROR, f"invalid files: {type(error).__name__}: {error}")
            return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", html, version)

        def _text(self, status: HTTPStatus, text: str) -> None:
            self._answer(status, "text/plain; charset=utf-8", text.encode())

        def _answer(self, status: HTTPStatus, kind: str, content: bytes, version: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if version:
                self.send_header("ETag", version)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing: an open page sends a request every few seconds."""

    return Handler


class LiveServer(ThreadingHTTPServer):
    """A server that reports no browser that closes its connection."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, which ends no other request."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def server_of(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the pages of runs, which accepts connections on this machine only.

    Raises:
        UserError: the port is not available.
    """
    try:
        return LiveServer((ADDRESS, port), _handler(LivePages(directories)))
    except OSError as error:
        hint = "choose another one with --port"
        raise UserError(f"--port {port} is not available: {reason_of(error)}", hint) from None


def serve(directories: Sequence[Path], port: int) -> None:
    """Serve the pages of runs until Ctrl-C.

    Raises:
        UserError: the port is not available.
    """
    with server_of(directories, port) as server:
        logger.info("serving the pages at http://%s:%d; press Ctrl-C to stop", ADDRESS, port)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            logger.info("stopped")
