"""Draw conversations of several answers: `--tools` and `--rollout_func`. This is the work of the first rank.

The user's code runs in a child process (`episodes.py`), which asks for answers. As soon as every unfinished episode
waits for one, the engine generates them as one batch. The random numbers of an answer depend on the number of the
completion and of the turn, not on the order in which episodes ask.
"""

import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError, clip
from swiftlite.base.log import logger
from swiftlite.data.rows.conversation import Message, RowError
from swiftlite.data.rows.prompt import TURNS
from swiftlite.data.sample import Sample
from swiftlite.engines.engine import Completion, Engine, Sampling
from swiftlite.rewards.child import ASYNC_PATIENCE, late
from swiftlite.rewards.load import RewardInfo
from swiftlite.rewards.process import (
    FAILURES_TO_END,
    PATIENCE,
    Child,
    Failure,
    UserProcess,
    check_columns,
    indented,
)
from swiftlite.rollouts.episodes import BLOCKED, OWN
from swiftlite.rollouts.turns import Turns


@dataclass(frozen=True)
class Drawn:
    """Answers that an engine drew for one generation.

    Attributes:
        counts: drafts of all answers.
        seconds: time in which the engine generated.
        is_generated: for each completion, as in `Generation`; empty if all tokens are generated.
        figures: further metrics.
    """

    completions: Sequence[Completion]
    counts: DraftCounts
    seconds: float
    is_generated: Sequence[Sequence[bool]] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


class _Ended(Exception):
    """The child process has ended, or has been ended because it does not answer."""

    def __init__(self, failure: Failure):
        self.failure = failure


