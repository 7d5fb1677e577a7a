"""Read and write objects below a URL, through the package obstore: S3, Google Cloud Storage, Azure, or a directory.

Credentials and endpoints come from the environment, in the variables that each service defines, such as
AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL. An object is visible only after all of its bytes were written.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from swiftlite.base.errors import UserError

SCHEMES = ("s3", "gs", "az", "abfs", "file")
PACKAGE = "obstore"
_THREADS = 4
_CHUNK_BYTES = 16 << 20
SMALL_BYTES = 1 << 20
"""Largest file that is sent as bytes, which are read back and compared."""
TRIES = 3
"""How often content is sent or requested until it arrives undamaged."""
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d")  # neither a timeout nor too many requests
_TEMPORARY = re.compile(r".+#\d+")  # such as __0_0.distcp#1
_MD5_TAG = re.compile(r"[0-9a-f]{32}(-\d+)?")  # an MD5; with the number of parts, that of the MD5s of all parts


@dataclass(frozen=True)
class Stored:
    """An object: its size in bytes and its entity tag."""

    size: int
    tag: str


@dataclass(frozen=True)
class Digests:
    """Digests of a file.

    Attributes:
        md5_tag: the entity tag of S3 for an object with this content: the MD5 of the content or, if it was sent in
            parts, that of the MD5s of all parts, and their number.
    """

    sha256: str
    md5_tag: str


class StoreError(Exception):
    """A request to the store failed. The message is one line.

    Attributes:
        is_refused: whether the store answered that it does not permit the request, or does not have the object or the
            bucket. Otherwise, the request can succeed later.
    """

    def __init__(self, message: str, *, is_refused: bool = False):
        super().__init__(message)
        self.is_refused = is_refused


def check_store(option: str, output_dir: str) -> None:
    """Check the value of --checkpoint_store, without a request.

    Raises:
        UserError: the value is not a URL of a supported store or is in `output_dir`, or the package is missing.
    """
    scheme, is_url, path = option.partition("://")
    looks_like_url = re.match(r"\w+:/", option) is not None
    if not option.strip() or (is_url and (scheme not in SCHEMES or not path)) or (looks_like_url and not is_url):
        problem = f"--checkpoint_store {option}: not a URL of a supported store"
        raise UserError(problem, "use s3://BUCKET/PATH, gs://, az:// or a directory", 2)
    directory = directory_of(url_of(option))
    if directory and output_dir and directory.resolve().is_relative_to(Path(output_dir).resolve()):
        problem = f"--checkpoint_store {option} must not be --output_dir {output_dir} or a directory in it"
        raise UserError(problem, "use a directory on another disk, or an object store", 2)
    if find_spec(PACKAGE) is None:
        raise UserError(f"--checkpoint_store requires the package {PACKAGE}", f"pip install {PACKAGE}")


def url_of(text: str) -> str:
    """Return the URL for the value of an option, which can also be the path of a directory."""
    if "://" in text:
        return text.rstrip("/")
    return Path(text).resolve().as_uri()


def directory_of(url: str) -> Path | None:
    """Return the directory of a file URL; None for the URL of an object store."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    return Path(unquote(parts.path))


