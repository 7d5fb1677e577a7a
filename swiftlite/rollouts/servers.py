"""Generate completions with servers of `swiftlite deploy --live_weights`, which may run on other machines.

`RolloutServers` is an `Engine` for several servers. It receives new weights and sends them to every server, and
distributes the prompts of a generation. A server that fails is left out: its unfinished prompts are given to the other
servers, and it is used again once it was restarted. A restarted server receives weights before it gets a prompt.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import aiohttp
import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.binding import compare_shapes
from swiftlite.bridge.rows import Shape, shapes_of
from swiftlite.bridge.tensors import some
from swiftlite.engines.engine import Completion, OnAnswer, Sampling, check_prompts
from swiftlite.engines.loading.weight_update import Bucket
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.live.weight_transport import own_gpu
from swiftlite.engines.vllm.served import LostServer, ServedVllm, cancel_all, is_responding
from swiftlite.families.resolved import HfModel

SECONDS_BETWEEN_CHECKS = 15
"""Seconds between two checks of a server during a generation. vLLM takes longer to restart, so every restart is found:
after it, a server has other weights. Completions have no time limit."""
START_HINT = "start the servers (swiftlite deploy --live_weights), or correct the addresses"


@dataclass(frozen=True)
class Requirements:
    """The options that a server must have.

    Attributes:
        model: the model whose weights are sent.
        max_length: maximum length of prompt and completion in tokens.
        drafts: whether the heads of the model draft.
        num_speculative_tokens: number of tokens drafted per step; None: any number.
    """

    model: HfModel
    max_length: int
    drafts: bool
    num_speculative_tokens: int | None = None

    def check(self, served: ServedVllm) -> None:
        """Check the options of a server.

        Raises:
            UserError: an option differs.
        """
        mode = served.config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise UserError(
                f"it reports {mode}, which are not those of the sampled distribution",
                "start it with swiftlite deploy --live_weights, without logprobs_mode in --vllm_engine_kwargs",
            )
        if served.max_length < self.max_length:
            raise UserError(
                f"prompt and completion can have {served.max_length} tokens, but --max_length is {self.max_length}",
                f"start it with --max_model_len {self.max_length}, or use --max_length {served.max_length}",
            )
        self._check_drafts(served)
        self._check_shapes(Path(served.config["model_config"]["model"]))

    def _check_drafts(self, served: ServedVllm) -> None:
        method = (served.config["speculative_config"] or {}).get("method")
        if self.drafts and method != "mtp":
            raise UserError("it does not draft with the model's heads", "start it with --speculative mtp")
        if not self.drafts and method == "mtp":
            raise UserError(
                "it drafts with heads that would keep their weights",
                "start it with --speculative none, or train a model with heads and without --speculative none",
            )
        number = self.num_speculative_tokens
        if self.drafts and number not in (None, served.num_speculative_tokens):
            raise UserError(
                f"it drafts {served.num_speculative_tokens} tokens per step, but --num_speculative_tokens is {number}",
                f"start it with --num_speculative_tokens {number}, or remove the option here",
            )

    def _check_shapes(self, directory: Path) -> None:
        """Compare the models if this machine has the directory of the server's model. If not, the first transfer of
        weights reports the tensors that differ."""
        if not directory.is_dir():
            return
        served = resolve_served(directory)
        problems = compare_shapes(_shapes(served, self.drafts), _shapes(self.model, self.drafts))
        if problems:
            raise UserError(
                f"it serves another model, {directory}:\n  " + "\n  ".join(some(problems)),
                f"start it with --model {self.model.name}",
            )


def _shapes(model: HfModel, with_heads: bool) -> dict[str, Shape]:
    shapes = shapes_of(model.family.trunk_rows(model.config))
    if with_heads:
        for head in range(model.heads.layers):
            shapes |= shapes_of(model.family.head_rows(model.config, head))
    return shapes


@dataclass
class _Server:
    """One of the servers.

    Attributes:
        served: its client; None while the server is not used.
        problem: why it is not used.
        counts: its draft counts when they were last read.
    """

    url: str
    served: ServedVllm | None = None
    problem: UserError | None = None
    counts: DraftCounts | None = None


class RolloutServers:
    """The `Engine` that generates with several servers; `close` leaves them running.

    Args:
        urls: addresses of the servers, such as http://127.0.0.1:8000. Their key is VLLM_API_KEY of this process.
        requirements: what every server must have.
        max_in_flight: maximum number of unfinished prompts of a server.
        timeout: maximum seconds of a request to a server, except for completions, which have no limit.

    Attributes:
        num_speculative_tokens: number of tokens that each server drafts per step.
        bucket_device: device of the tensors in a bucket of new weights.

    Raises:
        UserError: a server has other options than required, or no server responds.
    """

    def __init__(self, urls: Sequence[str], requirements: Requirements, max_in_flight: int, timeout: float):
        self._requirements, self._max_in_flight, self._timeout = requirements, max_in_flight, timeout
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._first: ServedVllm | None = None
        self._num_repeated = 0
        # Sends weights to all servers at the same time. torch's current GPU is a setting of each thread.
        self._threads = ThreadPoolExecutor(len(urls), initializer=_use_gpu, initargs=(own_gpu(),))
        self._refresh()
        # At the start, a server with other options is an error of the user. Later, such a server is only left out.
        for server in self._servers:
            if server.problem is not None and not isinstance(server.problem, LostServer):
                raise UserError(f"--rollout_server {server.url}: {server.problem.problem}", server.problem.hint)
        if self._first is None:
            raise self._none_left(START_HINT)
        self.num_speculative_tokens: int = self._first.num_speculative_tokens
        self.bucket_device: torch.device = self._first.bucket_device
        self._counts = DraftCounts(0, 0, (0,) * self.num_speculative_tokens)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies.

        Each prompt is given to the server with the fewest unfinished prompts. The prompts of a server that fails are
        given to the other servers, with the same seeds.

        Raises:
            UserError: no server is left, a prompt leaves no room for an answer, or a server rejects a request.
        """
        check_prompts(prompts, self._requirements.max_length)

        def lose(server: _Server, error: LostServer, number: int) -> None:
            self._num_repeated += number
            self._lose(server, error, f"its {number} unfinished prompts are given to other servers")

        async def generate() -> list[Completion] | None:
            async with AsyncExitStack() as stack:
                loads = []
                for server in self._servers:
                    if server.served is not None:
                        # A session belongs to the event loop of this call.
                        session = await stack.enter_async_context(server.served.new_session())
                        loads.append(_Load(server, server.served, session))
                return await _Dispatch(prompts, sampling, on_answer, loads, self._max_in_flight, lose).run()

        completions = asyncio.run(generate())
        if completions is None:
            raise self._none_left("restart them, and run the same command with --resume")
        return completions

    def update_weights(self, target: Iterable[Bucket] | None = None, draft: Iterable[Bucket] | None = None) -> None:
        """Connect again to lost and restarted servers, and send all HF tensors of trunk and heads to every server.

        A server that fails is not used until it is restarted. If no server is left, `generate` raises the error: the
        other ranks of a trainer take part in reading the buckets to the end.
        """
        self._num_repeated = 0
        self._refresh()
        # After `_refresh`: a restarted server takes part in the update, and then gets prompts again.
        parts = (target, draft)
        feeds = [_Feed(server) for server in self._servers if server.served is not None]
        sent = [self._threads.submit(feed.send, *(part is not None for part in parts)) for feed in feeds]
        try:
            for part in parts:
                for bucket in part or ():
                    # Gathering a bucket is collective, so each is gathered once, for all servers.
                    for feed in feeds:
                        feed.give(bucket)
                if part is not None:
                    for feed in feeds:
                        feed.give(None)
        # The threads wait for the next bucket, and their servers are paused in the middle of an update.
        except BaseException as error:
            for feed in feeds:
                feed.give(error)
            raise
        for feed, each in zip(feeds, sent, strict=True):
            try:
                each.result()
            except (UserError, RuntimeError) as error:  # NCCL raises RuntimeErrors
                problem = error if isinstance(error, UserError) else UserError(f"sending weights failed: {error}")
                self._lose(feed.server, problem)

    def draft_counts(self) -> DraftCounts:
        """Return the draft counts of all servers since this object was made, including requests of other clients.

        For a server that was lost, drafts after the last call are not counted.
        """
        for server in self._servers:
            if server.served is None:
                continue
            try:
                counts = server.served.draft_counts()
            except UserError as error:  # the completions are complete, whatever this server answers now
                self._lose(server, error)
                continue
            assert server.counts is not None
            # A counter that falls belongs to a new process, whose counts cannot be subtracted.
            if counts.drafts < server.counts.drafts:
                self._lose(server, LostServer(f"the server at {server.url} was restarted"))
                continue
            self._counts += counts.since(server.counts)
            server.counts = counts
        return self._counts

    def figures(self) -> dict[str, float]:
        """Return metrics: the number of servers, and of prompts that were given to another server since weights were
        sent."""
        number = sum(server.served is not None for server in self._servers)
        return {"rollout/servers": float(number), "rollout/repeated_requests": float(self._num_repeated)}

    def close(self) -> None:
        """Disconnect from the servers, which keep running."""
        for server in self._servers:
            if server.served is not None:
                server.served.close()
        self._threads.shutdown()

    def _refresh(self) -> None:
        """Connect to servers that are not used or that were restarted."""
        for server, outcome in zip(self._servers, self._threads.map(self._open, self._servers), strict=True):
            if outcome is server.served:
                continue
            try:
                if isinstance(outcome, UserError):
                    raise outcome
                self._join(server, outcome)
            except UserError as error:
                self._lose(server, error)

    def _open(self, server: _Server) -> ServedVllm | UserError:
        """Return the client of a server, a new one if it is not used or was restarted, or why it cannot be used."""
        try:
            if server.served is not None and server.served.is_running():
                return server.served
            if server.problem and not is_responding(server.url):
                return server.problem  # a hanging server would otherwise delay each generation by a minute
            served = ServedVllm(server.url, timeout=self._timeout, model=self._requirements.model)
            self._requirements.check(served)
            return served
        except UserError as error:
            return error

    def _join(self, server: _Server, served: ServedVllm) -> None:
        """Use a server from now on.

        Raises:
            UserError: its options differ from those of the first server, or it cannot be connected.
        """
        # Draft counts are added position by position, and all servers get the same buckets.
        first = self._first or served
        for option in ("num_speculative_tokens", "weight_transport"):
            value, expected = getattr(served, option), getattr(first, option)
            if value != expected:
                raise UserError(
                    f"it was started with {option} {value}, and {first.url} with {expected}",
                    f"start all servers with the same --{option}",
                )
        served.connect()
        server.counts = served.draft_counts()
        if server.served is not None or server.problem is not None:
            logger.info("rollout server %s is used again", server.url)
        server.served, server.problem = served, None
        self._first = first

    def _lose(self, server: _Server, error: UserError, consequence: str = "") -> None:
        """Leave a server out, and log why unless it was logged before."""
        if server.problem is None or server.problem.problem != error.problem:
            words = [f"rollout server {server.url} is left out: {error.problem}", consequence, error.hint]
            logger.warning("%s", "\n    ".join(filter(None, words)))
        if server.served is not None:
            server.served.close()
        server.served, server.problem = None, error

    def _none_left(self, hint: str) -> UserError:
        reasons = [f"  {server.url}: {server.problem.problem}" for server in self._servers if server.problem]
        return UserError("none of the servers of --rollout_server can be used:\n" + "\n".join(reasons), hint)


