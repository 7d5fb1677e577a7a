"""The ranks of a machine share tokenized rows: one of them tokenizes, and all of them map the files."""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.data.encoded_rows import Samples
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.sample import digest
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.launch import failure
from swiftlite.runtime import progress
from swiftlite.runtime.distributed import session
from swiftlite.runtime.machine import this_machine
from swiftlite.train.methods.conversations import load_data
from tests.messages import mentions
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

encoded: list[str] = []


@dataclass(frozen=True)
class Counting(ConversationEncoder):
    """Counts the rows that this process encodes."""

    def __call__(self, row):
        encoded.append(row.source)
        return super().__call__(row)


def load(
    args: SftArgs, temporary: str, machines: list[str], environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Load the rows on one of several ranks."""
    tempfile.tempdir = temporary
    os.environ |= environment or {}
    encoded.clear()
    with session():
        os.environ["GROUP_RANK"] = machines[dist.get_rank()]
        encoder = Counting(ChatTemplate(load_tokenizer(args.model)), args.max_length, args.truncation_strategy)
        try:
            data = load_data(args, encoder, 0)
        except UserError as error:
            return {"error": str(error), "encoded": len(encoded)}
        assert isinstance(data.train, Samples)
        part = data.train.rows.parts[0]
        return {
            "digest": data.digest,
            "same": data.digest == digest([*data.train, *data.val]),
            "report": data.report,
            "prompts": [conversation.prompt() for conversation in data.val_conversations],
            "encoded": len(encoded),
            "mapped": isinstance(part.columns["input_ids"].base, np.memmap),
            "ranks": this_machine().ranks,
        }


@pytest.fixture
def args(tmp_path) -> SftArgs:
    model = make_tiny_hf(tmp_path / "hf", "qwen3", depth=0, with_tokenizer=True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"query": "What is {i}?", "response": "It is {i}."}}\n' for i in range(30)))
    return SftArgs(model=str(model), dataset=[str(rows)], split_dataset_ratio=0.2)


def test_one_rank_of_each_machine_tokenizes(tmp_path, args):
    (alone,) = launch(1, load, args, str(tmp_path), ["0"])
    assert alone["same"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    together = launch(3, load, args, str(temporary), ["0", "1", "0"])
    assert [rank["encoded"] for rank in together] == [30, 30, 0]
    assert [rank["ranks"] for rank in together] == [(0, 2), (0,), (0, 2)]
    assert [rank["mapped"] for rank in together] == [True, False, True]
    for rank in together:
        assert {name: rank[name] for name in ("digest", "report", "prompts", "same")} == {
            name: alone[name] for name in ("digest", "report", "prompts", "same")
        }
    assert list(temporary.iterdir()) == []
    cached = replace(args, dataset_cache=str(tmp_path / "cache"))
    found = [launch(2, load, cached, str(temporary), ["0", "0"]) for _ in range(2)]
    assert [[rank["encoded"] for rank in ranks] for ranks in found] == [[30, 0], [0, 0]]
    assert {rank["digest"] for ranks in found for rank in ranks} == {alone["digest"]}


def test_every_rank_reports_the_error_of_the_first(tmp_path, args):
    full = Path("/dev/full")  # a file is not a directory
    told = launch(2, load, replace(args, dataset_cache=str(full / "cache")), str(tmp_path), ["0", "0"])
    assert told[0]["error"] == told[1]["error"]
    assert mentions(told[0]["error"], f"--dataset_cache {full}/cache")
    (tmp_path / "rows.jsonl").write_text('{"query": ""}\n')
    told = launch(2, load, args, str(tmp_path), ["0", "0"])
    assert told[0]["error"] == told[1]["error"]
    assert mentions(told[0]["error"], f"{tmp_path}/rows.jsonl:1 query:")
    assert not list(tmp_path.glob("swiftlite-rows-*"))


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_the_launcher_restarts_find_the_rows(tmp_path, args, size):
    """The launcher deletes its directory when it ends."""
    launcher = tmp_path / "launcher"
    launcher.mkdir()
    environment = {failure.FOLDER: str(launcher), progress.FILE: str(tmp_path / "progress.json")}
    found = [launch(size, load, args, str(tmp_path), ["0"] * size, environment) for _ in range(2)]
    assert [sum(rank["encoded"] for rank in ranks) for ranks in found] == [30, 0]
    assert len({rank["digest"] for ranks in found for rank in ranks}) == 1
    assert [path.name for path in launcher.iterdir()] == ["rows"]
    assert not list(tmp_path.glob("swiftlite*"))
