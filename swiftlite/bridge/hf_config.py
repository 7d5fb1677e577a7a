"""config.json: read it, and change single keys of it.

Engines read keys that no class of ours or of transformers knows, so none stands between: every key that is not declared
as changed keeps its value and its place.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftlite.bridge.rows import HfConfig
from swiftlite.durable import write_durably
from swiftlite.errors import UserError
from swiftlite.json_file import read_json

REMOVE: Any = object()  # as a change: the key is taken out


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """The content of a model directory's config.json.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    path = Path(hf_dir) / "config.json"
    try:
        hf_config = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{hf_dir}: no config.json", "give the directory of a Hugging Face model") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "copy it from the model's source again") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(hf_config, dict):
        raise UserError(f"{path}: not a JSON object")
    return hf_config


def dtype_change(hf_config: HfConfig, dtype: str) -> dict[str, Any]:
    """The change that declares another dtype, under the key that this config uses (formerly `torch_dtype`)."""
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    return {} if hf_config.get(key) == dtype else {key: dtype}


def quantization_change(hf_config: HfConfig) -> dict[str, Any]:
    """The change for a model that was read from a quantised checkpoint and is written without quantisation."""
    return {"quantization_config": REMOVE} if "quantization_config" in hf_config else {}


def write_patched(source_dir: str | Path, out_dir: str | Path, changes: Mapping[str, Any]) -> list[str]:
    """Write config.json with some top-level keys changed, added or removed (REMOVE); if none is, byte for byte.

    Returns:
        The difference, one line per key that really changed: `key: old -> new`.
    """
    hf_config, difference = patch(read_config(source_dir), changes)
    if difference:
        content = (json.dumps(hf_config, indent=2) + "\n").encode()  # as transformers writes it
    else:
        content = (Path(source_dir) / "config.json").read_bytes()
    write_durably(Path(out_dir) / "config.json", content)
    return difference


def patch(hf_config: HfConfig, changes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Change, add or remove top-level keys. The others stay as they are, in their order; a new one comes last.

    Args:
        changes: new values by key; REMOVE takes a key out.

    Returns:
        The new content, and one line per key whose value differs from before.
    """
    patched = {key: value for key, value in {**hf_config, **changes}.items() if value is not REMOVE}
    changed = [key for key in changes if hf_config.get(key, REMOVE) != patched.get(key, REMOVE)]
    return patched, [f"{key}: {_value(hf_config, key)} -> {_value(patched, key)}" for key in sorted(changed)]


def _value(hf_config: HfConfig, key: str) -> str:
    return json.dumps(hf_config[key], ensure_ascii=False) if key in hf_config else "(none)"
