"""Define the options of rows, images and packing, as groups of fields (see `fields.py`)."""

from dataclasses import dataclass, field
from typing import Any, Literal

from swiftlite.args import bounds

TruncationStrategy = Literal["delete", "left", "right", "split", "error"]


@dataclass(frozen=True)
class DataArgs:
    """Data"""

    max_length: bounds.Length = 2048
    """Maximum length of a sample in tokens; see --truncation_strategy for longer ones."""
    dataset: list[str] = field(default_factory=list)
    """Files (.jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet, .csv, .txt) or datasets on the hub
    (ORG/NAME:SUBSET/SPLIT@REVISION; ORG/NAME means the train split of main). The suffix #500 selects a random sample of
    500 rows. Rows of several datasets are mixed."""
    val_dataset: list[str] = field(default_factory=list)
    """Held-out files or datasets on the hub. Default: a part of --dataset, see --split_dataset_ratio."""
    split_dataset_ratio: bounds.ProperFraction = 0.05
    """Share of --dataset that is held out for evaluation without --val_dataset; 0 holds out nothing."""
    columns: dict[str, str] | None = None
    """JSON: new names of columns of the rows, such as {"problem": "query", "solution": "response"}. Other columns keep
    their names."""
    truncation_strategy: TruncationStrategy = "delete"
    """Treatment of samples longer than --max_length: delete them, truncate left or right, or stop with an error. split
    is for megatron pt."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Maximum number of malformed rows before the run stops; each is reported with file:line and counted in the run
    report."""
    loss_scale: Literal["default", "last_round", "all"] = "default"
    """Trained tokens: every assistant turn (default), those after the last user turn, or all tokens."""
    system: str | None = None
    """System prompt for rows without one."""
    dataset_shuffle: bool = True
    """Reshuffle the training rows in every epoch."""
    dataset_num_proc: bounds.PositiveInt = 1
    """Number of processes that tokenize the dataset, on each machine."""
    dataset_cache: str | None = None
    """Directory for tokenized rows, which later runs with the same rows, tokenizer and options read. All ranks of a
    machine share its files. Can be deleted between runs. Default: a temporary directory, deleted when the run ends."""


@dataclass(frozen=True)
class ImageFileArgs:
    """Images"""

    media_root: str | None = None
    """Directory of the images that rows name with relative paths; files outside of it are refused. Default: the
    directory of each data file."""


@dataclass(frozen=True)
class ImageArgs(ImageFileArgs):
    """Images"""

    max_pixels: bounds.PositiveInt | None = None
    """Maximum number of pixels of an image; larger images are resized. Default: that of the model's
    preprocessor_config.json."""
    min_pixels: bounds.PositiveInt | None = None
    """Minimum number of pixels of an image; smaller images are resized. Default: that of the model's
    preprocessor_config.json."""


@dataclass(frozen=True)
class PackingArgs:
    """Packing and streaming"""

    packing: bool = False
    """Pack whole samples into rows of --packing_length tokens, without attention between samples. Batch sizes then
    count rows."""
    packing_length: bounds.Length | None = None
    """Maximum length of a packed row in tokens. Default: --max_length."""
    padding_free: bool = False
    """Concatenate the samples of each micro-batch instead of padding them to the longest."""
    sequence_packing_scheduler: Literal["none", "dp_balanced"] = "none"
    """dp_balanced: with --packing, pack the samples of each step so that data-parallel ranks have equal work.
    --global_batch_size then counts samples, and the number of micro-batches varies."""
    streaming: bool = False
    """Read, tokenize and pack rows in file order during training; each data-parallel rank tokenizes a share of the
    rows. Requires --packing and --train_iters."""
    interleave_prob: list[float] = field(default_factory=list)
    """Share of rows from each --dataset, such as 0.7 0.3. Default: all rows of every --dataset. An epoch ends when the
    first file is exhausted; with --streaming each file restarts instead."""
    streaming_buffer_size: bounds.PositiveInt = 1000
    """Number of buffered samples that --streaming packs from."""
    sft_mock_dataset_config_json: dict[str, Any] | None = None
    """JSON: train on random tokens of given lengths instead of --dataset, for benchmarks; see docs/en/packing.md."""


@dataclass(frozen=True)
class DocumentArgs:
    """Documents"""

    append_eos: bool = True
    """Append the tokenizer's eos token to each document, so that the model learns where texts end."""
    truncation_strategy: TruncationStrategy = "split"
    """Treatment of documents longer than --max_length: split them into pieces, delete them, truncate left or right, or
    stop with an error."""
    packing: bool = True
    """Pack documents, and pieces of long ones, into rows of --packing_length tokens, without attention between them.
    Batch sizes then count rows."""
