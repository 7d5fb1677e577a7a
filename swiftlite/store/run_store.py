"""The copy of a run in a store.

    URL/checkpoint_store.json         the id of the run, so that two runs do not share a URL
    URL/args.json, URL/source/...     the files of the run outside of its checkpoints
    URL/checkpoint-N/...              the checkpoints

SHA256SUMS is the last object of a checkpoint that is written and the first that is deleted. A checkpoint with this
object is complete. Content from a store is not trusted: names must stay below the run's directory, and every file of a
checkpoint is compared with its sha256, after it was sent and after it was received.
"""

import json
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from swiftlite.base.atomic import atomic_write, fsync_tree, sync
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.plan.facts import run_checkpoints
from swiftlite.runtime.decisions import record_decision
from swiftlite.runtime.lock import holder_of
from swiftlite.runtime.progress import num_restarts
from swiftlite.store.best import Evaluations
from swiftlite.store.manifest import MANIFEST_FILE, read_manifest
from swiftlite.store.objects import SMALL_BYTES, TRIES, ObjectStore, StoreError, digests_of, in_threads, url_of
from swiftlite.store.retention import EPHEMERAL_FILE, old_ones
from swiftlite.store.shares import ALONE, Shares

FLAG = "--checkpoint_store"
RUN_FILE = "checkpoint_store.json"
_DIRECTORIES = ("source", "rollouts")
"""Directories of a run that are copied. Exports need the first one, and resumed runs of `megatron grpo` the second."""
_PAUSE_SECONDS = 1
"""Time before a damaged file is requested again; twice as long before the third time."""
_FIRST_SECONDS, _OTHERWISE_SECONDS, _ALONE_SECONDS = 2, 10, 300
"""For how long a store that does not answer is asked again: by a new run, by a resumed run with a checkpoint in
--output_dir, and by a resumed run whose only checkpoints can be in the store."""


