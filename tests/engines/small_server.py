"""Define a small real server for tests of clients."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from aiohttp import web

from swiftlite.engines.engine import Sampling
from swiftlite.serve.bench.measure import connect

SAMPLING = Sampling(7, temperature=0.5, stop_token_ids=(2, 3))


def with_server(backend: str, path: str, respond, use):
    """Return the result of `use` for a client whose server answers POST requests to `path` with `respond`."""

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


@contextmanager
def serving(respond) -> Iterator[str]:
    """Yield the address of a server in a separate thread, for a blocking client. `respond` answers every request."""
    started: Future[tuple[str, asyncio.AbstractEventLoop]] = Future()
    stop = asyncio.Event()

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set_result((f"http://127.0.0.1:{runner.addresses[0][1]}", asyncio.get_running_loop()))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    address, loop = started.result(timeout=60)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def streamed(*events: dict):
    """Return a handler that streams these events, in pieces that do not end where an event ends."""
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
