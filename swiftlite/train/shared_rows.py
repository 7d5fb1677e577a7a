"""Open the cache of encoded rows that the ranks of a machine share."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swiftlite.base.errors import LostRank, UserError
from swiftlite.data.row_cache import FLAG, RowCache
from swiftlite.launch.failure import FOLDER
from swiftlite.runtime.machine import this_machine
from swiftlite.runtime.progress import progress_file
from swiftlite.runtime.temporary import temporary_directory


@contextmanager
def open_row_cache(directory: str | None) -> Iterator[RowCache | None]:
    """Open a cache in which one rank of each machine stores encoded rows for all ranks of the machine. Collective.

    Args:
        directory: --dataset_cache. None: a temporary directory, which the launcher deletes when it ends, so that ranks
            that it restarts find the rows. With another launcher, it is deleted at the end of the context: the ranks
            have then mapped its files, and keep them. A rank that is alone and not restarted needs no files.

    Raises:
        UserError: the temporary directory cannot be created.
    """
    machine = this_machine()
    name = f"the temporary directory (see {FLAG})"
    if directory is not None:
        yield RowCache(Path(directory), machine.once)
    elif machine.group is None and progress_file() is None:
        yield None
    elif FOLDER in os.environ:
        yield RowCache(Path(os.environ[FOLDER], "rows"), machine.once, name)
    else:
        with ExitStack() as stack:
            path = machine.once(lambda: _open_temporary(stack))
            try:
                yield RowCache(path, machine.once, name)
            except LostRank:
                raise
            except UserError:  # about the rows, and raised on every rank
                machine.wait()
                raise
            machine.wait()  # until the other ranks have opened the files


def _open_temporary(stack: ExitStack) -> Path:
    try:
        return stack.enter_context(temporary_directory("swiftlite-rows-"))
    except OSError as error:
        problem = f"a temporary directory for tokenized rows cannot be created: {error.strerror}"
        raise UserError(problem, f"set TMPDIR, or use {FLAG} DIR") from None
