"""Define the part of a checkpoint that is not a tensor, which trainer_state.json contains."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic does not accept typing's before Python 3.12

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.files import AdapterBase
from swiftlite.plan.trunk import Trunk

STATE_FILE = "trainer_state.json"
VERSION = 1
USE_ANOTHER = "use another checkpoint; --resume renames a damaged one, and uses the newest one that is whole"

_Count = Annotated[int, Field(ge=0)]
_Entry = Annotated[list[_Count], Field(min_length=3, max_length=3)]
"""A `packing.StreamSample`: number of the row, piece of the row, and length."""
_Digest = Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]


class StreamState(TypedDict):
    """The position of --streaming in its files, from `Stream.state` and `StreamedSteps.state`."""

    num_read: _Count
    piece: _Count
    rows_per_epoch: list[_Count]
    num_kept: list[_Count]
    num_bad: _Count
    waiting: list[_Entry]
    ready: list[list[_Entry]]
    files: NotRequired[list[tuple[_Count, _Digest]]]
    """For each file of --dataset, the number of rows that were read, and their digest. Checkpoints of earlier releases
    have the sizes of the files instead, as a part of `DataState.rows`."""


class BadStepsState(TypedDict):
    """The values that --skip_bad_steps compares steps with, and its counts, from `BadSteps.state`."""

    recent: dict[str, list[float]]
    in_a_row: _Count
    num_skipped: _Count


@dataclass(frozen=True)
class Consumed:
    """The numbers of tokens and samples in all completed steps."""

    tokens: _Count = 0
    samples: _Count = 0

    def and_also(self, tokens: int, samples: int) -> "Consumed":
        """Return the numbers after one more step."""
        return Consumed(self.tokens + tokens, self.samples + samples)

    def metrics(self) -> dict[str, int]:
        """Return the numbers for metrics.jsonl and run_report.json."""
        return {"total_tokens": self.tokens, "total_samples": self.samples}


class DataState(TypedDict):
    """Digests of the data, from `phases.data_state`."""

    tokenizer: str
    rows: str


@dataclass(frozen=True)
class CheckpointState:
    """The state of a run at a checkpoint, except tensors.

    Attributes:
        step: number of completed steps.
        images: whether the run computed the vision tower.
        data: None in checkpoints of earlier releases.
        stream: position of --streaming; None without it.
        bad_steps: state of --skip_bad_steps; None if the run did not use it.
        consumed: zeros in checkpoints of earlier releases.
        lora: adapters of the model; None without adapters.
        base: the model that adapters belong to, or from which an export reads a frozen trunk.
        streams_trunk: whether the checkpoint has no decoder layers, so that exports read those of `base`.
        quantized_trunk: whether exports keep the files of the quantized trunk of `base`.
        version: version of this format.
    """

    step: _Count
    mtp_num_layers: _Count
    torch_dtype: Literal["bfloat16", "float16", "float32", "float64"]
    images: bool = False
    data: DataState | None = None
    stream: StreamState | None = None
    bad_steps: BadStepsState | None = None
    consumed: Consumed = Consumed()
    lora: Lora | None = None
    base: AdapterBase | None = None
    streams_trunk: bool = False
    quantized_trunk: bool = False
    version: int = VERSION

    @classmethod
    def read(cls, checkpoint: Path) -> "CheckpointState":
        """Read the state of a checkpoint.

        Raises:
            UserError: the file is missing or damaged, or a later release wrote it.
        """
        path = checkpoint / STATE_FILE
        try:
            # As JSON text, because strict validation accepts lists as tuples only there.
            state = _FORMAT.validate_json(json.dumps(_in_this_version(read_json(path), path)), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the whole file"
            raise UserError(f"{path} is damaged: {where}: {first['msg']}", USE_ANOTHER) from None
        except FileNotFoundError:
            raise UserError(f"{path} is missing", USE_ANOTHER) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}", USE_ANOTHER) from None
        number = checkpoint.name.removeprefix("checkpoint-")
        # Only of names like that of a run's own checkpoint: a copy can have any other name.
        if number.isdigit() and number != checkpoint.name and int(number) != state.step:
            raise UserError(f"{path} is damaged: it has step {state.step}, its directory {number}", USE_ANOTHER)
        return state

    @staticmethod
    def has_version(checkpoint: Path) -> bool:
        """Return whether the state has a version, as in all checkpoints since the first releases."""
        content = read_json(checkpoint / STATE_FILE)
        return isinstance(content, dict) and "version" in content

    @property
    def num_updates(self) -> int:
        """Number of updates of the optimizer: the steps that were not skipped."""
        return self.step - (self.bad_steps["num_skipped"] if self.bad_steps else 0)

    @property
    def trunk(self) -> Trunk:
        """The trunk of the run, without its cache."""
        return Trunk(holds_layers=not self.streams_trunk, keeps_files=self.quantized_trunk)

    def to_json(self) -> str:
        """Return the content of trainer_state.json."""
        return json.dumps(asdict(self), indent=2)


_FORMAT = TypeAdapter(CheckpointState)


def _in_this_version(content: Any, path: Path) -> Any:
    """Return the content of a file in the format of this release.

    The first releases wrote no version. In their files, a base without adapters is that of a streamed trunk if nothing
    else is stated.

    Raises:
        UserError: a later release wrote the file.
    """
    if not isinstance(content, dict):
        return content
    version = content.get("version", 0)
    if isinstance(version, int) and version > VERSION:  # before its fields are validated, which may be others
        raise UserError(f"{path} has version {version}, later than {VERSION}", "update swiftlite")
    if version != 0:
        return content
    has_frozen_trunk = content.get("base") is not None and content.get("lora") is None
    return {"streams_trunk": has_frozen_trunk} | content | {"version": VERSION}
