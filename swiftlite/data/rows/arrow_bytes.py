"""Compute bytes that identify the rows of an Arrow batch, for digests, without a conversion of the rows to Python.

The bytes of a row depend on its values alone: not on the other rows of the batch, and not on the place of the row in
its file. Each column has several parts: the numbers of elements of its lists or the lengths of its texts, with -1 for
null, and then the elements or the texts.
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
    from pyarrow import types

    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(is_valid)])  # number of values before each index that are not null
    values = array.drop_null() if array.null_count else array
    if types.is_struct(array.type):
        yield is_valid.tobytes(), starts.tolist()
        for field in values.flatten():
            yield from _parts(field, before[starts])
        return
    is_list = types.is_list(array.type) or types.is_large_list(array.type)
    content, ends = (values.values, values.offsets.to_numpy()) if is_list else _texts(values)
    sizes = np.full(len(array), -1, "<i8")
    sizes[is_valid] = np.diff(ends)
    yield sizes.tobytes(), (8 * starts).tolist()
    inner = ends[before[starts]]
    if is_list:
        yield from _parts(content, inner)
    else:
        yield content, inner.tolist()


def _texts(values: Any) -> tuple[bytes, np.ndarray]:
    """Return the bytes of all values, and where each one starts and the last one ends."""
    import pyarrow
    from pyarrow import types

    if not (types.is_string(values.type) or types.is_large_string(values.type)):
        # Numbers, dates, maps and so on, which rows of texts rarely have.
        values = pyarrow.array([repr(value) for value in values.to_pylist()], pyarrow.string())
    values = values.cast(pyarrow.large_string())
    _, ends, content = values.buffers()
    own = slice(values.offset, values.offset + len(values) + 1)  # of the buffers of a larger array
    return content.to_pybytes() if content else b"", np.frombuffer(ends, "<i8")[own]