def check_responding(urls: Sequence[str]) -> None:
    """Check that one of the servers responds, before a model is read.

    Raises:
        UserError: no server responds.
    """
    if not any(map(is_responding, urls)):
        raise UserError(f"--rollout_server: no server responds at {' or '.join(urls)}", START_HINT)


def _use_gpu(gpu: torch.device | None) -> None:
    if gpu is not None:
        torch.cuda.set_device(gpu)


@dataclass(eq=False)
class _Load:
    """A server during one generation.

    Attributes:
        places: indices of its unfinished prompts, by task.
        check: task that ends when the server fails.
    """

    server: _Server
    served: ServedVllm
    session: aiohttp.ClientSession
    places: dict[asyncio.Task, int] = field(default_factory=dict)
    check: asyncio.Task | None = None

    async def watch(self) -> None:
        """Check the server until it fails.

        Raises:
            LostServer: the server has failed.
        """
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
            await self.served.check(self.session)

    def cancel(self) -> None:
        """End all tasks."""
        cancel_all(filter(None, (self.check, *self.places)))


@dataclass
class _Dispatch:
    """The distribution of the prompts of one generation to servers.

    Attributes:
        loads: the servers; a server that fails is removed.
        max_in_flight: maximum number of unfinished prompts of a server.
        lose: called with a server that fails, the error, and the number of its unfinished prompts.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    on_answer: OnAnswer | None
    loads: list[_Load]
    max_in_flight: int
    lose: Callable[[_Server, LostServer, int], None]

    def __post_init__(self) -> None:
        self._waiting = deque(range(len(self.prompts)))
        self._completions: dict[int, Completion] = {}

    async def run(self) -> list[Completion] | None:
        """Return the completions in the order of the prompts; None if no server is left.

        Raises:
            UserError: a server rejects a request.
        """
        checks = [load.served.check(load.session) for load in self.loads]
        # A server restarted since it got weights has those of its files. `watch` finds later restarts.
        for load, error in zip(list(self.loads), await asyncio.gather(*checks, return_exceptions=True), strict=True):
            if isinstance(error, BaseException):
                self._remove(load, error)
        for load in self.loads:
            load.check = asyncio.create_task(load.watch())
        try:
            while len(self._completions) < len(self.prompts):
                self._give()
                if not self.loads:
                    return None
                await self._next()
        finally:
            for load in self.loads:
                load.cancel()
        return [self._completions[place] for place in range(len(self.prompts))]

    def _give(self) -> None:
        """Give waiting prompts to the servers with the fewest unfinished prompts."""
        while self._waiting and self.loads:
            # Completions differ in length and servers in speed, so prompts are not divided in advance.
            load = min(self.loads, key=lambda load: len(load.places))
            if len(load.places) >= self.max_in_flight:
                return
            place = self._waiting.popleft()
            answer = load.served.complete(
                load.session, self.prompts[place], self.sampling, self.sampling.seed_of(place)
            )
            load.places[asyncio.create_task(answer)] = place

    async def _next(self) -> None:
        """Wait until a prompt is finished or a server fails."""
        tasks: dict[asyncio.Task, _Load] = {}
        for load in self.loads:
            assert load.check is not None
            tasks |= dict.fromkeys((load.check, *load.places), load)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # Finished prompts before failures: a server can end in the same moment as its last completion arrives.
        for task in done:
            if task.exception() is None:
                place = tasks[task].places.pop(task)
                self._completions[place] = task.result()
                if self.on_answer:
                    self.on_answer(place, task.result())
        for task in done:
            error = task.exception()
            # Several tasks of a server can fail at the same time; it is removed once.
            if error is not None and tasks[task] in self.loads:
                self._remove(tasks[task], error)

    def _remove(self, load: _Load, error: BaseException) -> None:
        if not isinstance(error, LostServer):
            raise error
        self.loads.remove(load)
        # In front and in order, because these prompts have waited longest: [5, 2] before [7, 8] becomes [2, 5, 7, 8].
        self._waiting.extendleft(sorted(load.places.values(), reverse=True))
        self.lose(load.server, error, len(load.places))
        load.cancel()


class _Feed:
    """Passes buckets, which the main thread reads, to a thread that sends them to one server.

    Reading is collective, so that it has to continue if this server fails. A bucket is passed when the server has
    received the one before.
    """

    def __init__(self, server: _Server):
        self.server = server
        self._given: SimpleQueue[Bucket | BaseException | None] = SimpleQueue()
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._is_sending = True

    def give(self, item: Bucket | BaseException | None) -> None:
        """Pass a bucket, an error, or None at the end of a part, as soon as the thread asks for it. If the thread has
        ended, do nothing."""
        # Waits until the server has received the last bucket, so that one bucket is in memory and not a whole model.
        self._is_sending = self._is_sending and self._asks.get()
        if self._is_sending:
            self._given.put(item)

    def send(self, has_target: bool, has_draft: bool) -> None:
        """Send the buckets that are passed. This is the work of the thread.

        Raises:
            UserError: the server fails, or rejects the weights.
        """
        assert self.server.served is not None
        try:
            target = self._buckets() if has_target else None
            draft = self._buckets() if has_draft else None
            self.server.served.update_weights(target, draft)
        finally:
            # Also if the server fails: the main thread would otherwise wait for this thread forever.
            self._asks.put(False)

    def _buckets(self) -> Iterator[Bucket]:
        while True:
            self._asks.put(True)
            item = self._given.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
