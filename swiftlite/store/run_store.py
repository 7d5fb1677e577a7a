"""The copy of a run in a store.

    URL/checkpoint_store.json         the id of the run, so that two runs do not share a URL
    URL/args.json, URL/source/...     the files of the run outside of its checkpoints
    URL/checkpoint-N/...              the checkpoints

SHA256SUMS is the last object of a checkpoint that is written and the first that is deleted. A checkpoint with this
object is complete. Content from a store is not trusted: names must stay below the run's directory, and every file of a
checkpoint is compared with its sha256.
"""

import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from swiftlite.base.atomic import atomic_write, fsync_tree, sync
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.plan.facts import run_checkpoints
from swiftlite.runtime.lock import holder_of
from swiftlite.store.manifest import MANIFEST_FILE, read_manifest
from swiftlite.store.objects import ObjectStore, Stored, StoreError, in_threads, url_of

FLAG = "--checkpoint_store"
RUN_FILE = "checkpoint_store.json"
_DIRECTORIES = ("source", "rollouts")
"""Directories of a run that are copied. Exports need the first one, and resumed runs of `megatron grpo` the second."""
_CLOCK_SECONDS = 60
"""Largest expected difference between the clocks of the store and of this machine."""


@dataclass(frozen=True)
class RunStore:
    """The copy of one run.

    Methods raise StoreError if a request to the store fails.

    Attributes:
        copied: modification time in nanoseconds of the files that this process has copied, by name.
    """

    objects: ObjectStore
    copied: dict[str, int] = field(default_factory=dict)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, smallest first."""
        return _complete(self.objects.list())

    def run_id(self) -> str | None:
        """Return the id of the run whose copy this is; None if there is no copy."""
        if RUN_FILE not in self.objects.list():
            return None
        return _id_in(self.objects.read(RUN_FILE))

    def put_checkpoint(self, checkpoint: Path) -> int:
        """Copy a checkpoint, and the run's other files. An incomplete or different copy of it is replaced.

        Returns:
            The number of bytes of the checkpoint; 0 if the store already contains it.

        Raises:
            OSError: a file cannot be read.
        """
        self.put_files(checkpoint.parent)
        manifest = (checkpoint / MANIFEST_FILE).read_bytes()
        name = f"{checkpoint.name}/{MANIFEST_FILE}"
        if name in self.objects.list(checkpoint.name):
            if self.objects.read(name) == manifest:
                return 0
            self.objects.delete([name])
        files = [path for path in checkpoint.iterdir() if path.name != MANIFEST_FILE]
        in_threads(lambda path: self.objects.put(f"{checkpoint.name}/{path.name}", path), files)
        self.objects.put(name, manifest)
        return sum(path.stat().st_size for path in files)

    def put_files(self, run: Path) -> None:
        """Copy the files outside of checkpoints that have changed since the last call."""
        stored = self.objects.list()
        for path in _files_of(run):
            name = path.relative_to(run).as_posix()
            status = path.stat()
            if self.copied.get(name) == status.st_mtime_ns or _is_copy(stored.get(name), status):
                continue
            self.objects.put(name, path)
            self.copied[name] = status.st_mtime_ns

    def delete_oldest(self, keep: int | None, newest: int) -> None:
        """Delete old checkpoints, and incomplete ones before the newest.

        Args:
            keep: number of complete checkpoints to keep; None keeps all.
            newest: step of the checkpoint that was copied last.
        """
        self.objects.delete_unfinished()
        stored = self.objects.list()
        complete = _complete(stored)
        kept = set(complete)
        if keep:
            kept = set(complete[-keep:])
        for step in sorted(_begun(stored)):
            if step in kept or step > newest:
                continue
            directory = f"checkpoint-{step}"
            names = {name for name in stored if name.startswith(f"{directory}/")}
            manifest = names & {f"{directory}/{MANIFEST_FILE}"}
            self.objects.delete(manifest)
            self.objects.delete(names - manifest)

    def get_newest(self, run: Path) -> Path:
        """Copy the newest checkpoint and the run's other files into a run's directory.

        The checkpoint gets its name when all its files are there, so an interrupted call leaves no partial checkpoint.

        Returns:
            The directory of the checkpoint.

        Raises:
            UserError: the copy in the store is damaged.
            OSError: a file cannot be written.
        """
        stored = self.objects.list()
        step = _complete(stored)[-1]
        for name in stored:
            if not name.startswith("checkpoint-"):
                self._get_file(name, run)
        final = run / f"checkpoint-{step}"
        temporary = run / f".checkpoint-{step}.fetching"  # a starting run deletes such directories
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            self._get_checkpoint(final.name, temporary)
            fsync_tree(temporary)
            temporary.rename(final)
        except BaseException:  # also Ctrl-C: a full disk needs the space
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(run)
        return final

    def _get_file(self, name: str, run: Path) -> None:
        """Copy a file outside of the checkpoints."""
        parts = PurePosixPath(name).parts
        is_known = len(parts) == 1 or parts[0] in _DIRECTORIES
        if not is_known or any(part.startswith(".") for part in parts):
            logger.warning("%s: %s is not a file of a run and is ignored", self.objects.place, name)
            return
        path = run / Path(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, self.objects.read(name))

    def _get_checkpoint(self, name: str, directory: Path) -> None:
        stored = {PurePosixPath(each).name for each in self.objects.list(name)} - {MANIFEST_FILE}
        self.objects.get(f"{name}/{MANIFEST_FILE}", directory / MANIFEST_FILE)
        try:
            digests = read_manifest(directory) or {}
        except ValueError as error:
            raise self._damaged(name, str(error)) from None

        if different := sorted(stored ^ digests.keys()):
            raise self._damaged(name, f"{MANIFEST_FILE} and the files differ: {', '.join(different[:5])}")
        if not digests:
            raise self._damaged(name, f"{MANIFEST_FILE} is empty")

        def get(file: str) -> str:
            return self.objects.get(f"{name}/{file}", directory / file)

        found = in_threads(get, digests)
        changed = [file for file, digest in zip(digests, found, strict=True) if digest != digests[file]]
        if changed:
            raise self._damaged(name, f"the sha256 differs for {', '.join(changed[:5])}")

    def _damaged(self, name: str, reason: str) -> UserError:
        hint = f"delete {self.objects.place}/{name}, and --resume uses the checkpoint before it"
        return UserError(f"{FLAG}: {self.objects.place}/{name} is damaged: {reason}", hint)


def fetch_newest(run: Path, option: str) -> None:
    """Fetch the newest checkpoint of a store into a run's directory, unless the directory has one that is as new.

    The rules, which compare the options with those of the checkpoint, are checked afterwards.

    Raises:
        UserError: the store cannot be read, contains another run or is damaged; or the directory cannot be written.
    """
    with _explained(run, option) as store:
        steps = store.steps()
        own = run_checkpoints(run)
        if not steps or holder_of(run):  # the rules report that another process uses the directory
            return
        _check_same_run(store, run)
        if not own or int(own[-1].name.removeprefix("checkpoint-")) < steps[-1]:
            logger.info("--resume: fetching checkpoint-%d from %s", steps[-1], store.objects.place)
            store.get_newest(run)


def claim_store(run: Path, option: str, *, resume: bool) -> None:
    """Write the id of a run to its directory and to a store, which shows that both can be written.

    Raises:
        UserError: the store cannot be written, or contains another run, or this run and `resume` is missing; or the
            directory cannot be written.
    """
    with _explained(run, option) as store:
        steps = store.steps()
        if steps and not resume:
            raise UserError(
                f"{FLAG} {option} already contains a run (newest: checkpoint-{steps[-1]})",
                "add --resume to continue from there, or use another URL",
            )
        if steps:
            _check_same_run(store, run)
        own = _own_id(run)
        if own is None and resume:
            own = store.run_id()  # of a run that lost its directory
        content = json.dumps({"run": own or uuid.uuid4().hex}).encode()
        if not store.objects.create(RUN_FILE, content) and (own is None or own != store.run_id()):
            raise UserError(
                f"{FLAG} {option} is used by another run, which has no checkpoint yet",
                f"use another URL; or delete {store.objects.place}/{RUN_FILE} if that run has ended",
            )
        store.objects.put(RUN_FILE, content)  # shows that the store can be written
        run.mkdir(parents=True, exist_ok=True)
        atomic_write(run / RUN_FILE, content)


@contextmanager
def _explained(run: Path, option: str) -> Iterator[RunStore]:
    """Open a store, and name the option if a request to it fails or the run's directory cannot be written."""
    try:
        store = RunStore(ObjectStore.open(url_of(option), max_retries=2))
    except StoreError as error:
        raise UserError(f"{FLAG} {option}: {error}", "check the URL") from None
    try:
        yield store
    except StoreError as error:
        raise UserError(f"{FLAG} {option}: {error}", store.objects.hint) from None
    except OSError as error:
        raise UserError(
            f"--output_dir {run} cannot be written: {error.strerror or error}",
            "free disk space, or use another directory",
        ) from None


