"""A local server with the protocol of S3, and the environment with which clients find it."""

import itertools
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from swiftlite.store.objects import ObjectStore

_NUMBERS = itertools.count()  # of all servers, because moto keeps its objects when a server ends


@dataclass
class S3:
    """A running server with one bucket."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def new_url(self) -> str:
        """Return a URL that no test uses."""
        return f"s3://bucket/run-{next(_NUMBERS)}"


@contextmanager
def s3_server() -> Iterator[S3]:
    """Run a server until the context ends."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = S3(f"http://{host}:{port}")
        request = urllib.request.Request(f"{found.endpoint}/bucket", method="PUT")
        urllib.request.urlopen(request).close()
        yield found
    finally:
        server.stop()


def content_of(url: str) -> dict[str, bytes]:
    """Return the objects below a URL."""
    objects = ObjectStore.open(url)
    return {name: objects.read(name) for name in objects.list()}