class DamagedCopyError(UserError):
    """A checkpoint in the store is damaged."""


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

    def claim(self, run: Path, *, resume: bool) -> None:
        """Write the id of a run to its directory and to the store, which shows that both can be written.

        Raises:
            UserError: the store contains another run, or this run and `resume` is missing.
            OSError: the directory cannot be written.
        """
        place = self.objects.place
        steps = self.steps()
        if steps and not resume:
            raise UserError(
                f"{FLAG} {place} already contains a run (newest: checkpoint-{steps[-1]})",
                "add --resume to continue from there, or use another URL",
            )
        if steps:
            _check_same_run(self, run)
        own = own_id(run)
        if own is None and resume:
            own = self.run_id()  # of a run that lost its directory
        content = json.dumps({"run": own or uuid.uuid4().hex}).encode()
        if not self.objects.create(RUN_FILE, content) and (own is None or own != self.run_id()):
            raise UserError(
                f"{FLAG} {place} is used by another run, which has no checkpoint yet",
                f"use another URL; or delete {place}/{RUN_FILE} if that run has ended",
            )
        self.objects.put(RUN_FILE, content)  # shows that the store can be written
        run.mkdir(parents=True, exist_ok=True)
        atomic_write(run / RUN_FILE, content)

    def put_checkpoint(self, checkpoint: Path, shares: Shares = ALONE) -> int:
        """Copy a checkpoint, and the run's other files. An incomplete or different copy of it is replaced, and a
        damaged one repaired.

        Args:
            shares: the ranks that copy it together (`put_share`); this is the first one.

        Returns:
            The number of bytes of the checkpoint that were copied; 0 if the store already contains it.

        Raises:
            OSError: a file cannot be read.
        """
        self.put_files(checkpoint.parent)
        manifest = (checkpoint / MANIFEST_FILE).read_bytes()
        digests = read_manifest(checkpoint) or {}
        seal = f"{checkpoint.name}/{MANIFEST_FILE}"
        names = sorted(digests)
        has_seal = seal in self.objects.list(checkpoint.name)
        if has_seal and self.objects.read(seal) == manifest:
            names = self._different(checkpoint, names, digests)
            if not names:
                return 0
            decision = f"{checkpoint.name} in {self.objects.place} is copied again: {', '.join(names[:5])}"
            record_decision(checkpoint.parent, _step_of(checkpoint.name) or 0, "damaged_copy", decision)
        if has_seal:
            self.objects.delete([seal])
        own = shares.own(names)
        self._put_and_verify(checkpoint, own, digests)
        self._put_and_verify(checkpoint, sorted({*names} - {*own} - shares.copied_by_others()), digests)
        known = {seal, *(f"{checkpoint.name}/{name}" for name in digests)}
        self.objects.delete(self.objects.list(checkpoint.name).keys() - known)  # of another layout
        self.objects.put(seal, manifest)
        return sum((checkpoint / name).stat().st_size for name in names)

    def put_share(self, checkpoint: Path, shares: Shares) -> list[str]:
        """Copy the files of a checkpoint that this rank has written, and return their names.

        No file is copied if the store contains a complete copy, which the first rank compares or replaces, or another
        run, which the first rank reports.

        Raises:
            OSError: a file cannot be read.
        """
        digests = read_manifest(checkpoint) or {}
        is_complete = f"{checkpoint.name}/{MANIFEST_FILE}" in self.objects.list(checkpoint.name)
        if is_complete or self.run_id() != own_id(checkpoint.parent):
            return []
        names = shares.own(sorted(digests))
        self._put_and_verify(checkpoint, names, digests)
        return names

    def _put_and_verify(self, checkpoint: Path, names: list[str], digests: Mapping[str, str]) -> None:
        """Copy files of a checkpoint, again if they arrive damaged."""
        if not names:
            return
        for _ in range(TRIES):
            in_threads(lambda name: self.objects.put(f"{checkpoint.name}/{name}", checkpoint / name), names)
            names = self._different(checkpoint, names, digests)
            if not names:
                return
        raise StoreError(f"{checkpoint.name}/{names[0]} was damaged {TRIES} times when it was sent")

    def _different(self, checkpoint: Path, names: list[str], digests: Mapping[str, str]) -> list[str]:
        """Return the names of files of a checkpoint that the store lacks, or of which it has another content.

        Raises:
            StoreError: a file of the checkpoint is damaged itself.
        """
        stored = self.objects.list(checkpoint.name)

        def differs(name: str) -> bool:
            object_name, path = f"{checkpoint.name}/{name}", checkpoint / name
            found = digests_of(path)
            if found.sha256 != digests[name]:
                raise StoreError(f"{path} differs from {MANIFEST_FILE}")
            if object_name not in stored:
                return True
            return self.objects.is_copy(object_name, stored[object_name], path.stat().st_size, found) is False

        return [name for name, is_other in zip(names, in_threads(differs, names), strict=True) if is_other]

    def put_files(self, run: Path) -> None:
        """Copy the files outside of checkpoints that have changed since the last call.

        The first call of a process compares contents, because the clocks of the store and of this machine can differ.
        """
        stored = self.objects.list()
        for path in _files_of(run):
            name = path.relative_to(run).as_posix()
            status = path.stat()
            if self.copied.get(name) == status.st_mtime_ns:
                continue
            if name not in stored or not self.objects.is_copy(name, stored[name], status.st_size, digests_of(path)):
                self.objects.put(name, path if status.st_size > SMALL_BYTES else path.read_bytes())
            self.copied[name] = status.st_mtime_ns

    def delete_oldest(self, keep: int | None, before: int, evaluations: Evaluations | None = None) -> None:
        """Delete old and incomplete checkpoints, except the best one.

        Args:
            keep: see `old_ones`.
            before: only checkpoints before this step are deleted. Ranks may already copy later ones.
            evaluations: those of the run, which determine the best checkpoint.
        """
        self.objects.delete_unfinished(lambda directory: (_step_of(directory) or 0) < before)
        stored = self.objects.list()
        complete = [step for step in _complete(stored) if step < before]
        ephemeral = {step for step in complete if f"checkpoint-{step}/{EPHEMERAL_FILE}" in stored}
        kept = {*complete} - {*old_ones(complete, ephemeral, keep)}
        if evaluations is not None and (best := evaluations.best_of(complete)) is not None:
            kept.add(best)
        for step in sorted(_begun(stored)):
            if step in kept or step >= before:
                continue
            directory = f"checkpoint-{step}"
            names = {name for name in stored if name.startswith(f"{directory}/")}
            manifest = names & {f"{directory}/{MANIFEST_FILE}"}
            self.objects.delete(manifest)
            self.objects.delete(names - manifest)

    def get_checkpoint(self, step: int, run: Path, *, keeps_files: bool = False) -> Path:
        """Copy a checkpoint and the run's other files into a run's directory.

        The other files are replaced when the checkpoint is verified. The checkpoint gets its name when everything is
        there, so an interrupted call leaves no partial checkpoint.

        Args:
            keeps_files: whether the other files are copied only if they are missing.

        Returns:
            The directory of the checkpoint.

        Raises:
            DamagedCopyError: the copy in the store is damaged.
            OSError: a file cannot be written.
        """
        final = run / f"checkpoint-{step}"
        temporary = run / f".checkpoint-{step}.fetching"  # a starting run deletes such directories
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            self._get_verified(final.name, temporary)
            fsync_tree(temporary)
            for name in self.objects.list():
                if not (name.startswith("checkpoint-") or (keeps_files and (run / name).exists())):
                    self._get_file(name, run)
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

    def _get_verified(self, name: str, directory: Path) -> None:
        """Copy the files of a checkpoint. Files that arrive damaged are requested again, because a damaged line is more
        likely than a damaged store.
        """
        verified: dict[str, str] = {}
        problem = ""
        for number in range(TRIES):
            if number:
                logger.warning("%s of %s is fetched again: %s", name, self.objects.place, problem)
                time.sleep(_PAUSE_SECONDS * number)
            try:
                problem = self._get_missing(name, directory, verified)
            except StoreError as error:
                if number + 1 == TRIES:
                    raise
                problem = str(error)
            if not problem:
                return
        hint = "no other checkpoint is whole: restore it from a backup, or start a new run with other paths"
        raise DamagedCopyError(f"{FLAG}: {self.objects.place}/{name} is damaged: {problem}", hint)

    def _get_missing(self, name: str, directory: Path, verified: dict[str, str]) -> str:
        """Copy the files of a checkpoint that are not verified yet, and return what is wrong; empty if nothing is.

        Args:
            verified: digests of the verified files by name; this function adds files.
        """
        stored = {PurePosixPath(each).name for each in self.objects.list(name)} - {MANIFEST_FILE}
        (directory / MANIFEST_FILE).write_bytes(self.objects.read(f"{name}/{MANIFEST_FILE}"))
        try:
            digests = read_manifest(directory) or {}
        except ValueError as error:
            return str(error)
        if different := sorted(stored ^ digests.keys()):
            return f"{MANIFEST_FILE} and the files differ: {', '.join(different[:5])}"
        if not digests:
            return f"{MANIFEST_FILE} is empty"

        def get(file: str) -> None:
            digest = self.objects.get(f"{name}/{file}", directory / file)
            if digest == digests[file]:
                verified[file] = digest

        in_threads(get, [file for file in digests if verified.get(file) != digests[file]])
        changed = [file for file in digests if verified.get(file) != digests[file]]
        if not changed:
            return ""
        return f"the sha256 differs for {', '.join(changed[:5])}"