def _check_same_run(store: RunStore, run: Path) -> None:
    """Check that a store with checkpoints contains the run of a directory. A directory without a run is accepted.

    Raises:
        UserError: the store contains another run.
    """
    own, stored = _own_id(run), store.run_id()
    if stored is None:
        problem = f"{FLAG}: {store.objects.place}/{RUN_FILE} is missing or damaged, so its run is unknown"
        raise UserError(problem, "use another URL")
    if own is None and not run_checkpoints(run):
        return
    if own != stored:
        raise UserError(
            f"{FLAG} {store.objects.place} contains another run than --output_dir {run}",
            "use the URL of this run, an empty one, or another --output_dir",
        )


def _own_id(run: Path) -> str | None:
    """Return the id of the run in a directory; None without one."""
    try:
        return _id_in((run / RUN_FILE).read_bytes())
    except OSError:
        return None


def _id_in(content: bytes) -> str | None:
    with suppress(ValueError, KeyError, TypeError):
        return str(parse_json(content.decode())["run"])
    return None


def _files_of(run: Path) -> Iterator[Path]:
    """Yield the files that are copied, except those of checkpoints."""
    found = list(run.iterdir())
    for name in _DIRECTORIES:
        found += sorted((run / name).rglob("*"))
    for path in found:
        if path.is_file() and not path.name.startswith("."):
            yield path


def _is_copy(stored: Stored | None, status: os.stat_result) -> bool:
    """Return whether an object was written, with the same size, after the file had been changed for the last time."""
    if stored is None or stored.size != status.st_size:
        return False
    return stored.written.timestamp() > status.st_mtime + _CLOCK_SECONDS


def _begun(names: Collection[str]) -> set[int]:
    """Return the steps of all checkpoints, including incomplete ones."""
    steps = {_step_of(name.partition("/")[0]) for name in names if "/" in name}
    return {step for step in steps if step is not None}


def _complete(names: Collection[str]) -> list[int]:
    return sorted(step for step in _begun(names) if f"checkpoint-{step}/{MANIFEST_FILE}" in names)


def _step_of(name: str) -> int | None:
    """Return N of the name checkpoint-N; None for another name."""
    number = name.removeprefix("checkpoint-")
    if number == name or not (number.isascii() and number.isdigit()) or str(int(number)) != number:
        return None
    return int(number)
