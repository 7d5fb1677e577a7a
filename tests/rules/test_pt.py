"""Test the rules of `megatron pt`: all messages, and that a usual command is valid."""

from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import PtArgs
from tests.messages import mentions
from tests.rules.good import SFT, problems_of

PT = PtArgs(model="plain", dataset=["train.jsonl"], output_dir="out")


def test_good_options_pass(here):
    assert rules.check(PT) == []
    rules.check(replace(PT, streaming=True, train_iters=3, sequence_packing_scheduler="dp_balanced"))
    rules.check(replace(PT, packing=False, truncation_strategy="right", append_eos=False))
    Path("book.txt").write_text("a text")
    rules.check(replace(PT, dataset=["book.txt", "train.jsonl"], interleave_prob=[3, 1]))


@pytest.mark.parametrize(
    ("args", "problem", "hint"),
    [
        (replace(PT, loss_scale="all"), "--loss_scale megatron pt", ""),
        (replace(PT, media_root="."), "--media_root megatron pt", ""),
        (replace(PT, max_pixels=5), "--max_pixels megatron pt", ""),
        (replace(PT, freeze_vit=False), "--freeze_vit megatron pt", ""),
        (replace(PT, system="Be brief."), "--system megatron pt", ""),
        (
            replace(PT, sft_mock_dataset_config_json={"mode": "no such mode"}),
            "--sft_mock_dataset_config_json megatron pt",
            "--sft_mock_dataset_config_json",
        ),
        (replace(SFT, truncation_strategy="split"), "--truncation_strategy split", "megatron pt"),
    ],
)
def test_problems(here, args, problem, hint):
    ((found, advice),) = problems_of(args)
    assert mentions(found, problem)
    assert mentions(advice, hint)