class EpisodeProcess(UserProcess):
    """The tools or the rollout function in a child process.

    Args:
        rollout_func: name of the function in `plugins`; None with tools.
        tools: the file of the tools; None with a rollout function.
        seconds: time limit of a call of a tool, and of a rollout function between two answers.

    Attributes:
        schemas: JSON schemas of the tools, known when the context is entered.
    """

    def __init__(self, rollout_func: str | None, tools: str | None, plugins: Sequence[str], seconds: float):
        super().__init__("swiftlite.rollouts.episodes", [tools] if tools else plugins)
        self.rollout_func = rollout_func
        self.tools = tools
        self.seconds = seconds
        self.schemas: list[dict[str, Any]] = []
        self._info: RewardInfo | None = None

    @property
    def given(self) -> str:
        """The option that selects the user's code, with its value."""
        return f"--tools {self.tools}" if self.tools else f"--rollout_func {self.rollout_func}"

    @property
    def identity(self) -> str:
        """A digest of the user's files, on which completions depend."""
        return hashlib.sha256(b"".join(hashlib.sha256(source).digest() for source in self._sources)).hexdigest()

    def check_columns(self, columns: Collection[str], flag: str, omitted: Mapping[str, str]) -> None:
        """Check that a dataset has the columns that the rollout function names, as `RewardProcess` does."""
        if self._info is not None:
            check_columns(self.given, self._info, OWN, columns, flag, omitted)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the child.

        Raises:
            _Ended: the child has ended.
        """
        try:
            self._open().send(json.dumps(message).encode())
        except OSError as error:
            raise self._end_after(error) from None

    def receive(self) -> dict[str, Any]:
        """Wait for a message of the child, which sends one regularly.

        Raises:
            _Ended: the child has ended, or did not send a message in time.
        """
        try:
            # A child with a blocked loop ends itself after BLOCKED times the limit, unless it is stuck completely.
            return self._open().receive(BLOCKED * self.seconds + ASYNC_PATIENCE + PATIENCE)
        except (OSError, ValueError) as error:
            raise self._end_after(error) from None

    def _load(self, child: Child, sources: list[str]) -> None:
        request = {"rollout_func": self.rollout_func, "tools": self.tools, "paths": self.paths}
        answer = child.load(request | {"sources": sources, "timeout": self.seconds}, self.given)
        self.schemas = answer["schemas"]
        self._info = RewardInfo(**answer["info"]) if "info" in answer else None

    def _end_after(self, error: Exception) -> _Ended:
        """Kill the child, and return why it ended."""
        return _Ended(self._end_child(error, late(self.seconds) + " (--tool_timeout)"))


@dataclass
class Episode:
    """The tokens of a conversation.

    Attributes:
        number: number of the completion in the run.
        messages: the prompt's messages, answers, and messages between them.
        ids: tokens after the prompt; the three other lists have one entry for each of them.
        limit: maximum number of tokens of the next answer.
    """

    prompt: list[int]
    number: int
    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    is_generated: list[bool] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    is_truncated: bool = False
    num_answers: int = 0
    limit: int = 0
    failure: Failure | None = None

    def add(self, completion: Completion, depth: int) -> list[int]:
        """Add the tokens of an answer, up to the limit, and return them.

        Args:
            depth: `Generation.draft_depths` of tokens whose depth the engine does not report.
        """
        # The engine got the largest limit of all episodes of the batch.
        ids = completion.token_ids[: self.limit]
        log_p, depths = completion.log_p, completion.draft_depths
        self.ids += ids
        self.is_generated += [True] * len(ids)
        self.log_p += log_p[: len(ids)] if log_p else [float("nan")] * len(ids)
        self.draft_depths += depths[: len(ids)] if depths else [depth] * len(ids)
        self.num_answers += 1
        return ids

    def add_given(self, ids: Sequence[int], depth: int) -> None:
        """Add tokens that the model did not generate."""
        self.ids += ids
        self.is_generated += [False] * len(ids)
        self.log_p += [float("nan")] * len(ids)
        self.draft_depths += [depth] * len(ids)

    def completion(self) -> Completion:
        """Return the whole conversation after the prompt."""
        reason = "length" if self.is_truncated else "stop"
        return Completion(self.ids, reason, self.log_p, self.draft_depths)

    def new_messages(self, messages: Any) -> list[Message]:
        """Return the messages that follow the conversation so far.

        Raises:
            RowError: it is not continued by them.
        """
        if not isinstance(messages, list):
            raise RowError("messages", f"are of type {type(messages).__name__}, not a list")
        for index, known in enumerate(self.messages):
            if index >= len(messages) or messages[index] != known:
                problem = f"do not continue the conversation: message {index} is not the {known['role']} message"
                raise RowError("messages", f"{problem} that was passed or generated before")
        return messages[len(self.messages) :]


class Conversations:
    """Draws generations with the user's tools or rollout function.

    Args:
        process: the user's code.
        turns: continues conversations.
        max_turns: maximum number of answers of a conversation.
    """

    def __init__(self, process: EpisodeProcess, turns: Turns, max_turns: int):
        self.process = process
        self._turns = turns
        self._max_turns = max_turns
        self._num_failed = 0

    def draw(
        self,
        engine: Engine,
        sampling: Sampling,
        prompts: Sequence[Sample],
        columns: Mapping[str, Sequence[Any]],
        first_number: int,
    ) -> Drawn:
        """Return one conversation for each prompt.

        Args:
            sampling: its maximum length is that of all tokens after the prompt.
            columns: other columns of the rows, each with one value per prompt.
            first_number: number of the first completion in the run.

        Raises:
            UserError: the engine fails, or all conversations failed three times in a row.
        """
        episodes = []
        for number, prompt in enumerate(prompts, start=first_number):
            episodes.append(Episode(prompt.input_ids.tolist(), number, json.loads(prompt.extras[TURNS])))
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(prompts))]
        generating = _Generating(engine, sampling, self._turns)
        counts = self._run(episodes, rows, generating)
        figures = generating.figures()
        unanswered = [episode for episode in episodes if not episode.ids]
        for episode in unanswered:  # a completion has at least one token
            episode.failure = episode.failure or Failure("did not call generate")
            episode.limit = sampling.max_new_tokens
        generating.answer(unanswered)
        figures |= self._figures(episodes, counts)
        self._check_failures(episodes)
        # A conversation that failed stays in the generation, so that groups have equal sizes, but nothing of it is
        # trained on.
        masks = [[bool(each) and not episode.failure for each in episode.is_generated] for episode in episodes]
        completions = [episode.completion() for episode in episodes]
        return Drawn(completions, generating.counts, generating.seconds, masks, figures)

    def _run(
        self, episodes: Sequence[Episode], rows: Sequence[Mapping[str, Any]], generating: "_Generating"
    ) -> Mapping[str, int]:
        """Run all episodes until they have ended or failed, and return the counts of tool calls."""
        running = dict(enumerate(episodes))
        process = self.process
        given = [{**row, "messages": each.messages} for row, each in zip(rows, episodes, strict=True)]
        try:
            process.send({"episodes": given})
            while requests := self._requests(running):
                ready = [number for number in requests if self._continue(running[number], requests[number], generating)]
                messages = generating.answer([running[number] for number in ready])
                # A conversation that reached its maximum length ends with its answer, which the function does not see.
                answers = [pair for pair in zip(ready, messages, strict=True) if not running[pair[0]].is_truncated]
                ended = sorted(requests.keys() - dict(answers).keys())
                process.send({"answers": answers, "ended": ended})
                for number in ended:
                    del running[number]
            process.send({"finish": True})
            while "calls" not in (counts := process.receive()):
                pass  # the last report of an episode that was computing
            return counts
        except _Ended as end:
            for episode in running.values():
                episode.failure = end.failure
            return {"calls": 0, "failures": 0}

    def _requests(self, running: dict[int, Episode]) -> dict[int, Mapping[str, Any]]:
        """Wait until each running episode has asked for an answer or has ended, and return what they ask for, in the
        order of the episodes.

        Args:
            running: the running episodes by number; those that end are removed.
        """
        requests: dict[int, Mapping[str, Any]] = {}
        while len(requests) < len(running):
            message = self.process.receive()
            if "messages" in message:
                requests[message["episode"]] = message
            elif "episode" in message:
                requests.pop(message["episode"], None)  # of a call that the function has cancelled
                _end(running.pop(message["episode"]), message)
        # Episodes ask in any order; a batch in the order of the prompts gives the engine the same work each time.
        return dict(sorted(requests.items()))

    def _continue(self, episode: Episode, request: Mapping[str, Any], generating: "_Generating") -> bool:
        """Add the new messages of an episode, and return whether it gets an answer.

        It gets none if its function asked for something that is not possible, or if a limit is reached. A message of a
        tool that does not fit is not added, as in TRL.
        """
        sampling, max_tokens = generating.sampling, request["max_tokens"]
        try:
            new = episode.new_messages(request["messages"])
            # The first call has only the prompt's messages; a later one adds a message that the answer replies to.
            if bool(new) != bool(episode.ids):
                expected = "messages after the last answer" if episode.ids else "the messages of the prompt"
                raise RowError("messages", f"of a call of generate must be {expected}")
            if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
                raise RowError("max_tokens", f"is {max_tokens!r}, not a number of tokens")
            if episode.num_answers == self._max_turns:
                return False
            if new:
                ids = self._turns.after(episode.ids[-1], _checked(new))
                if len(episode.ids) + len(ids) >= sampling.max_new_tokens:
                    episode.is_truncated = True
                    return False
                episode.add_given(ids, generating.depth)
                episode.messages += new
        except RowError as error:
            episode.failure = Failure(f"asked for an answer: {error.problem}")
            return False
        left = sampling.max_new_tokens - len(episode.ids)
        episode.limit = left if max_tokens is None else min(left, max_tokens)
        return True

    def _figures(self, episodes: Sequence[Episode], counts: Mapping[str, int]) -> dict[str, float]:
        """Return the metrics of conversations; those of tools have TRL's names."""
        figures = {
            "rollout/turns": sum(episode.num_answers for episode in episodes) / len(episodes),
            "rollout/failures": float(sum(episode.failure is not None for episode in episodes)),
        }
        if self.process.tools:
            figures["tools/call_frequency"] = counts["calls"] / len(episodes)
            figures["tools/failure_frequency"] = counts["failures"] / max(counts["calls"], 1)
        return figures

    def _check_failures(self, episodes: Sequence[Episode]) -> None:
        """Log why episodes failed.

        Raises:
            UserError: all of them failed, for the third time in a row.
        """
        failures = [episode.failure for episode in episodes if episode.failure]
        for reason, number in Counter(failure.reason for failure in failures).most_common():
            logger.warning("%s: %d of %d conversations failed: %s", self.process.given, number, len(episodes), reason)
        # Single failures come from the model's answers, and all at once most likely from the user's code.
        self._num_failed = self._num_failed + 1 if len(failures) == len(episodes) else 0
        if self._num_failed == FAILURES_TO_END:
            last = failures[-1]
            problem = f"{self.process.given}: all conversations failed in {FAILURES_TO_END} generations in a row. The "
            problem += f"last one {last.reason}{indented(last.traceback)}"
            raise UserError(problem, f"fix {self.process.paths[0]}, and run the same command with --resume")


