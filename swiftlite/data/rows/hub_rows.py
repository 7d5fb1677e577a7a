"""Read datasets on the hub with the optional package `datasets`: `org/name:subset/split@revision#500`.

`datasets` stores a dataset as Arrow files. This module stores, next to them, a list of the files of each commit. With
this list, other ranks, resumed runs and machines without network access read the same rows.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError, clip
from swiftlite.base.json_file import read_json
from swiftlite.data.packing.padding import padding_error
from swiftlite.hub.modelscope import modelscope_snapshot
from swiftlite.hub.name import HubName
from swiftlite.hub.refusal import refusals
from swiftlite.hub.snapshot import snapshot

INSTALL = "pip install datasets"
_CARD = ("README.md", ".gitattributes")


@dataclass(frozen=True)
class HubRows:
    """A split of a dataset on the hub, and the number of rows to draw from it (None: all)."""

    dataset: HubName
    sample: int | None = None

    @property
    def name(self) -> str:
        """Name of the dataset; messages refer to its rows as `name:number`."""
        return str(self.dataset)

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of the row from 1, row).

        Raises:
            UserError: the dataset is not available.
        """
        files = fetch_rows(self.dataset)
        from datasets import Dataset

        number = 0
        for file in files:
            # As Arrow tables, because `datasets` would decode images, without the checks of `images.py`.
            tables = Dataset.from_file(str(file)).with_format("arrow").iter(batch_size=1024)
            for row in chain.from_iterable(cast(Any, table).to_pylist() for table in tables):
                number += 1
                yield number, padding_error(row) or row


def commit_of_dataset(name: HubName) -> str:
    """Return the commit that the name refers to; only the dataset's card is downloaded.

    Raises:
        UserError: the dataset does not exist, or the hub cannot be reached.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{name} is a dataset of the hub, which requires the package datasets", INSTALL)
    return snapshot(replace(name, subset="", split="train"), _CARD).name


def fetch_rows(name: HubName) -> list[Path]:
    """Return the Arrow files of the split in order; missing ones are downloaded.

    Raises:
        UserError: the dataset is not available, or has no such subset or split.
    """
    commit = commit_of_dataset(name)
    if name.is_of_modelscope:  # `datasets` has a cache for the files of a directory
        return _load(name, str(modelscope_snapshot(replace(name, subset="", split="train"), ("*",))), None)
    from datasets import config

    cache = Path(config.HF_DATASETS_CACHE)
    digest = hashlib.sha256(str(name.at(commit)).encode()).hexdigest()[:16]
    note = cache / f"swiftlite-{digest}.json"
    try:
        files = [cache / file for file in read_json(note)]
    except (OSError, ValueError, TypeError):
        files = []
    if not files or not all(file.is_file() for file in files):
        files = _load(name, name.repository, commit)
        listed = [str(file.relative_to(cache)) for file in files]  # relative, so that the cache can be moved
        atomic_write(note, json.dumps(listed).encode())
    return files


def _load(name: HubName, source: str, commit: str | None) -> list[Path]:
    """Download a split with `datasets`, which writes its Arrow files.

    Args:
        source: name of a repository on the Hugging Face hub, or a directory.
        commit: commit of the repository; None for a directory.
    """
    from datasets import Dataset, load_dataset_builder
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import LocalEntryNotFoundError

    with refusals(name):
        try:
            builder = load_dataset_builder(source, name.subset or None, revision=commit)
            if (
                commit and builder.hash != commit
            ):  # without network access, `datasets` uses the last version in its cache
                raise LocalEntryNotFoundError("it is not in the cache")
            builder.download_and_prepare()
            dataset = cast(Dataset, builder.as_dataset(split=name.split))
        # For a missing subset or split, files without rows, or a script, the first line of the error states the cause.
        except (ValueError, RuntimeError, DatasetsError) as error:
            reason = clip(" ".join(str(error.__cause__ or error).split()), 400)
            hint = "use ORG/NAME:SUBSET/SPLIT, or ORG/NAME:/SPLIT without a subset"
            raise UserError(f"{name} cannot be read: {reason}", hint) from None
    return [Path(file["filename"]) for file in cast(list[dict[str, str]], dataset.cache_files)]
