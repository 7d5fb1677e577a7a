"""Test the results of all servers: the table, the chart, and the printed commands."""

import json
import shlex
from dataclasses import replace

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import BenchArgs, DeployArgs, deploy_args
from swiftlite.cli.parse import parse
from swiftlite.engines.client import Answer
from swiftlite.engines.draft_schedule import read_schedule
from swiftlite.serve.bench.measure import ServerResult, describe
from swiftlite.serve.bench.page import AGAIN, bench_chart
from swiftlite.serve.bench.report import choose_all, deploy_line, recommendations, table, to_json, warnings
from swiftlite.serve.bench.results import ConcurrencyResult, Round
from tests.messages import mention_each, mentions

ARGS = BenchArgs(
    model="a model", num_speculative_tokens=[0, 1, 2], concurrency=[1, 8], max_model_len=64, output_dir="figures"
)


def server(k: int, *seconds: float, text: str = "hello") -> ServerResult:
    """Return the result of a server whose answers of 100 tokens take these seconds, three times, at
    each concurrency.
    """
    measured = [
        ConcurrencyResult(
            concurrency,
            [Round([Answer(text, 100, each / 10, each)], each + delay) for delay in (0.0, 0.001, 0.002)],
            DraftCounts(150, 150 * k, (150,) * k) if k else None,
            cached_share=0.25,
        )
        for concurrency, each in zip((1, 8), seconds, strict=True)
    ]
    return ServerResult(k, f"engine --draft {k}", 3.0, measured)


# Alone 1 token is best; with 8 at once, none.
SERVERS = [server(0, 1.0, 0.5), server(1, 0.5, 0.6), server(2, 0.8, 1.0, text="other"), server(0, 1.0, 0.5)]


def test_the_table_has_a_line_for_each_server_and_concurrency():
    _, *lines = table(ARGS, SERVERS, choose_all(SERVERS)).splitlines()[:9]
    cells = [line.split("  ") for line in lines]
    found = [[cell.strip() for cell in line if cell.strip()] for line in cells]
    assert mention_each([" ".join(line[:2]) for line in found], [f"{c} {k}" for c in "18" for k in "0120"])
    assert mention_each(found[1][2:], ["199.6 199.2 200.0", "2.00", "50.0", "4.5", "25%", "2.00", "1"])
    assert mentions(found[2][-1], "0 1")
    assert found[5][3] == "0.83"


def test_a_schedule_is_only_for_servers_that_support_it():
    assert to_json(ARGS, SERVERS, is_complete=True)["schedule_command"] is not None
    args = replace(ARGS, infer_backend="llamacpp")
    assert to_json(args, SERVERS, is_complete=True)["schedule_command"] is None


def test_drawn_answers_are_not_compared():
    drawn = replace(ARGS, temperature=0.7)
    _, line, *_ = table(drawn, SERVERS, choose_all(SERVERS)).splitlines()
    assert line.endswith("1.00")  # tokens per step, the column before
    measured = [each for found in to_json(drawn, SERVERS, is_complete=True)["servers"] for each in found["measured"]]
    assert [each["answers_equal"] for each in measured] == [None] * 8


def test_what_is_recommended_is_what_was_measured():
    choices = choose_all(SERVERS)
    assert {concurrency: choice.num_speculative_tokens for concurrency, choice in choices.items()} == {1: 1, 8: 0}
    lines = recommendations(ARGS, choices).splitlines()
    assert mentions(lines[0], "1 --num_speculative_tokens 2.00x")
    assert mentions(lines[1], "8 --num_speculative_tokens 0 0.83x")
    typed = [shlex.split(line) for line in lines if "swiftlite" in line]
    assert [words[:2] for words in typed] == [["swiftlite", "deploy"]] * 3
    one, none, changing = (parse(DeployArgs, words[2:], "deploy")[0] for words in typed)
    assert (one, none) == (deploy_args(ARGS, 1), deploy_args(ARGS, 0))
    assert changing == replace(one, num_speculative_tokens=None, draft_schedule="figures/bench.json")


def test_a_schedule_is_offered_where_the_load_changes_something(tmp_path):
    report = to_json(ARGS, SERVERS, is_complete=True)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"options": {"infer_backend": "vllm"}} | report))
    assert read_schedule(path, "vllm").numbers == {1: 1, 8: 0}
    assert "--draft_schedule figures/bench.json" in report["schedule_command"]
    alone = [replace(each, measured=each.measured[:1]) for each in SERVERS]
    assert to_json(ARGS, alone, is_complete=True)["schedule_command"] is None
    another = replace(ARGS, vllm_speculative_config={"method": "ngram"})
    assert to_json(another, SERVERS, is_complete=True)["schedule_command"] is None


def test_a_machine_that_changed_is_named():
    assert warnings(choose_all(SERVERS)) == []
    (warning,) = warnings(choose_all([*SERVERS[:-1], server(0, 1.05, 1.0)]))
    assert mentions(warning, "8 0.50x")


def test_another_drafter_is_deployed_as_it_was_measured():
    args = BenchArgs(model="m", vllm_speculative_config={"method": "ngram", "prompt_lookup_max": 3})
    chosen = deploy_args(args, 2)
    assert chosen.num_speculative_tokens is None
    assert chosen.vllm_speculative_config == {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}
    assert deploy_args(args, 0).vllm_speculative_config is None
    (choice,) = (choice for choice in choose_all(SERVERS).values() if choice.num_speculative_tokens)
    assert parse(DeployArgs, shlex.split(deploy_line(args, choice))[2:], "deploy")[0] == deploy_args(args, 1)


def test_a_run_that_was_cut_short_recommends_nothing():
    report = json.loads(json.dumps(to_json(ARGS, SERVERS[:2], is_complete=False)))
    assert report["complete"] is False
    assert [each["num_speculative_tokens"] for each in report["servers"]] == [0, 1]
    assert report["recommendations"] == []
    whole = to_json(ARGS, SERVERS, is_complete=True)
    assert [each["num_speculative_tokens"] for each in whole["recommendations"]] == [1, 0]
    assert whole["recommendations"][0]["ratios"][1] == pytest.approx(2.0, abs=0.01)


def test_the_chart_names_every_server():
    chart = bench_chart(to_json(ARGS, SERVERS, is_complete=True)).decode()
    assert chart.startswith("<?xml")
    for name in (describe(0), describe(1), describe(2), AGAIN):
        assert f"<!-- {name} -->" in chart