class _Generating:
    """Generates answers, and measures the engine.

    Attributes:
        seconds: time in which the engine generated.
    """

    def __init__(self, engine: Engine, sampling: Sampling, turns: Turns):
        self.engine = engine
        self.sampling = sampling
        self.seconds = 0.0
        self._turns = turns
        self._counts = [engine.draft_counts()]

    @property
    def depth(self) -> int:
        """`Generation.draft_depths` of tokens whose depth the engine does not report."""
        return -1 if self.engine.num_speculative_tokens else 0

    def answer(self, episodes: Sequence[Episode]) -> list[Message]:
        """Add an answer to each episode, and return the answers as messages."""
        if not episodes:
            return []
        prompts = [[*episode.prompt, *episode.ids] for episode in episodes]
        numbers = tuple(number_of(episode.number, episode.num_answers) for episode in episodes)
        # One limit for the batch; `Episode.add` removes what exceeds that of an episode.
        longest = max(episode.limit for episode in episodes)
        start = time.perf_counter()
        sampling = replace(self.sampling, max_new_tokens=longest, numbers=numbers)
        completions = self.engine.generate(prompts, sampling)
        self.seconds += time.perf_counter() - start
        self._counts.append(self.engine.draft_counts())
        messages = []
        for episode, prompt, completion in zip(episodes, prompts, completions, strict=True):
            ids = episode.add(completion, self.depth)
            is_cut = completion.finish_reason == "length" or len(ids) < len(completion.token_ids)
            # An engine also stops at its maximum length, before the limit. An answer with another limit can be followed
            # by messages.
            is_full = len(ids) < episode.limit or len(episode.ids) == self.sampling.max_new_tokens
            episode.is_truncated = is_cut and is_full
            messages.append(self._turns.message(ids, prompt))
            episode.messages.append(messages[-1])
        return messages

    @property
    def counts(self) -> DraftCounts:
        """Drafts of all answers."""
        return self._counts[-1].since(self._counts[0])

    def figures(self) -> dict[str, float]:
        """Return the acceptance in answers after the first one of their conversation."""
        if len(self._counts) < 3:
            return {}
        return acceptance_figures(self._counts[-1].since(self._counts[1]), "_after_tool")


