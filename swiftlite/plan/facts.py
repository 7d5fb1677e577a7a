"""What rules look at: the model's config.json, directories of runs, the number of processes; never weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftlite.args.commands import ExportArgs
from swiftlite.args.config import near
from swiftlite.bridge.hf_config import as_asked
from swiftlite.families.architecture import Architecture
from swiftlite.families.index import known_architecture
from swiftlite.heads import Heads
from swiftlite.hub.commits import read_commits
from swiftlite.hub.model import description_of
from swiftlite.hub.name import model_name, models_in
from swiftlite.json_file import read_json
from swiftlite.methods.index import command_of_run
from swiftlite.methods.method import Method


@dataclass(frozen=True)
class Facts:
    """What rules look at beside the options."""

    world_size: int
    """Processes of the run."""
    hf_config: dict[str, Any]
    """The model's config.json; empty when there is none to read (another rule says so)."""
    directory: Path = Path()
    """The model's small files, or where they would lie; of no meaning without --model."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the options say of models, by option; none that is empty."""

    @property
    def architecture(self) -> Architecture | None:
        """What its family reads from it; None where that is too little to look at."""
        return known_architecture(self.hf_config)

    @property
    def heads(self) -> Heads:
        """The MTP heads that it promises."""
        return Heads.from_config(self.hf_config)

    def described(self, option: str) -> tuple[Path, dict[str, Any]]:
        """The directory and config.json of the model that this option names, which are asked for where a rule looks.

        Raises:
            UserError: it is a name, and cannot be had.
        """
        directory = description_of(self.names.get(option, ""))
        return directory, read_hf_config(directory)


def read_facts(args: Any, world_size: int = 1) -> Facts:
    """Read what a command's rules look at.

    A run that `export --to_hf` reads is never a name of the hub.

    Raises:
        UserError: --model is a name, and cannot be had.
    """
    names = models_in(args)
    if "model" not in names:
        return Facts(world_size, {}, names=names)
    is_of_run = isinstance(args, ExportArgs) and not args.to_mcore
    directory = Path(args.model) if is_of_run else description_of(args.model)
    return Facts(world_size, read_hf_config(config_directory(directory)), directory, names)


def read_hf_config(directory: Path) -> dict[str, Any]:
    """config.json of a Hugging Face model directory; {} when it is absent or not an object."""
    try:
        content = read_json(directory / "config.json")
    except (OSError, ValueError):
        return {}
    return as_asked(content, directory) if isinstance(content, dict) else {}


def config_directory(model: Path) -> Path:
    """Where the model's config.json lies: a run and its checkpoint-N keep their source's in source/."""
    if (model / "config.json").exists():
        return model
    for run in (model, model.parent):
        if is_run(run):
            return run / "source"
    return model


def run_checkpoints(directory: Path) -> list[Path]:
    """checkpoint-N directories of a run, oldest first."""
    directories = [path for path in directory.glob("checkpoint-*") if path.is_dir()]
    found = [path for path in directories if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def is_run(path: Path) -> bool:
    """Whether this is an sft run, or what `export --to_mcore` wrote: both keep their model's config.json in source/."""
    return (path / "source" / "config.json").is_file()


def method_of_run(run: Path) -> Method | None:
    """Return the first method of the command that made this run, or the run of this checkpoint.

    Returns:
        None where args.json cannot be read.
    """
    if run.name.startswith("checkpoint-"):
        run = run.parent
    try:
        return command_of_run(read_json(run / "args.json"))
    except (OSError, ValueError, TypeError):
        return None


def near_path(path: Path) -> str:
    """A hint for a path that does not exist: the file or directory beside it with almost the same name."""
    if not path.parent.is_dir():
        return f"the directory {path.parent} does not exist either"
    suggestion = near(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    # The same ending alone makes no name near: nosuch.jsonl is not ok.jsonl.
    if not suggestion or not near(path.stem, [Path(suggestion).stem]):
        return ""
    return f"did you mean {path.parent / suggestion}?"


def model_of_run(run: Path) -> str | None:
    """The Hugging Face model that a run, or the run of a checkpoint, began with, if it is still there; a name of the
    hub with the run's own commit.

    Raises:
        UserError: it is a name, and the hub or its cache does not have it.
    """
    if run.name.startswith("checkpoint-"):
        run = run.parent
    try:
        model = read_json(run / "args.json")["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    name = model_name(model)
    if name is not None:
        model = str(name.at(read_commits(run).get(name.key, name.revision)))
    return model if (description_of(model) / "config.json").is_file() else None
