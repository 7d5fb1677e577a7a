"""`FILE` and `FILE#N`, as --dataset and --val_dataset take them; NAME#N of the hub (hub/name.py) is cut the same."""

from pathlib import Path

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
"""Of files with rows; a .txt file is one row, a text."""

MAX_DIGITS = 15
"""More rows than that has no file, and int() refuses 5000 digits."""


def split_sample(spec: str) -> tuple[str, str]:
    """The file, and what stands behind its #: the rows to take; "" where all are taken.

    A # is part of the name where there is a file of that name, and where what follows cannot be a number of rows: in
    the name of a directory, or before an ending.
    """
    file, _, sample = spec.rpartition("#")
    if not file or Path(spec).is_file():
        return spec, ""
    if is_number_of_rows(sample) or Path(file).is_file():
        return file, sample
    return spec, ""


def is_number_of_rows(sample: str) -> bool:
    """Whether this stands for a number."""
    return sample.isdecimal() and len(sample) <= MAX_DIGITS