def fetch_newest(run: Path, option: str, *, is_running: bool = False) -> bool:
    """Fetch the newest whole checkpoint of a store into a run's directory, unless the directory has one that is as new.

    The rules, which compare the options with those of the checkpoint, are checked afterwards. If the store does not
    answer, or its newer checkpoints are damaged, the run continues from the checkpoint in the directory.

    Args:
        is_running: whether the caller is the run; its files are then newer than those in the store.

    Returns:
        Whether the store has answered.

    Raises:
        UserError: the store cannot be read and the directory has no checkpoint; or the store contains another run or
            only damaged checkpoints; or the directory cannot be written.
    """
    own = _newest_step(run)
    seconds = _OTHERWISE_SECONDS
    if own is None:
        seconds = _ALONE_SECONDS
        logger.info("--resume: %s has no checkpoint; asking %s for at most %d s", run, option, seconds)
    with _explained(run, option, seconds) as store:
        try:
            if is_running or not holder_of(run):  # the rules report that another process uses the directory
                _fetch_newer(store, run, own, keeps_files=is_running)
        except StoreError as error:
            _continue_without(store, run, error)
            return False
    return True


def _newest_step(run: Path) -> int | None:
    checkpoints = run_checkpoints(run)
    return _step_of(checkpoints[-1].name) if checkpoints else None


