"""Rules of `megatron sft` for datasets, packing and streaming."""

import math
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.data_file import STREAMED_SUFFIXES, data_suffix, split_sample
from swiftlite.args.mock_config import FLAG, check_mock_config
from swiftlite.base.errors import UserError
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import layout_of, sequence_multiple
from swiftlite.plan.run import packing_of
from swiftlite.rules import common


def columns_have_different_names(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    names = list((args.columns or {}).values())
    if args.columns is not None and not all([args.columns, *args.columns, *names]):
        yield "--columns has no name, or an empty one", """for example --columns '{"problem": "query"}'"""
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"--columns renames several columns to {name!r}", "give each column its own name"


def dataset_files_exist(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.sft_mock_dataset_config_json is not None:
        if args.dataset:
            yield "--dataset cannot be combined with --sft_mock_dataset_config_json", "remove one of the two"
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
            yield f"--dataset {name}: --streaming does not support samples", f"give the file: --dataset {file}"
        elif data_suffix(file) not in STREAMED_SUFFIXES:
            problem = f"--dataset {name}: --streaming supports only {', '.join(STREAMED_SUFFIXES)}"
            yield problem, "convert it to JSON lines"


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
        yield f"{FLAG}: {mock['path']} does not exist", "write one length per line, such as 1024"
    longest = mock.get("max_seq_len", 0)
    if longest > args.max_length:
        yield (
            f"{FLAG}: max_seq_len {longest} exceeds --max_length {args.max_length}",
            f"use --max_length {longest}",
        )


def conversations_stay_whole(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.truncation_strategy == "split" and not method_of(args).splits_long_rows:
        yield (
            "--truncation_strategy split does not support conversations",
            "use delete, left or right; swiftlite megatron pt splits plain text",
        )


def packing_has_room(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.packing or out_of_bounds(args):
        return
    # Each sample is padded so that context-parallel ranks can split it: with 2 ranks, 2046 tokens become 2048.
    multiple = sequence_multiple(layout_of(args))
    longest = math.ceil(args.max_length / multiple) * multiple
    length = args.packing_length or args.max_length
    if longest > length:
        shared = ""
        if multiple > 1:
            shared = f" (padded to {longest} for --context_parallel_size {args.context_parallel_size})"
        yield (
            f"--max_length {args.max_length}{shared} must not exceed --packing_length {length}",
            f"use --packing_length {longest}, or --max_length {length // multiple * multiple}",
        )


def attention_takes_packed_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if packing_of(args) == "none" or facts.architecture is None:
        return
    if not all(attention.takes_packed_rows for attention in facts.architecture.attentions):
        option = "--padding_free"
        if args.packing:
            option = "--packing"
        yield f"{option} is not supported by every attention layer of this model", f"remove {option}"


def packing_options_go_together(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    balanced = args.sequence_packing_scheduler != "none"
    if balanced and not args.packing:
        yield f"--sequence_packing_scheduler {args.sequence_packing_scheduler} requires --packing", "add --packing"
    if not args.streaming:
        return
    if not args.packing:
        yield "--streaming requires --packing", "add --packing"
    if args.train_iters is None:
        yield "--streaming requires --train_iters: the number of rows is not known in advance", "add --train_iters N"
    if args.sft_mock_dataset_config_json is not None:
        yield "--streaming does not support --sft_mock_dataset_config_json", "remove --streaming"


def mixture_has_its_shares(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    shares = args.interleave_prob
    if not shares:
        return
    given = " ".join(f"{share:g}" for share in shares)
    if args.sft_mock_dataset_config_json is not None:
        yield f"--interleave_prob does not support {FLAG}", "remove --interleave_prob"
    elif len(shares) != len(args.dataset) or len(shares) < 2:
        yield (
            f"--interleave_prob {given} has {len(shares)} numbers for {len(args.dataset)} files of --dataset",
            "give two or more files and one number for each: --interleave_prob 0.7 0.3",
        )
    elif len(set(args.dataset)) < len(args.dataset):
        yield "--interleave_prob does not support a file twice in --dataset", "give it once, with a larger share"
    if not all(share > 0 and math.isfinite(share) for share in shares):
        yield f"--interleave_prob {given}: each number must be above 0", "remove files that are not to be read"


def held_out_rows_are_trained_on(args: SftArgs, facts: Facts) -> Iterator[str]:
    trained = {Path(split_sample(name)[0]).resolve() for name in args.dataset}
    for name in args.val_dataset:
        if Path(split_sample(name)[0]).resolve() in trained:
            yield f"{name} is in both --dataset and --val_dataset: its evaluation measures memorization"


def streams_hold_nothing_out(args: SftArgs, facts: Facts) -> Iterator[str]:
    if args.streaming and not args.val_dataset:
        yield "--streaming without --val_dataset: no rows are held out, so there are no evaluations"