@dataclass
class ObjectStore:
    """The objects below a URL. Names of objects are relative to the URL.

    All methods raise StoreError if a request fails.

    Attributes:
        url: the URL, without credentials.
        client: the store of obstore.
        has_md5_tags: whether entity tags that look like those of S3 contain the MD5. They do not if the service
            encrypts objects with a key of the user.
    """

    url: str
    client: Any
    has_md5_tags: bool = True

    @property
    def place(self) -> str:
        """Return the URL or the directory, for messages."""
        return str(directory_of(self.url) or self.url)

    @property
    def hint(self) -> str:
        """Return what to check if a request fails."""
        if directory_of(self.url):
            return "check that it is a directory which this user can write, and that its disk has free space"
        return "check the URL, the credentials and the network"

    @classmethod
    def open(cls, url: str, retry_seconds: float | None = None) -> "ObjectStore":
        """Create a client. No request is sent.

        Args:
            retry_seconds: for how long a request that the store does not answer is sent again; default: obstore's.
        """
        from obstore.store import from_url

        options: dict[str, Any] = {}
        if url.startswith("file:"):
            options = {"mkdir": True, "automatic_cleanup": True}  # of empty directories
        elif retry_seconds is not None:
            backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2}
            options["retry_config"] = {
                "max_retries": 1000,
                "retry_timeout": timedelta(seconds=retry_seconds),
                "backoff": backoff,
            }
        return cls(url, _request(lambda: from_url(url, **options)))

    def list(self, directory: str = "") -> dict[str, Stored]:
        """Return all objects below a directory, by name."""

        def collect() -> dict[str, Stored]:
            found = {}
            for page in self.client.list(directory or None):
                for entry in page:
                    found[entry["path"]] = Stored(entry["size"], _tag_of(entry))
            return found

        return _request(collect)

    def put(self, name: str, content: Path | bytes) -> None:
        """Write an object from a file or from bytes. Bytes, of which there are few, are read back and compared."""
        if isinstance(content, Path):
            with content.open("rb") as file:
                _request(lambda: self.client.put(name, file, chunk_size=_CHUNK_BYTES))
            return
        for _ in range(TRIES):
            _request(lambda: self.client.put(name, content))
            if self.read(name) == content:
                return
        raise StoreError(f"{name} was damaged {TRIES} times when it was sent")

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that does not exist. Return whether this call created it."""
        from obstore.exceptions import AlreadyExistsError

        try:
            _request(lambda: self.client.put(name, content, mode="create", use_multipart=False))
        except StoreError as error:
            if isinstance(error.__cause__, AlreadyExistsError | FileExistsError):
                return False
            raise
        return True

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Content that does not fit the entity tag is read again. If it is the same, the tag has another meaning.
        """

        def receive() -> tuple[bytes, str]:
            found = self.client.get(name)
            return bytes(found.bytes()), _tag_of(found.meta)

        before = None
        for _ in range(TRIES):
            content, tag = _request(receive)
            if not _MD5_TAG.fullmatch(tag) or content == before:
                return content
            if tag == hashlib.md5(content, usedforsecurity=False).hexdigest():
                return content
            before = content
        raise StoreError(f"{name} was damaged {TRIES} times when it was received")

    def is_copy(self, name: str, stored: Stored, size: int, digests: Digests) -> bool | None:
        """Return whether an object has the content of a file; None if it is not known at low cost.

        Files in a directory are read. Services with the protocol of S3 state the MD5. If it differs, the object is
        read, because it can have been sent in other parts.
        """
        if stored.size != size:
            return False
        if directory := directory_of(self.url):
            return digests_of(directory / name).sha256 == digests.sha256
        if stored.tag == digests.md5_tag:
            return True
        if not (self.has_md5_tags and _MD5_TAG.fullmatch(stored.tag)):
            return None
        is_equal = self.get(name, Path(os.devnull)) == digests.sha256
        if is_equal and stored.tag.partition("-")[2] == digests.md5_tag.partition("-")[2]:
            self.has_md5_tags = False
        return is_equal

    def get(self, name: str, path: Path) -> str:
        """Write the content of an object to a file, and return its sha256.

        Raises:
            OSError: the file cannot be written.
        """
        sha = hashlib.sha256()
        with path.open("wb") as file:
            chunks = iter(_request(lambda: self.client.get(name).stream(min_chunk_size=_CHUNK_BYTES)))
            while (chunk := _request(lambda: next(chunks, None))) is not None:
                content = bytes(chunk)
                sha.update(content)
                file.write(content)
        return sha.hexdigest()

    def delete_unfinished(self, is_old: Callable[[str], bool]) -> None:
        """Delete the temporary files of killed processes in a directory, which obstore does not list.

        Object stores delete parts of unfinished objects themselves, by the rules of the bucket.

        Args:
            is_old: whether no process writes in a directory, by its name.
        """
        directory = directory_of(self.url)
        if directory is None:
            return
        for path in directory.glob("*/*#*"):
            if _TEMPORARY.fullmatch(path.name) and is_old(path.parent.name):
                path.unlink(missing_ok=True)
                with suppress(OSError):  # fails unless it is empty
                    path.parent.rmdir()

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        names = list(names)
        if names:
            _request(lambda: self.client.delete(names))


def digests_of(path: Path) -> Digests:
    """Compute the digests of a file. It is read once.

    Raises:
        OSError: the file cannot be read.
    """
    sha = hashlib.sha256()
    parts = []
    with path.open("rb") as file:
        while content := file.read(_CHUNK_BYTES):
            sha.update(content)
            parts.append(hashlib.md5(content, usedforsecurity=False).digest())
    tag = hashlib.md5(usedforsecurity=False).hexdigest()  # of an empty file
    if len(parts) == 1:
        tag = parts[0].hex()
    elif parts:
        tag = f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
    return Digests(sha.hexdigest(), tag)


def _tag_of(entry: Mapping[str, Any]) -> str:
    """Return the entity tag of an object, without the quotes of HTTP; empty without one."""
    return (entry.get("e_tag") or "").strip('"')


def in_threads(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Call a function for all values with a few threads, and return its results.

    Raises:
        Exception: the first exception of the function. Calls that have not started are cancelled.
    """
    pool = ThreadPoolExecutor(_THREADS)
    try:
        futures = [pool.submit(function, value) for value in values]
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _request(call: Callable[[], Any]) -> Any:
    """Return the result of a call of obstore.

    Raises:
        StoreError: the call failed.
    """
    from obstore.exceptions import BaseError

    try:
        return call()
    except (BaseError, OSError) as error:  # obstore raises FileNotFoundError and PermissionError for some requests
        reason = _reason(error)
        raise StoreError(reason, is_refused=_REFUSED.search(reason) is not None) from error


def _reason(error: BaseException) -> str:
    """Return the first line of obstore's message, with the code of the service's answer if there is one.

    Example: "... Server returned non-2xx status code: 404 Not Found: <Error><Code>NoSuchBucket</Code>..." becomes
    "... 404 Not Found (NoSuchBucket)".
    """
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    line = line.partition("<?xml")[0].rstrip(" :")
    _, is_answer, rest = text.partition("<Code>")
    if is_answer:
        line += f" ({rest.partition('</Code>')[0]})"
    return line
