"""Open the cache of encoded rows that the ranks of a machine share."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.data.row_cache import FLAG, RowCache
from swiftlite.runtime.machine import this_machine


@contextmanager
def open_row_cache(directory: str | None) -> Iterator[RowCache | None]:
    """Open a cache in which one rank of each machine stores encoded rows for all ranks of the machine. Collective.

    Args:
        directory: --dataset_cache. None: a temporary directory, which is deleted at the end of the context. The ranks
            have then mapped its files, and keep them; a rank without other ranks on its machine needs no files.

    Raises:
        UserError: the temporary directory cannot be created.
    """
    machine = this_machine()
    if directory is not None:
        yield RowCache(Path(directory), machine.once)
        return
    if machine.group is None:
        yield None
        return
    path = machine.once(_make_temporary)
    try:
        yield RowCache(path, machine.once, f"the temporary directory (see {FLAG})")
    except UserError:  # about the rows, and raised on every rank
        machine.wait()
        raise
    else:
        machine.wait()  # until the other ranks have opened the files
    finally:
        if machine.is_first:
            shutil.rmtree(path, ignore_errors=True)


def _make_temporary() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="swiftlite-rows-"))
    except OSError as error:
        problem = f"a temporary directory for tokenized rows cannot be created: {error.strerror}"
        raise UserError(problem, f"set TMPDIR, or use {FLAG} DIR") from None