def acceptance_figures(counts: DraftCounts, ending: str = "") -> dict[str, float]:
    """Return the share of drafting steps in which the token at a position was accepted, as engines count it.

    Args:
        ending: end of the names of the metrics.
    """
    shares = enumerate(counts.accepted_per_position, start=1)
    return {f"rollout/acceptance_{position}{ending}": number / max(counts.drafts, 1) for position, number in shares}


def number_of(number: int, turn: int) -> int:
    """Return the number from which the random numbers of an answer follow, for `Sampling.numbers`.

    Args:
        number: number of the completion in the run, which is that of its first answer.
        turn: number of answers before this one.
    """
    return zlib.crc32(f"{number}/{turn}".encode()) if turn else number


def _checked(messages: Sequence[Any]) -> Sequence[Message]:
    """Return messages between answers.

    Raises:
        RowError: one of them is not a message.
    """
    for message in messages:
        is_text = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_text or not isinstance(message.get("role"), str) or message["role"] == "assistant":
            problem = f"have {clip(json.dumps(message), 100)}, which is not a message with a role and a text"
            raise RowError("messages", problem)
    return messages


def _end(episode: Episode, message: Mapping[str, Any]) -> None:
    """Note how an episode has ended."""
    if "failure" in message:
        episode.failure = Failure(message["failure"], message["traceback"])
        return
    try:
        episode.new_messages(message["done"])
    except RowError as error:
        episode.failure = Failure(f"returned a conversation: {error.problem}")
