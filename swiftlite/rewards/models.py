"""Check directories of reward models: classifiers with one label, as `swiftlite megatron rm` exports them."""

import hashlib
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json

_CLASSIFIER = "ForSequenceClassification"
TRAIN_ONE = "give a directory from swiftlite megatron rm and export --to_hf, or another classifier with one label"


def check_directory(directory: str | Path) -> None:
    """Check that a directory declares a reward model, without reading its weights.

    Raises:
        UserError: it does not.
    """
    given, path = f"--reward_model {directory}", Path(directory).expanduser()
    try:
        names = dict(read_json(path / "config.json")).get("architectures") or []
    except (OSError, ValueError, TypeError):
        raise UserError(f"{given} has no readable config.json", TRAIN_ONE, exit_code=2) from None
    if not any(str(name).endswith(_CLASSIFIER) for name in names):
        found = ", ".join(map(str, names)) or "no architecture"
        problem = f"{given} is not a reward model: config.json declares {found}, not a class ...{_CLASSIFIER}"
        raise UserError(problem, TRAIN_ONE, exit_code=2)
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{given} has no *.safetensors file", "save the model as safetensors", exit_code=2)


def identity_of(directory: str | Path) -> str:
    """Return a sha256 that changes if the model changes: of its small files, and of size and time of its weights."""
    sha = hashlib.sha256()
    for path in sorted(path for path in Path(directory).expanduser().iterdir() if path.is_file()):
        sha.update(f"{path.name}\n".encode())
        if path.suffix == ".safetensors":
            sha.update(f"{path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
        else:
            sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()
