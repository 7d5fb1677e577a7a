"""Test the acceptance of a running server over time, with metrics that were recorded from real vLLM.

The recordings are two readings of a vLLM 0.32 server with two draft positions, and one reading after its restart.
tests/e2e/test_engines.py reads a real server.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import EvaluateArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.server.process import free_port
from swiftlite.serve.evaluate.command import run
from swiftlite.serve.evaluate.over_time import FILE, Reading, intervals, read_server
from tests.engines.small_server import serving
from tests.messages import naming

RECORDED = Path(__file__).parent / "vllm_metrics"
FIRST, SECOND, RESTARTED = ((RECORDED / f"{name}.txt").read_text() for name in ("first", "second", "restarted"))
COUNTS = {
    "first": DraftCounts(140, 280, (37, 8)),
    "second": DraftCounts(343, 686, (98, 37)),
    "restarted": DraftCounts(48, 96, (15, 3)),
}
STARTED = {
    "second": datetime(2026, 11, 26, 2, 16, 12, tzinfo=UTC),
    "restarted": datetime(2026, 11, 26, 2, 17, 41, tzinfo=UTC),
}


@contextmanager
def served(*texts: str, status: int = 200) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the address of a server that responds with each text once, and the list of its requests."""
    waiting = list(texts)
    requests = []

    async def respond(request: web.Request) -> web.Response:
        requests.append((request.method, request.path))
        return web.Response(text=waiting.pop(0), status=status)

    with serving(respond) as url:
        yield url, requests


def without_start(text: str) -> str:
    """Return metrics without the start of the process, as of a server with several API server processes."""
    lines = [line for line in text.splitlines() if "process_start_time_seconds" not in line]
    return "\n".join([*lines, ""])


def without_drafts(text: str) -> str:
    """Return metrics as of a server that does not draft."""
    lines = [line for line in text.splitlines() if "vllm:spec_decode" not in line]
    return "\n".join([*lines, ""])


def rows(printed: str) -> list[list[str]]:
    """Return the cells of a printed table without its header."""
    lines = [line.replace("start of the server", "start") for line in printed.splitlines()[1:]]
    return [line.split() for line in lines]


def measured(counts: DraftCounts) -> list[str]:
    """Return the cells of a row: drafts, accepted length, and the share of each position."""
    shares = [f"{100 * accepted / counts.drafts:.1f}%" for accepted in counts.accepted_per_position]
    return [str(counts.drafts), f"{1 + sum(counts.accepted_per_position) / counts.drafts:.2f}", *shares]


def words(time: datetime) -> list[str]:
    return [f"{time:%Y-%m-%d}", f"{time:%H:%M:%S}"]


def test_two_readings_of_a_server(tmp_path, capsys):
    with served(FIRST, SECOND) as (url, requests):
        args = EvaluateArgs(server=f"{url}/", output_dir=str(tmp_path / "out"))
        run(args)
        (only,) = rows(capsys.readouterr().out)
        run(args)
        first, second, total = rows(capsys.readouterr().out)
    assert requests == [("GET", "/metrics")] * 2
    assert only == first
    assert first[:2] == words(STARTED["second"])
    assert first[4:] == measured(COUNTS["first"])
    assert second[:2] == first[2:4]
    assert second[4:] == measured(COUNTS["second"].since(COUNTS["first"]))
    assert total == ["all", *measured(COUNTS["second"])]
    lines = [json.loads(line) for line in (tmp_path / "out" / FILE).read_text().splitlines()]
    assert [(line["server"], line["drafts"]) for line in lines] == [
        (url, COUNTS["first"].drafts),
        (url, COUNTS["second"].drafts),
    ]


def test_a_restarted_server_counts_from_zero(tmp_path, capsys):
    with served(SECOND, RESTARTED) as (url, _):
        args = EvaluateArgs(server=url, output_dir=str(tmp_path))
        run(args)
        capsys.readouterr()
        run(args)
    before, after, _ = rows(capsys.readouterr().out)
    assert before[4:] == measured(COUNTS["second"])
    assert after[:2] == words(STARTED["restarted"])
    assert after[4:] == measured(COUNTS["restarted"])


def test_smaller_counters_are_a_restart_without_a_start_time():
    texts = [without_start(text) for text in (FIRST, SECOND, RESTARTED)]
    with served(*texts) as (url, _):
        readings = [read_server(url) for _ in texts]
    assert [reading.started for reading in readings] == [None] * 3
    found = list(intervals(readings))
    assert [each.counts for each in found] == [
        COUNTS["first"],
        COUNTS["second"].since(COUNTS["first"]),
        COUNTS["restarted"],
    ]
    assert [each.begin for each in found] == [None, readings[0].time, None]


