"""Hide paths in the list of models of vLLM's server.

vLLM states the directory of each model and adapter as its `root` in /v1/models. vLLM's server imports the class
`ModelCards` by its name, see `server.py`.
"""

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLASS = "swiftlite.engines.vllm.model_cards.ModelCards"
PATH = "/v1/models"


class ModelCards:
    """Middleware that states the name of each model as its root."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(PATH):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive, keep)
        start, *parts = messages
        if start["status"] == 200:
            body = without_paths(b"".join(part.get("body", b"") for part in parts))
            # The new body has another length than the one that was announced.
            others = [header for header in start["headers"] if header[0].lower() != b"content-length"]
            start["headers"] = [*others, (b"content-length", str(len(body)).encode())]
            parts = [{"type": "http.response.body", "body": body}]
        for message in (start, *parts):
            await send(message)


def without_paths(body: bytes) -> bytes:
    """Return the JSON text of a list of models in which each root is the name of the model."""
    listed = json.loads(body)
    for card in listed["data"]:
        card["root"] = card["id"]
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()