def _fetch_newer(store: RunStore, run: Path, own: int | None, *, keeps_files: bool) -> None:
    """Fetch the newest whole checkpoint after step `own`, if the store has one."""
    steps = store.steps()
    if not steps:
        return
    _check_same_run(store, run)
    damaged: list[DamagedCopyError] = []
    chosen = own
    for step in reversed([step for step in steps if own is None or step > own]):
        logger.info("--resume: fetching checkpoint-%d from %s", step, store.objects.place)
        try:
            store.get_checkpoint(step, run, keeps_files=keeps_files)
        except DamagedCopyError as error:
            damaged.append(error)
            continue
        chosen = step
        break
    if chosen is None:
        raise damaged[0]
    if chosen != own:
        _fetch_best(store, run, chosen)
    for error in damaged:
        record_decision(run, chosen, "damaged_copy", f"{error.problem}; the run continues from checkpoint-{chosen}")


def _fetch_best(store: RunStore, run: Path, newest: int) -> None:
    """Fetch the best of the checkpoints up to the newest one, if the directory lacks it, as on a new machine."""
    evaluations = Evaluations.read(run)
    best = evaluations.best_of(step for step in store.steps() if step <= newest) if evaluations else None
    if best is None or (run / f"checkpoint-{best}").exists():
        return
    logger.info("--resume: fetching checkpoint-%d, the best one, from %s", best, store.objects.place)
    try:
        store.get_checkpoint(best, run, keeps_files=True)
    except DamagedCopyError as error:
        record_decision(run, newest, "damaged_copy", f"{error.problem}; the best one is chosen among the others")


def _continue_without(store: RunStore, run: Path, error: StoreError) -> None:
    """Record that a run continues without its store, which does not answer.

    Raises:
        StoreError: the directory has no checkpoint, or the store refuses a request, as for a wrong URL. A restarted run
            has used this URL before.
    """
    own = _newest_step(run)
    if own is None or (error.is_refused and not num_restarts()):
        raise error
    decision = (
        f"{FLAG} {store.objects.place} does not answer: {error}; the run continues from checkpoint-{own} of {run}, and "
        "copies its next checkpoints when the store answers"
    )
    record_decision(run, own, "store_down", decision)


def claim_store(run: Path, option: str, *, resume: bool) -> None:
    """Reserve a store for a run (`RunStore.claim`). A resumed run with a checkpoint continues if the store does not
    answer, and reserves it before the next copy.

    Raises:
        UserError: the store cannot be written, or contains another run, or this run and `resume` is missing; or the
            directory cannot be written.
    """
    seconds = _OTHERWISE_SECONDS if resume else _FIRST_SECONDS
    with _explained(run, option, seconds) as store:
        try:
            store.claim(run, resume=resume)
        except StoreError as error:
            if not resume:
                raise
            _continue_without(store, run, error)


@contextmanager
def _explained(run: Path, option: str, retry_seconds: float) -> Iterator[RunStore]:
    """Open a store, and name the option if a request to it fails or the run's directory cannot be written."""
    try:
        store = RunStore(ObjectStore.open(url_of(option), retry_seconds))
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
    own, stored = own_id(run), store.run_id()
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


def own_id(run: Path) -> str | None:
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
