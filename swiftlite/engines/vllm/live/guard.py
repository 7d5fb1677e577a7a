"""Require the key of vLLM's server on every route of a server with live weights.

vLLM checks the key on routes such as /v1, but not on the routes that pause the server or replace its weights. vLLM's
server imports the class `ApiKeyGuard` by its name, see `server.py`.
"""

from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

OPEN = ("/health", "/ping", "/version", "/metrics")
"""Routes for monitoring, which require no key."""


class ApiKeyGuard(AuthenticationMiddleware):
    """Middleware that checks the key of each request. If the server has no key, all requests are allowed."""

    def __init__(self, app: ASGIApp):
        super().__init__(app, tokens=list(filter(None, [envs.VLLM_API_KEY])))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Browsers send OPTIONS without keys before requests to another origin.
        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        is_guarded = is_request and scope["path"] not in OPEN and bool(self.api_tokens)
        if is_guarded and not self.verify_token(Headers(scope=scope)):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)
