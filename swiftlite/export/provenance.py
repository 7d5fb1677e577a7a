"""Read the model, data and commits that a run was made from, which its args.json and commits.json contain."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.args.data_file import split_sample
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.hub.commits import read_commits
from swiftlite.hub.name import HubName, dataset_name, model_name


@dataclass(frozen=True)
class Provenance:
    """Model and data of a run, as names on the hub or as paths.

    Attributes:
        commits: commits of the names on the hub, by `HubName.key` (such as `models/org/name@main`).
        steps: number of steps of the checkpoint.
    """

    model: HubName | str
    datasets: tuple[HubName | str, ...]
    commits: Mapping[str, str]
    steps: int
    heads_only: bool


def provenance_of(checkpoint: Path) -> Provenance:
    """Read the model and the data of the run that wrote a checkpoint.

    Raises:
        UserError: the run's args.json cannot be read; outputs of `export --to_mcore` have no args.json.
    """
    run = checkpoint.parent
    try:
        args: dict[str, Any] = read_json(run / "args.json")
        model = str(args["model"])
        given = [str(name) for name in args["dataset"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--push_to_hub requires {run / 'args.json'}, which is missing or invalid",
            "export without it, then upload: hf upload ORG/NAME DIR",
        ) from None
    return Provenance(
        model=_of_hugging_face(model_name(model)) or model,
        datasets=tuple(_of_hugging_face(dataset_name(split_sample(name)[0])) or name for name in given),
        commits=read_commits(run),
        steps=int(checkpoint.name.removeprefix("checkpoint-")),
        heads_only=args.get("mtp_mode") == "heads_only",
    )


def _of_hugging_face(name: HubName | None) -> HubName | None:
    """Return the name unless it is of ModelScope: a model card links only to Hugging Face."""
    return None if name is None or name.is_of_modelscope else name
