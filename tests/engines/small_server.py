"""A small real server for tests of clients."""

import asyncio
import json

from aiohttp import web

from swiftlite.bench.measure import connect
from swiftlite.engines.engine import Sampling

SAMPLING = Sampling(7, temperature=0.5, stop_token_ids=(2, 3))


def with_server(backend: str, path: str, respond, use):
    """What `use` makes of a client whose server answers POST requests to `path` by `respond`."""

    async def run():
        app = web.Application()
        app.router.add_post(path, respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with connect(backend, f"http://127.0.0.1:{runner.addresses[0][1]}", SAMPLING, 1) as client:
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def streamed(*events: dict):
    """A handler that streams these, in pieces that end where no event does."""
    asked = []

    async def respond(request):
        asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        for start in range(0, len(body), 7):
            await response.write(body[start : start + 7].encode())
        return response

    return respond, asked
