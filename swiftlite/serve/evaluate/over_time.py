"""Run `swiftlite evaluate --server`: measure the acceptance of a running server over time, from its own counters.

Each call sends one request to /metrics, and adds a line to acceptance_over_time.jsonl: the counters, which are totals
since the server started. Differences between consecutive readings are the acceptance over time.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from http.client import HTTPException
from operator import add
from pathlib import Path
from urllib.error import HTTPError

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import EvaluateArgs
from swiftlite.args.duration import seconds_of
from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.direct import DIRECT
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.engines.index import ENGINES, names_with
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.server.metrics import read_draft_counts
from swiftlite.report.table import text_table

FILE = "acceptance_over_time.jsonl"
_SECONDS_TO_ANSWER = 30
_START_TIME = re.compile(r"^process_start_time_seconds (\d+\.?\d*(?:e\+\d+)?)$", re.MULTILINE)


@dataclass(frozen=True)
class Reading:
    """The counters of a server at one time.

    Attributes:
        time: time of the reading.
        server: address of the server.
        started: time at which the server's process started; None if the server does not report it, as with several API
            server processes.
        counts: draft counts since the server started.
    """

    time: datetime
    server: str
    started: datetime | None
    counts: DraftCounts

    def to_line(self) -> str:
        """Return the reading as a line of acceptance_over_time.jsonl."""
        started = None
        if self.started:
            started = self.started.isoformat()
        content = {
            "time": self.time.isoformat(),
            "server": self.server,
            "server_started": started,
            "drafts": self.counts.drafts,
            "drafted": self.counts.drafted,
            "accepted_per_position": self.counts.accepted_per_position,
        }
        return json.dumps(content) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Reading":
        """Return the reading in a line of acceptance_over_time.jsonl.

        Raises:
            ValueError, KeyError, TypeError: the line is not a reading.
        """
        content = parse_json(line)
        started = content["server_started"]
        if started is not None:
            started = datetime.fromisoformat(started).astimezone(UTC)
        accepted = tuple(map(int, content["accepted_per_position"]))
        counts = DraftCounts(int(content["drafts"]), int(content["drafted"]), accepted)
        return cls(datetime.fromisoformat(content["time"]).astimezone(UTC), content["server"], started, counts)


@dataclass(frozen=True)
class Interval:
    """The draft counts between two times; `begin` is None at the start of a server that does not report its start."""

    begin: datetime | None
    end: datetime
    counts: DraftCounts


def measure_over_time(args: EvaluateArgs) -> None:
    """Read the counters of --server, add them to the file in --output_dir, and print the acceptance over time.

    Raises:
        UserError: the server cannot be read or does not draft, or the file is invalid or cannot be written.
    """
    directory = Path(args.output_dir)
    server = (args.server or "").rstrip("/")
    newest = read_server(server)  # first, so that a server that does not respond leaves no empty directory
    check_writable("--output_dir", directory)
    path = directory / FILE
    readings = [*read_file(path), newest]
    content = "".join(each.to_line() for each in readings)
    atomic_write(path, content.encode(), writer=f"-{os.getpid()}")  # calls at the same time use different files
    found = list(intervals([each for each in readings if each.server == server]))
    if args.since is not None:
        oldest = newest.time - timedelta(seconds=seconds_of(args.since) or 0)
        found = [each for each in found if each.end > oldest]
    print(interval_table(found))
    logger.info("added a reading to %s", path)


def read_server(server: str) -> Reading:
    """Return the present counters of a server.

    Raises:
        UserError: the server does not respond, is not a server of a supported engine, or does not draft.
    """
    text = get_metrics(server)
    engine = engine_of(server, text)
    supported = _supported()
    if not engine.counts_drafts:
        raise UserError(
            f"--server {server} is a server of {engine.label}, which is not supported",
            f"give the address of a server of {supported}; swiftlite bench counts the drafts of {engine.label}",
        )
    try:
        counts = read_draft_counts(text, engine.metrics_prefix)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"--server {server}: /metrics of {engine.label} has an unknown format: {reason_of(error)}",
            f"swiftlite was tested with {engine.label} {engine.measured}*",
        ) from None
    if counts is None:
        raise UserError(
            f"--server {server} does not draft: /metrics has no counters of drafts",
            "start a server that drafts: swiftlite deploy --model MODEL --speculative mtp",
        )
    return Reading(datetime.now(UTC).replace(microsecond=0), server, _start_time(text), counts)


def engine_of(server: str, text: str) -> EngineInfo:
    """Return the engine of a server.

    Args:
        text: the text of its /metrics.

    Raises:
        UserError: it is not a server of an engine.
    """
    for info in ENGINES.values():
        if _has_metrics_of(info.metrics_prefix, text):
            return info
    raise UserError(
        f"--server {server}: /metrics has no metrics of an engine",
        f"give the address of a server of {_supported()} that runs without disable_log_stats",
    )


def _supported() -> str:
    """Return the names of the engines whose servers count drafts."""
    *labels, last = (ENGINES[name].label for name in names_with("counts_drafts"))
    return f"{', '.join(labels)} or {last}"


def get_metrics(server: str) -> str:
    """Return the text of /metrics.

    Raises:
        UserError: the server does not respond, or has no /metrics.
    """
    try:
        with DIRECT.open(f"{server}/metrics", timeout=_SECONDS_TO_ANSWER) as response:
            return response.read().decode(errors="replace")
    except HTTPError as error:
        raise UserError(
            f"--server {server} has no /metrics: it responds with HTTP status {error.code}",
            "give the address of vLLM's server without a path, such as --server http://127.0.0.1:8000",
        ) from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: an invalid host name
        reason = getattr(error, "reason", error)  # the cause of a URLError
        raise UserError(
            f"--server {server} does not respond: {reason_of(reason)}",
            "give the address of a running server, such as --server http://127.0.0.1:8000",
        ) from None


def _has_metrics_of(prefix: str, text: str) -> bool:
    return prefix != "" and f"\n{prefix}" in f"\n{text}"


def _start_time(text: str) -> datetime | None:
    """Return the start time of a server's process, which Prometheus' client for Python adds to all metrics."""
    found = _START_TIME.search(text)
    if found is None:
        return None
    return datetime.fromtimestamp(int(float(found[1])), UTC)


def read_file(path: Path) -> list[Reading]:
    """Return all readings in acceptance_over_time.jsonl; empty if the file does not exist.

    Raises:
        UserError: a line is not a reading; the error names file and line.
    """
    if not path.exists():
        return []
    readings = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            readings.append(Reading.from_line(line.decode()))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}:{number} is not a reading of evaluate --server",
                "remove this line, or use another --output_dir",
            ) from None
    return readings


def intervals(readings: Sequence[Reading]) -> Iterator[Interval]:
    """Yield the draft counts between consecutive readings of one server.

    The first interval begins at the start of the server, and so does each interval in which the server was restarted.
    Drafts between the last reading before a restart and the restart are unknown.
    """
    before = None
    for now in readings:
        if before is None or _was_restarted(before, now):
            yield Interval(now.started, now.time, now.counts)
        else:
            yield Interval(before.time, now.time, now.counts.since(before.counts))
        before = now


def _was_restarted(before: Reading, now: Reading) -> bool:
    if before.started != now.started:
        return True
    then, new = before.counts, now.counts
    if len(then.accepted_per_position) != len(new.accepted_per_position):
        return True
    grown = new.since(then)
    return min(grown.drafts, grown.drafted, *grown.accepted_per_position) < 0


def interval_table(found: Sequence[Interval]) -> str:
    """Return a table with a row for each interval.

    The last row has the totals, if there are several intervals with the same number of draft positions.
    """
    rows = []
    for each in found:
        begin = "start of the server"
        if each.begin:
            begin = _time_cell(each.begin)
        rows.append([begin, _time_cell(each.end), *_count_cells(each.counts)])
    depths = {len(each.counts.accepted_per_position) for each in found}
    if len(found) > 1 and len(depths) == 1:
        rows.append(["all", "", *_count_cells(reduce(add, (each.counts for each in found)))])
    positions = [f"position {number}" for number in range(1, max(depths) + 1)]
    head = ["from (UTC)", "to (UTC)", "drafts", "accepted length", *positions]
    return text_table([head, *rows])


def _count_cells(counts: DraftCounts) -> list[str]:
    """Return the number of drafts, the mean accepted length, and the accepted share at each position."""
    if not counts.drafts:
        return ["0", *["-"] * (1 + len(counts.accepted_per_position))]
    shares = [f"{accepted / counts.drafts:.1%}" for accepted in counts.accepted_per_position]
    return [str(counts.drafts), f"{1 + counts.accepted / counts.drafts:.2f}", *shares]


def _time_cell(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