def test_another_start_time_is_a_restart_with_larger_counters():
    now = datetime.now(UTC)
    few, many = DraftCounts(10, 20, (5, 2)), DraftCounts(30, 60, (20, 9))
    starts = [(now - timedelta(hours=2), few), (now - timedelta(hours=1), many)]
    readings = [Reading(now, "http://a", started, counts) for started, counts in starts]
    assert [each.counts for each in intervals(readings)] == [few, many]


def test_another_number_of_positions_is_a_restart():
    now = datetime.now(UTC)
    two, three = DraftCounts(10, 20, (5, 2)), DraftCounts(30, 90, (20, 9, 4))
    readings = [Reading(now, "http://a", None, counts) for counts in (two, three)]
    assert [each.counts for each in intervals(readings)] == [two, three]


def test_since_begins_at_the_last_reading_before_it(tmp_path, capsys):
    now = datetime.now(UTC).replace(microsecond=0)
    with served(SECOND) as (url, _):
        history = []
        for hours, drafts in ((50, 2), (30, 4), (10, 8)):
            counts = DraftCounts(drafts, 2 * drafts, (drafts // 2, 0))
            history.append(Reading(now - timedelta(hours=hours), url, STARTED["second"], counts))
        (tmp_path / FILE).write_text("".join(each.to_line() for each in history))
        run(EvaluateArgs(server=url, output_dir=str(tmp_path), since="24h"))
    older, newer, total = rows(capsys.readouterr().out)
    assert older[:4] == [*words(history[1].time), *words(history[2].time)]
    assert older[4:] == ["4", "1.50", "50.0%", "0.0%"]
    assert newer[4:] == measured(COUNTS["second"].since(history[2].counts))
    assert total == ["all", *measured(COUNTS["second"].since(history[1].counts))]
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_readings_of_another_server_are_kept_and_not_shown(tmp_path, capsys):
    other = Reading(datetime.now(UTC), "http://elsewhere:1", None, DraftCounts(10, 20, (5, 2)))
    (tmp_path / FILE).write_text(other.to_line())
    with served(FIRST) as (url, _):
        run(EvaluateArgs(server=url, output_dir=str(tmp_path)))
    (row,) = rows(capsys.readouterr().out)
    assert row[4:] == measured(COUNTS["first"])
    kept, _ = (tmp_path / FILE).read_text().splitlines(keepends=True)
    assert Reading.from_line(kept) == other


def test_no_drafts_between_two_readings(tmp_path, capsys):
    with served(FIRST, FIRST) as (url, _):
        for _ in range(2):
            run(EvaluateArgs(server=url, output_dir=str(tmp_path)))
    assert rows(capsys.readouterr().out)[-2][4:] == ["0", "-", "-", "-"]


@pytest.mark.parametrize(
    ("text", "status", "named"),
    [
        ("", 404, "404 /metrics http://127.0.0.1:8000"),
        ("<html>hello</html>", 200, "/metrics vLLM disable_log_stats"),
        ("# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 1.0\n", 200, "SGLang vLLM swiftlite bench"),
        (without_drafts(FIRST), 200, "swiftlite deploy --speculative mtp"),
        (FIRST + "vllm:spec_decode_num_drafts_total{ 1.0\n", 200, "/metrics vLLM 0.32."),
    ],
    ids=["not-found", "html", "sglang", "no-drafts", "broken"],
)
def test_servers_that_cannot_be_read(tmp_path, text, status, named):
    with served(text, status=status) as (url, _), pytest.raises(UserError, match=naming(f"--server {url} {named}")):
        run(EvaluateArgs(server=url, output_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


ADDRESSES = {"closed": f"http://127.0.0.1:{free_port()}", "host": "http://a..b:80", "path": "http://127.0.0.1:8000/é"}


@pytest.mark.parametrize("url", ADDRESSES.values(), ids=ADDRESSES)
def test_addresses_that_do_not_respond(tmp_path, url):
    with pytest.raises(UserError, match=naming(f"--server {url} http://127.0.0.1:8000")):
        run(EvaluateArgs(server=url, output_dir=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("line", ['{"time": ', "{}", "[]", '{"time": 3, "server_started": null}'])
def test_a_line_that_is_not_a_reading(tmp_path, line):
    good = Reading(datetime.now(UTC), "http://a", None, DraftCounts(10, 20, (5, 2))).to_line()
    (tmp_path / FILE).write_text(good + line)
    with served(FIRST) as (url, _), pytest.raises(UserError, match=naming(f"{FILE}:2 --output_dir")):
        run(EvaluateArgs(server=url, output_dir=str(tmp_path)))
    assert (tmp_path / FILE).read_text() == good + line
