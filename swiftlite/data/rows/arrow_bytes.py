"""Compute bytes that identify the rows of an Arrow batch, for digests, without a conversion of the rows to Python.

The bytes of a row depend on its values alone: not on the other rows of the batch, and not on the place of the row in
its file. Each column has several parts: which values are null, then for those that are not, the numbers of elements of
lists, the lengths of texts, and their bytes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Part = tuple[bytes, list[int]]
"""Bytes of all rows, and where the bytes of each row start and the last ones end."""


def bytes_of_rows(batch: Any) -> Callable[[int], bytes]:
    """Return a function that returns the bytes of a row of a `pyarrow.RecordBatch` by its index."""
    parts: list[Part] = []
    for column in batch.columns:
        parts += _parts(column, np.arange(batch.num_rows + 1))

    def bytes_of(row: int) -> bytes:
        return b"".join([content[starts[row] : starts[row + 1]] for content, starts in parts])

    return bytes_of


def _parts(array: Any, starts: np.ndarray) -> Iterator[Part]:
    """Yield the parts of a column or of a field in it.

    Args:
        starts: indices of the array at which the values of each row start, and where those of the last one end.
    """
    import pyarrow
    from pyarrow import types

    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    yield is_valid.tobytes(), starts.tolist()
    if array.null_count:
        array, starts = array.drop_null(), _ends(is_valid)[starts]
    if types.is_struct(array.type):
        for field in array.flatten():
            yield from _parts(field, starts)
    elif types.is_list(array.type) or types.is_large_list(array.type):
        offsets = array.offsets.to_numpy()
        yield np.diff(offsets).astype("<i8").tobytes(), (8 * starts).tolist()
        yield from _parts(array.values, offsets[starts])
    elif types.is_string(array.type) or types.is_large_string(array.type):
        yield from _parts_of_texts(array.cast(pyarrow.large_string()), starts)
    else:  # numbers, dates, maps and so on, which rows of texts rarely have
        texts = [repr(value) for value in array.to_pylist()]
        yield from _parts_of_texts(pyarrow.array(texts, pyarrow.large_string()), starts)


def _parts_of_texts(array: Any, starts: np.ndarray) -> Iterator[Part]:
    _, offsets, content = array.buffers()
    ends = np.frombuffer(offsets, "<i8")[array.offset : array.offset + len(array) + 1]
    yield np.diff(ends).tobytes(), (8 * starts).tolist()
    yield content.to_pybytes() if content else b"", ends[starts].tolist()


def _ends(is_counted: np.ndarray) -> np.ndarray:
    """Return how many values before each index are counted."""
    return np.concatenate([[0], np.cumsum(is_counted)])
