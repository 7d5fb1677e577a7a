"""Send requests to a server on this machine."""

import json
import urllib.error
import urllib.request
from typing import Any

from swiftlite.base.errors import UserError

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores http_proxy for this machine


def post(url: str, path: str, content: dict[str, Any] | None = None) -> str:
    """Return the answer to a request; without content, it is a GET request.

    Raises:
        UserError: the server rejects the request.
        OSError: the server does not answer.
    """
    data = None
    if content is not None:
        data = json.dumps(content).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with _opener.open(request) as response:
            return response.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        raise UserError(f"llama.cpp rejected a request: {error.read().decode(errors='replace')[:500]}") from None
