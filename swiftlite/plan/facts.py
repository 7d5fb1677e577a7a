"""Collect the values that rules check in addition to the options: config.json, run directories, the number of
processes.

No weights are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from swiftlite.args.commands import DoctorArgs, ExportArgs, PlannedRun, RmArgs, SftArgs
from swiftlite.args.config import near
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.json_file import read_json
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.hf_config import with_architecture_names
from swiftlite.families.architecture import Architecture
from swiftlite.families.drafters import DrafterOptions, with_drafter
from swiftlite.families.index import known_architecture
from swiftlite.families.resolved import own_settings_of
from swiftlite.families.reward_model import as_reward_model
from swiftlite.hub.commits import read_commits
from swiftlite.hub.model import description_of, is_gguf
from swiftlite.hub.name import model_name, models_in
from swiftlite.methods.index import command_of_run
from swiftlite.methods.method import Method
from swiftlite.plan.kernels import PLANNED_MACHINE, Machine
from swiftlite.plan.layout import layout_of, smallest_world_size


@dataclass(frozen=True)
class Facts:
    """The values that rules check in addition to the options."""

    world_size: int
    """Number of processes of the run."""
    hf_config: dict[str, Any]
    """The model's config.json, with the drafter of --drafter; for megatron rm, that of a reward model; empty if it is
    missing, which another rule reports."""
    directory: Path = Path()
    """Directory of the model's small files; not used without --model."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Model names and paths by option, without empty ones."""
    machine: Machine = Machine()
    """The machine of the run; default: a CPU."""

    @cached_property
    def architecture(self) -> Architecture | None:
        """The architecture that the family reads from config.json; None if it is incomplete."""
        return known_architecture(self.hf_config)

    @cached_property
    def heads(self) -> Heads:
        """The MTP heads in config.json."""
        return Heads.from_config(self.hf_config)

    @property
    def is_quantized(self) -> bool:
        """Whether config.json declares a quantization."""
        return Quantization.of(self.hf_config) is not None

    @property
    def max_pixels(self) -> int | None:
        """The maximum number of pixels of an image in the model's preprocessor_config.json; None without one."""
        try:
            content = read_json(self.directory / "preprocessor_config.json")
        except (OSError, ValueError):
            return None
        if not isinstance(content, dict):
            return None
        # Files have one of two forms; transformers prefers max_pixels if there are both.
        found = content.get("max_pixels")
        if found is None and isinstance(content.get("size"), dict):
            found = content["size"].get("longest_edge")
        return found if isinstance(found, int) else None

    def described(self, option: str) -> tuple[Path, dict[str, Any]]:
        """Return the directory and the config.json of the model that an option names. Missing files are downloaded.

        Raises:
            UserError: the model is not available.
        """
        directory = _directory_of(option, self.names.get(option, ""))
        return directory, read_hf_config(directory)


def read_facts(args: Any, world_size: int = 1, machine: Machine = Machine()) -> Facts:
    """Collect the facts for a command's rules.

    The model of `export --to_hf` is a run, so it is always a directory and never a name on the hub (`reads_run`). A
    planned run has the GPUs of `doctor --plan`.

    Raises:
        UserError: --model is a name on the hub that is not available.
    """
    if isinstance(args, PlannedRun):
        num_gpus = args.own.num_gpus or smallest_world_size(layout_of(args.run))
        return read_facts(args.run, num_gpus, PLANNED_MACHINE)
    names = models_in(args)
    if "model" not in names or _examines_file(args):
        return Facts(world_size, {}, names=names, machine=machine)
    is_of_run = isinstance(args, ExportArgs) and reads_run(args)
    directory = Path(args.model)
    if not is_of_run:
        directory = _directory_of("model", args.model)
    hf_config = read_hf_config(config_directory(directory))
    if isinstance(args, SftArgs):
        own = None
        if "mtp_graft_from" in names:
            own = own_settings_of(_directory_of("mtp_graft_from", names["mtp_graft_from"]))
        hf_config = with_drafter(hf_config, DrafterOptions.of(args, own))
    if isinstance(args, RmArgs):
        hf_config = as_reward_model(hf_config)
    return Facts(world_size, hf_config, directory, names, machine)


def _examines_file(args: Any) -> bool:
    """Return whether an engine examines a GGUF file, which can have any architecture."""
    return isinstance(args, DoctorArgs) and args.engine is not None and is_gguf(args.model or "")


def reads_run(args: ExportArgs) -> bool:
    """Return whether --model of an export is a run, and not a Hugging Face model."""
    if args.to_gguf:
        path = Path(args.model)
        return is_run(path) or (path.name.startswith("checkpoint-") and is_run(path.parent))
    return args.to_hf or not (args.to_mcore or args.quant_method)


def _directory_of(option: str, name: str) -> Path:
    """Return the directory of the model that an option names (see `description_of`).

    Raises:
        UserError: the model is not available. The error names the option, because the name can be a path with a typo.
    """
    try:
        return description_of(name)
    except UserError as error:
        raise UserError(f"--{option} {name}: {error.problem}", error.hint, error.exit_code) from None


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face model directory; {} if it is missing or not an object."""
    try:
        content = read_json(directory / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return with_architecture_names(content, directory)


def config_directory(model: Path) -> Path:
    """Return the directory of a model's config.json. For a run or its checkpoint-N, this is source/."""
    if (model / "config.json").exists():
        return model
    for run in (model, model.parent):
        if is_run(run):
            return run / "source"
    return model


def run_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoint-N directories of a run, oldest first."""
    directories = [path for path in directory.glob("checkpoint-*") if path.is_dir()]
    found = [path for path in directories if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def is_run(path: Path) -> bool:
    """Return whether a directory is a training run or an output of `export --to_mcore`.

    Both have source/config.json.
    """
    return (path / "source" / "config.json").is_file()


def method_of_run(run: Path) -> Method | None:
    """Return the training method of the command that made a run (or the run of a checkpoint).

    If several methods share the command, the first of them is returned.

    Returns:
        None if args.json cannot be read.
    """
    if run.name.startswith("checkpoint-"):
        run = run.parent
    try:
        return command_of_run(read_json(run / "args.json"))
    except (OSError, ValueError, TypeError):
        return None


def near_path(path: Path) -> str:
    """Return a hint for a path that does not exist: a path in the same directory with almost the same name."""
    if not path.parent.is_dir():
        return f"the directory {path.parent} does not exist either"
    suggestion = near(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    # Extensions are ignored, so that nosuch.jsonl and ok.jsonl are not similar.
    if not suggestion or not near(path.stem, [Path(suggestion).stem]):
        return ""
    return f"did you mean {path.parent / suggestion}?"


def model_of_run(run: Path) -> str | None:
    """Return the Hugging Face model that a run (or a checkpoint's run) started from; None if it no longer exists.

    A name on the hub includes the commit that the run used.

    Raises:
        UserError: the model is on the hub, and is available neither there nor in the cache.
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
    if not (description_of(model) / "config.json").is_file():
        return None
    return model
