"""Read and write SHA256SUMS, the digests of the files of a checkpoint."""

import errno
import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST_FILE = "SHA256SUMS"  # in the format of sha256sum: `sha256sum -c SHA256SUMS` verifies a checkpoint
_HASHING_THREADS = 4


def sha256(path: Path) -> str:
    """Compute the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(checkpoint: Path, written: Mapping[str, str]) -> None:
    """Write SHA256SUMS with the digest of every file of the checkpoint.

    Args:
        written: digests that are already known, by file name.
    """
    digests = dict(written)
    for path in checkpoint.iterdir():
        if path.name not in digests:
            digests[path.name] = sha256(path)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    (checkpoint / MANIFEST_FILE).write_text("".join(lines))


def read_manifest(checkpoint: Path) -> dict[str, str] | None:
    """Read the digests by file name; None for a checkpoint without SHA256SUMS.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        lines = (checkpoint / MANIFEST_FILE).read_text().splitlines()
    except FileNotFoundError:
        return None
    digests = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{MANIFEST_FILE}: {line[:80]!r} is not a digest and a file name")
        digests[name] = digest
    return digests


def changed_files(checkpoint: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the names of files that are missing, cannot be read from the disk or have a different digest."""

    def has_changed(name: str) -> bool:
        path = checkpoint / name
        try:
            return not path.is_file() or sha256(path) != digests[name]
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return True

    names = list(names)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return [name for name, changed in zip(names, threads.map(has_changed, names), strict=True) if changed]
