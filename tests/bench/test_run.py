"""The command's own parts: prompts, the table, what is printed to be typed, and its end at SIGTERM."""

import json
import os
import shlex
import signal
import sys

import pytest

pytest.importorskip("aiohttp")

from transformers import AutoTokenizer

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import BenchArgs, DeployArgs, deploy_args
from swiftlite.bench.figures import Answer, Measured, Round
from swiftlite.bench.picture import draw
from swiftlite.bench.run import (
    Run,
    choose_all,
    curves,
    deploy_line,
    ends_at_sigterm,
    load,
    measure,
    recommendations,
    table,
    to_json,
    warnings,
)
from swiftlite.bench.server import free_url
from swiftlite.cli.parse import parse
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.engine import Sampling
from swiftlite.engines.served_model import read_model
from swiftlite.errors import UserError
from tests.tiny import make_tiny_hf

ARGS = BenchArgs(model="a model", num_speculative_tokens=[0, 1, 2], concurrency=[1, 8], max_model_len=64)


def server(k: int, *seconds: float, text: str = "hello") -> Run:
    """A server that takes so long for an answer of 100 tokens, three times, at each concurrency."""
    measured = [
        Measured(
            concurrency,
            [Round([Answer(text, 100, each / 10, each)], each + delay) for delay in (0.0, 0.001, 0.002)],
            DraftCounts(10, 10 * k, (10,) * k) if k else None,
        )
        for concurrency, each in zip((1, 8), seconds, strict=True)
    ]
    return Run(k, f"engine --draft {k}", 3.0, measured)


# Alone 1 token is best; with 8 at once, none.
RUNS = [server(0, 1.0, 0.5), server(1, 0.5, 0.6), server(2, 0.8, 1.0, text="other"), server(0, 1.0, 0.5)]


def test_the_table_has_a_line_for_each_server_and_concurrency():
    head, *lines = table(RUNS, choose_all(RUNS)).splitlines()[:9]
    assert head.split("  ")[0] == "at once"
    cells = [line.split("  ") for line in lines]
    found = [[cell.strip() for cell in line if cell.strip()] for line in cells]
    assert [line[:2] for line in found] == [[c, k] for c in "18" for k in ("0", "1", "2", "0, at the end")]
    assert found[1][2:] == ["199.6 (199.2 to 200.0)", "2.00", "50.0 (50.0)", "4.5 (4.5)", "2.00", "1 of 1"]
    assert found[2][-1] == "0 of 1"
    assert found[5][3] == "0.83"


def test_what_is_recommended_is_what_was_measured():
    choices = choose_all(RUNS)
    assert {concurrency: choice.num_speculative_tokens for concurrency, choice in choices.items()} == {1: 1, 8: 0}
    lines = recommendations(ARGS, choices).splitlines()
    assert lines[0] == "1 at once: --num_speculative_tokens 1: 2.00x the tokens/s of drafting nothing"
    assert lines[1] == "8 at once: --num_speculative_tokens 0: drafting is slower, 0.83x at best"
    for line, k in zip((line.strip() for line in lines if "swiftlite" in line), (1, 0), strict=True):
        words = shlex.split(line)
        assert words[:2] == ["swiftlite", "deploy"]
        assert parse(DeployArgs, words[2:], "deploy")[0] == deploy_args(ARGS, k)


def test_a_machine_that_changed_is_named():
    assert warnings(choose_all(RUNS)) == []
    (warning,) = warnings(choose_all([*RUNS[:-1], server(0, 1.05, 1.0)]))
    assert warning.startswith("8 at once: without drafts, tokens/s at the end were 0.50x those at the beginning")


def test_another_drafter_is_deployed_as_it_was_measured():
    args = BenchArgs(model="m", vllm_speculative_config={"method": "ngram", "prompt_lookup_max": 3})
    chosen = deploy_args(args, 2)
    assert chosen.num_speculative_tokens is None
    assert chosen.vllm_speculative_config == {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}
    assert deploy_args(args, 0).vllm_speculative_config is None
    (choice,) = {
        each.num_speculative_tokens: each for each in choose_all(RUNS).values() if each.num_speculative_tokens
    }.values()
    assert parse(DeployArgs, shlex.split(deploy_line(args, choice))[2:], "deploy")[0] == deploy_args(args, 1)


def test_a_run_that_was_cut_short_recommends_nothing():
    report = json.loads(json.dumps(to_json(ARGS, RUNS[:2], is_complete=False)))
    assert report["complete"] is False
    assert [each["num_speculative_tokens"] for each in report["servers"]] == [0, 1]
    assert report["recommendations"] == []
    whole = to_json(ARGS, RUNS, is_complete=True)
    assert [each["num_speculative_tokens"] for each in whole["recommendations"]] == [1, 0]
    assert whole["recommendations"][0]["ratios"][1] == pytest.approx(2.0, abs=0.01)


def test_the_picture_names_every_server():
    picture = draw(*curves(RUNS)).decode()
    assert picture.startswith("<?xml")
    for name in ("drafting nothing", "drafting 1", "drafting 2", "drafting nothing, again at the end"):
        assert f"<!-- {name} -->" in picture


def test_prompts_that_cannot_be_sent(tmp_path):
    model = read_model(make_tiny_hf(tmp_path / "model", "mimo", 1, with_tokenizer=True))
    template = ChatTemplate(AutoTokenizer.from_pretrained(model.directory))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"What is {n}?"}) + "\n" for n in range(3)))

    def prompts(**options):
        return load(BenchArgs(val_dataset=[str(rows)], **options), model, template)

    assert len(prompts(concurrency=[1, 2], max_prompts=2)) == 2
    with pytest.raises(UserError, match="--concurrency 4, but --val_dataset has 3 prompts"):
        prompts(concurrency=[1, 4])
    for options, name in ({"max_model_len": 30}, "--max_model_len 30"), ({"max_new_tokens": 510}, "max_position_emb"):
        with pytest.raises(UserError, match=rf"rows.jsonl:1: the prompt has \d+ tokens; .*{name}"):
            prompts(concurrency=[1], **options)


def test_a_server_that_dies_while_it_is_asked(tmp_path):
    script = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("out of memory", flush=True)
        os._exit(3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    url, port = free_url()
    command, log = [sys.executable, "-c", script, str(port)], tmp_path / "log"
    with pytest.raises(UserError, match=r"the server stopped answering: [^|]*its log ends so:[^~]*out of memory"):
        measure(BenchArgs(concurrency=[1, 2]), 0, url, command, {}, [[1], [2]], Sampling(4), log)


def test_sigterm_ends_what_is_under_way():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, ends_at_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
