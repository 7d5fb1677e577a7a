"""Parse names on the hub: `org/name`, `org/name@revision`, and for a dataset `org/name:subset/split@revision`.

With the prefix `ms:`, or with the environment variable USE_MODELSCOPE, the hub is ModelScope instead of Hugging Face.
"""

import os
import re
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from swiftlite.args.data_file import DATA_SUFFIXES, split_sample

MODEL_OPTIONS = ("model", "mtp_graft_from", "baseline", "ref_model", "teacher_model")
_DATASET_OPTIONS = ("dataset", "val_dataset")

MODELSCOPE = "ms:"
USE_MODELSCOPE = "USE_MODELSCOPE"
_REPOSITORY = rf"(?P<prefix>{MODELSCOPE})?" r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
_REVISION = r"(?:@(?P<revision>[\w][\w./-]*))?"
_SUBSET = r"(?::(?P<subset>[\w.-]*)(?:/(?P<split>[\w.-]+))?)?"
_MODEL = re.compile(_REPOSITORY + _REVISION)
_DATASET = re.compile(_REPOSITORY + _SUBSET + _REVISION)


@dataclass(frozen=True)
class HubName:
    """A name of a repository on the hub, as given by the user.

    Attributes:
        repository: `org/name`.
        revision: branch, tag or commit; empty: main.
        subset: subset of a dataset; empty: its default subset.
        split: split of a dataset.
        is_of_modelscope: whether the hub is ModelScope.
    """

    kind: Literal["model", "dataset"]
    repository: str
    revision: str = ""
    subset: str = ""
    split: str = "train"
    is_of_modelscope: bool = False

    @property
    def _prefix(self) -> str:
        return MODELSCOPE if self.is_of_modelscope else ""

    def __str__(self) -> str:
        text = self._prefix + self.repository
        if self.split != "train":
            text += f":{self.subset}/{self.split}"
        elif self.subset:
            text += f":{self.subset}"
        if self.revision:
            text += f"@{self.revision}"
        return text

    @property
    def key(self) -> str:
        """Key under which the commit of this name is recorded: `models/org/name@main`, without subset and split."""
        return f"{self._prefix}{self.kind}s/{self.repository}@{self.revision or 'main'}"

    def at(self, commit: str) -> Self:
        """Return the same name at a commit."""
        return replace(self, revision=commit)


def model_name(text: str) -> HubName | None:
    """Return the model on the hub that a text names; None if the text is a path."""
    found = _MODEL.fullmatch(text)
    if found is None or text.endswith(".gguf") or _is_path(text):
        return None
    is_of_modelscope = _is_of_modelscope(found)
    return HubName("model", found["repository"], found["revision"] or "", is_of_modelscope=is_of_modelscope)


def dataset_name(text: str) -> HubName | None:
    """Return the dataset on the hub that a text without #N names; None if the text is a file."""
    found = _DATASET.fullmatch(text)
    if found is None or text.endswith(DATA_SUFFIXES) or _is_path(text):
        return None
    return HubName(
        "dataset",
        found["repository"],
        found["revision"] or "",
        found["subset"] or "",
        found["split"] or "train",
        _is_of_modelscope(found),
    )


def _is_of_modelscope(found: re.Match[str]) -> bool:
    return bool(found["prefix"]) or os.environ.get(USE_MODELSCOPE, "").lower() in ("1", "true", "yes", "on")


def served_name(model: str, given: str | None = None) -> str:
    """Return the name by which clients of an engine's server select a model.

    Args:
        model: name on the hub or path. Without a name, engines would show the whole path to clients.
        given: name given by the user; None: `org/name` on the hub, or the last part of the path.
    """
    if given:
        return given
    if name := model_name(model):
        return name.repository
    path = Path(model)
    if path.name in ("", ".."):  # such as `.`
        path = path.resolve()
    return path.name


def models_in(args: Any) -> dict[str, str]:
    """Return the paths and names of models in a command's options, by option."""
    values = vars(args)
    return {option: values[option] for option in MODEL_OPTIONS if values.get(option)}


def dataset_names(args: Any) -> list[HubName]:
    """Return the datasets on the hub that a command's options name."""
    given = chain.from_iterable(vars(args).get(option, ()) for option in _DATASET_OPTIONS)
    names = [dataset_name(split_sample(text)[0]) for text in given]
    return [name for name in names if name is not None]


def hub_names(args: Any) -> list[HubName]:
    """Return all models and datasets on the hub that a command's options name."""
    models = [model_name(text) for text in models_in(args).values()]
    return [name for name in models if name is not None] + dataset_names(args)


def _is_path(text: str) -> bool:
    """Return whether a text is a path: it exists, or its parent directory exists and it contains neither @ nor `:`.

    The second case avoids a request to the hub for a path with a typo.
    """
    is_bare = not {"@", ":"} & set(text)
    return Path(text).exists() or (is_bare and Path(text).parent.exists())
