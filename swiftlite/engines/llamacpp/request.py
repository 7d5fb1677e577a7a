"""Send requests to a server on this machine."""

import json
import urllib.error
import urllib.request
from typing import Any

from swiftlite.base.direct import DIRECT
from swiftlite.base.errors import UserError


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
        with DIRECT.open(request) as response:
            return response.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        raise UserError(f"llama.cpp rejected a request: {error.read().decode(errors='replace')[:500]}") from None
