"""Check several keys in vLLM's server.

vLLM reads one key from the environment, and several keys only from its command line, which all users of a machine can
see. vLLM's server imports the class `ApiKeys` by its name, see `server.py`.
"""

import json
import os

from starlette.types import ASGIApp
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from swiftlite.engines.vllm.options import API_KEYS


class ApiKeys(AuthenticationMiddleware):
    """Middleware that allows requests with one of the keys, on the routes on which vLLM checks keys."""

    def __init__(self, app: ASGIApp):
        super().__init__(app, tokens=json.loads(os.environ[API_KEYS]))
