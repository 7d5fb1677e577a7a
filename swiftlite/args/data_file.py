"""Split `FILE#N`, the format of --dataset and --val_dataset.

Names on the hub are split in the same way (hub/name.py).
"""

from pathlib import Path

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet", ".csv", ".txt")
"""Extensions of data files; a .txt file is one row with a text."""
STREAMED_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Extensions of files that are read row by row."""

SPEED_BENCH = "speed-bench:"
"""Prefix of a directory with prepared files of SPEED-Bench, in place of a file."""

MAX_DIGITS = 15
"""Maximum number of digits of a number of rows. No file has so large a number of rows, and int() raises an error for
5000 digits."""


def data_suffix(name: str) -> str:
    """Return the extension of a data file in lower case; "" if it has another extension."""
    return next((suffix for suffix in DATA_SUFFIXES if name.lower().endswith(suffix)), "")


def prepared_files(spec: str) -> list[str]:
    """Return the files that `speed-bench:DIR` or `speed-bench:DIR#N` names, each with `#N`; other names unchanged.

    They are DIR/CONFIG.jsonl (prepared by NeMo-Skills) or DIR/CONFIG/test.parquet (by Model-Optimizer).
    """
    if not spec.startswith(SPEED_BENCH):
        return [spec]
    directory, mark, sample = spec.removeprefix(SPEED_BENCH).partition("#")
    files = [*Path(directory).glob("*.jsonl"), *Path(directory).rglob("*.parquet")]
    return [f"{file}{mark}{sample}" for file in sorted(files)]


def split_sample(spec: str) -> tuple[str, str]:
    """Return the file and the number of rows after its #; "" means all rows.

    A # is part of the file's name if a file with the whole text as its name exists, or if the text after it cannot be a
    number of rows, for example in the name of a directory or before an extension.
    """
    file, _, sample = spec.rpartition("#")
    if not file or Path(spec).is_file():
        return spec, ""
    if is_number_of_rows(sample) or Path(file).is_file():
        return file, sample
    return spec, ""


def is_number_of_rows(sample: str) -> bool:
    """Return whether the text is a valid number of rows."""
    return sample.isdecimal() and len(sample) <= MAX_DIGITS
