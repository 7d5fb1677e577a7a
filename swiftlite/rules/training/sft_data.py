"""Rules of `megatron sft` for datasets, packing and streaming."""

import math
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.data_file import split_sample
from swiftlite.args.mock_config import FLAG, check_mock_config
from swiftlite.errors import UserError
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import layout_of, sequence_multiple
from swiftlite.plan.run import packing_of
from swiftlite.rules import common


def dataset_files_exist(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.sft_mock_dataset_config_json is not None:
        if args.dataset:
            yield "--dataset and --sft_mock_dataset_config_json: one run trains on one of them", "leave one out"
        return
    if not args.dataset:
        yield "--dataset is required", "give one or more files: --dataset train.jsonl"
    for name in args.dataset:
        yield from common.file_problems("--dataset", name)


def streamed_files_have_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.streaming:
        return
    for name in args.dataset:
        file, sample = split_sample(name)
        if sample:
            yield f"--dataset {name} with --streaming: a sample needs the whole file", f"give the file: {file}"
        elif Path(file).suffix.lower() not in (".jsonl", ".parquet"):
            yield f"--dataset {name} with --streaming: only .jsonl and .parquet are read row by row", "convert it"


def mock_dataset_is_described(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    mock = args.sft_mock_dataset_config_json
    if mock is None:
        return
    try:
        check_mock_config(mock)
    except UserError as error:
        yield error.problem, error.hint
        return
    if mock["mode"] == "file" and not Path(mock["path"]).is_file():
        yield f"{FLAG}: {mock['path']} is no file", "one length on each line, as 1024"
    longest = mock.get("max_seq_len", 0)
    if longest > args.max_length:
        yield (
            f"{FLAG}: samples of up to {longest} tokens, over --max_length {args.max_length}",
            f"--max_length {longest}",
        )


def conversations_stay_whole(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.truncation_strategy == "split" and not method_of(args).splits_long_rows:
        yield (
            "--truncation_strategy split: the rest of a conversation would answer what it no longer holds",
            "delete, left or right; plain text is split by swiftlite megatron pt",
        )


def packing_has_room(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.packing or out_of_bounds(args):
        return
    # Each sample is padded so that context-parallel ranks can share it: with 2 ranks, 2046 tokens take 2048.
    multiple = sequence_multiple(layout_of(args))
    longest = math.ceil(args.max_length / multiple) * multiple
    length = args.packing_length or args.max_length
    if longest > length:
        shared = ""
        if multiple > 1:
            shared = f", which {args.context_parallel_size} context-parallel ranks share as {longest}"
        yield (
            f"a sample may have --max_length {args.max_length} tokens{shared}, a packed row --packing_length {length}",
            f"--packing_length {longest}, or --max_length {length // multiple * multiple}",
        )


def attention_takes_packed_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if packing_of(args) == "none" or facts.architecture is None:
        return
    if not all(attention.takes_packed_rows for attention in facts.architecture.attentions):
        option = "--packing" if args.packing else "--padding_free"
        problem = f"{option}: not every attention of this model keeps the sequences of a packed row apart"
        yield problem, f"leave {option} out"


def packing_options_go_together(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    balanced = args.sequence_packing_scheduler != "none"
    if balanced and not args.packing:
        yield f"--sequence_packing_scheduler {args.sequence_packing_scheduler} needs --packing", "add --packing"
    if not args.streaming:
        return
    if not args.packing:
        yield "--streaming needs --packing: a stream has no batches but of packed rows", "add --packing"
    if args.train_iters is None:
        yield "--streaming needs --train_iters: how many rows the files hold shows at their end", "add --train_iters N"
    if args.sft_mock_dataset_config_json is not None:
        yield "--streaming reads --dataset, not --sft_mock_dataset_config_json", "leave --streaming out"


def mixture_has_its_shares(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    shares = args.interleave_prob
    if not shares:
        return
    given = " ".join(f"{share:g}" for share in shares)
    if args.sft_mock_dataset_config_json is not None:
        yield "--interleave_prob mixes files of --dataset, not random tokens", "leave --interleave_prob out"
    elif len(shares) != len(args.dataset) or len(shares) < 2:
        yield (
            f"--interleave_prob {given}: {len(shares)} shares of {len(args.dataset)} --dataset",
            "give one number for each of several files, such as --interleave_prob 0.7 0.3",
        )
    elif len(set(args.dataset)) < len(args.dataset):
        yield "--interleave_prob with a file that --dataset names twice", "name it once, with a larger share"
    if not all(share > 0 and math.isfinite(share) for share in shares):
        yield f"--interleave_prob {given}: each share must be a number above 0", "leave out what is not to be read"


def held_out_rows_are_trained_on(args: SftArgs, facts: Facts) -> Iterator[str]:
    trained = {Path(split_sample(name)[0]).resolve() for name in args.dataset}
    for name in args.val_dataset:
        if Path(split_sample(name)[0]).resolve() in trained:
            yield f"{name} is in --dataset and in --val_dataset: its evaluation measures memory"


def streams_hold_nothing_out(args: SftArgs, facts: Facts) -> Iterator[str]:
    if args.streaming and not args.val_dataset:
        yield "--streaming without --val_dataset: nothing is held out, so nothing is evaluated"
