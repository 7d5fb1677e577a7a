"""Read config.json and change single keys.

Every key that is not changed explicitly keeps its value and position, because engines read keys that swiftlite and
transformers do not know.

Vision-language models contain a language model, whose settings are under `text_config`. This module moves these keys to
the top level, where all other code reads them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.heads import DRAFTER_KEY, GEMMA4_ASSISTANTS, KEYS, REMOVE, depth_key, kind_of
from swiftlite.base.json_file import parse_json, read_json
from swiftlite.bridge.rows import HfConfig

TENSORS_FILE = "tensors.json"
"""File in `source/` of a run with dtype and shape of each tensor of the model that the run started from, by HF name."""
DRAFT_FOLDER = "draft"
"""Folder of an export with the heads, or another drafter, as an engine reads a separate draft model."""
HEADS_FILE = f"{DRAFT_FOLDER}/model-mtp.safetensors"
"""File with the heads of an export that has this folder, under the names of the family. Engines do not read it."""
OWN_PREFIXES: dict[str, str] = dict.fromkeys(GEMMA4_ASSISTANTS, "mtp.assistant.")
"""By `model_type`: drafters that are published in a directory of their own, and the prefix that the names of their
tensors get, because they are names of the trunk's tensors as well."""
_TEXT = "text_config"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt can describe the quantization, in addition to config.json or instead."""
_MOST_HEADER_BYTES = 100_000_000
_GEMMA3_TEXT = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262_208,
}
_DEFAULTS = {"gemma3": _GEMMA3_TEXT}
"""Settings that published files do not state under `text_config`, as in transformers' classes, which engines use."""
_LAYERS_OF_HEADS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
"""Keys with the kinds of layers in MTP heads of Nemotron-H."""
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """Read a model directory's config.json. Keys under `text_config` are moved to the top level.

    If config.json does not declare the number of MTP layers, as for Qwen3-Next-80B, the `mtp.layers.*` tensors are
    counted. NVIDIA's ModelOpt can describe the quantization in a separate file, as for DeepSeek-V3.2-NVFP4; its content
    is then under `quantization_config`.

    Raises:
        UserError: the file is missing or not a JSON object.
    """
    return with_architecture_names(_read(hf_dir), Path(hf_dir))


def with_architecture_names(content: HfConfig, hf_dir: Path) -> dict[str, Any]:
    """Return the content of a config.json in the form that `read_config` returns, with keys under `text_config` at the
    top level.
    """
    hf_config = _unwrapped(content)
    key = depth_key(hf_config)
    # Qwen3-Next was published without a key, and its heads would be dropped as tensors that nothing declares.
    if key not in hf_config:
        depth = _count_heads(_tensor_names(hf_dir))
        if depth:
            hf_config[key] = depth
    layers = hf_config.get("layers_block_type")
    if "num_hidden_layers" not in hf_config and isinstance(layers, list):  # of Nemotron 3 Ultra
        hf_config["num_hidden_layers"] = len(layers)
    # config.json has precedence over ModelOpt's own file.
    if "quantization_config" not in hf_config and (hf_dir / MODELOPT_FILE).is_file():
        hf_config["quantization_config"] = _modelopt_quantization(hf_dir / MODELOPT_FILE)
    quantization = hf_config.get("quantization_config")
    if isinstance(quantization, dict) and "quant_method" not in quantization and _is_of_modelopt(quantization):
        hf_config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return hf_config


def _is_of_modelopt(quantization: HfConfig) -> bool:
    """Return whether ModelOpt wrote a quantization_config, which has no quant_method in some releases, such as 0.31."""
    producer = quantization.get("producer")
    return isinstance(producer, dict) and producer.get("name") == "modelopt"


def _modelopt_quantization(path: Path) -> dict[str, Any]:
    """Return the content of ModelOpt's file in the form of a quantization_config, as engines read it.

    Raises:
        UserError: the file is damaged.
    """
    try:
        content = dict(read_json(path)["quantization"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {reason_of(error)}", "copy it from the model's source again") from None
    # hf_quant_config.json and a quantization_config have other names for the same settings.
    content["ignore"] = content.pop("exclude_modules", None) or []
    if content.pop("kv_cache_quant_algo", None) == "FP8":
        content["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {"quant_method": "modelopt", **content}


def _unwrapped(content: HfConfig) -> dict[str, Any]:
    """Return the config with the keys under `text_config` at the top level.

    The output layer belongs to the whole model, so `tie_word_embeddings` outside has precedence, as in transformers 5
    and vLLM: transformers writes the default of the language model's class under `text_config`.
    """
    text = content.get(_TEXT)
    if not isinstance(text, dict):
        return dict(content)
    own = {key: content[key] for key in ("model_type", "architectures", "tie_word_embeddings") if key in content}
    return {**_DEFAULTS.get(str(content.get("model_type")), {}), **content, **text, **own}


def own_prefix(hf_dir: Path) -> str:
    """Return the prefix of the names of a directory's tensors (`OWN_PREFIXES`); empty if it is not that of a
    drafter."""
    if not (hf_dir / "config.json").is_file():
        return ""
    return OWN_PREFIXES.get(str(_read(hf_dir).get("model_type")), "")


def has_tensors(hf_dir: Path, prefix: str) -> bool:
    """Return whether names of a model's tensors start with `prefix`; in `source/` of a run, those of its model."""
    names = _tensor_names(hf_dir)
    if not names and (hf_dir / TENSORS_FILE).is_file():
        names = list(read_json(hf_dir / TENSORS_FILE))
    return any(name.startswith(prefix) for name in names)


def _count_heads(names: Sequence[str]) -> int:
    """Return the number of MTP heads in a model with these tensors.

    Qwen3-Next's heads are numbered. In Nemotron-H, the numbers are those of the layers of one head,
    the first of which has a projection.
    """
    projections = [name for name in names if name.startswith("mtp.") and name.endswith(".eh_proj.weight")]
    matches = [_MTP_LAYER.match(name) for name in names]
    numbers = [int(match.group(1)) for match in matches if match]
    return len(projections) or max(numbers, default=-1) + 1


def _tensor_names(hf_dir: Path) -> list[str]:
    """Return a model's tensor names, from the index or the header of a single file; empty if neither is valid."""
    try:
        if (hf_dir / _INDEX).is_file():
            return [str(name) for name in read_json(hf_dir / _INDEX)["weight_map"]]
        with (hf_dir / _SINGLE).open("rb") as file:
            # By hand, because this module is imported without torch. A damaged file can state any length.
            length = int.from_bytes(file.read(8), "little")
            return [str(name) for name in parse_json(file.read(min(length, _MOST_HEADER_BYTES)).decode())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _read(hf_dir: str | Path) -> dict[str, Any]:
    path = Path(hf_dir) / "config.json"
    try:
        hf_config = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{hf_dir}: no config.json", "use the directory of a Hugging Face model") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "copy it from the model's source again") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(hf_config, dict):
        raise UserError(f"{path}: not a JSON object")
    return hf_config


def dtype_change(hf_config: HfConfig, dtype: str) -> dict[str, Any]:
    """Return the change of config.json that declares another dtype, under the key that it uses (`dtype` or
    `torch_dtype`).
    """
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    if hf_config.get(key) == dtype:
        return {}
    return {key: dtype}


def quantization_change(hf_config: HfConfig) -> dict[str, Any]:
    """Return the change of config.json that removes the quantization of a checkpoint."""
    if "quantization_config" not in hf_config:
        return {}
    return {"quantization_config": REMOVE}


def write_patched(source_dir: str | Path, out_dir: str | Path, changes: Mapping[str, Any]) -> list[str]:
    """Write config.json with some keys changed, added or removed (value REMOVE).

    Without changes, the file is copied byte for byte. Keys under `text_config` are changed in place, and new keys are
    added next to them.

    Returns:
        The difference, one line per key that changed: `key: old -> new`.
    """
    hf_config, difference = _patch_wrapped(_read(source_dir), changes)
    if difference:
        content = (json.dumps(hf_config, indent=2) + "\n").encode()  # the format of transformers
    else:
        content = (Path(source_dir) / "config.json").read_bytes()
    atomic_write(Path(out_dir) / "config.json", content)
    quantization = changes.get("quantization_config")
    if (Path(source_dir) / MODELOPT_FILE).is_file() and isinstance(quantization, dict):
        atomic_write(Path(out_dir) / MODELOPT_FILE, _modelopt_file(Path(source_dir) / MODELOPT_FILE, quantization))
    return difference


def _modelopt_file(source: Path, quantization: Mapping[str, Any]) -> bytes:
    """Return ModelOpt's file with the modules that a quantization_config excludes: TensorRT-LLM reads this file."""
    content = read_json(source)
    content["quantization"]["exclude_modules"] = quantization["ignore"]
    return (json.dumps(content, indent=4) + "\n").encode()


def _patch_wrapped(hf_config: HfConfig, changes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Apply `patch` to a config.json whose settings can be under `text_config`."""
    text = hf_config.get(_TEXT)
    if not isinstance(text, dict):
        return patch(hf_config, changes)
    # transformers writes some keys, such as tie_word_embeddings, both outside and under text_config: both are changed.
    wrapper_changes = {key: value for key, value in changes.items() if key in hf_config}
    text_changes = {key: value for key, value in changes.items() if key in text or key not in hf_config}
    new_text, text_difference = patch(text, text_changes)
    patched, difference = patch(hf_config, wrapper_changes)
    if text_difference:
        patched[_TEXT] = new_text
    return patched, difference + [f"{_TEXT}.{line}" for line in text_difference]


def patch(hf_config: HfConfig, changes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Change, add or remove top-level keys; other keys keep their value and position, and new keys are last.

    Args:
        changes: new values by key; REMOVE removes a key.

    Returns:
        The new content, and one line per key whose value differs from before.
    """
    patched = {key: value for key, value in {**hf_config, **changes}.items() if value is not REMOVE}
    changed = [key for key in changes if hf_config.get(key, REMOVE) != patched.get(key, REMOVE)]
    return patched, [f"{key}: {_value(hf_config, key)} -> {_value(patched, key)}" for key in sorted(changed)]


def _value(hf_config: HfConfig, key: str) -> str:
    if key not in hf_config:
        return "(none)"
    if key == DRAFTER_KEY and isinstance(hf_config[key], dict):  # some contain a whole config.json
        return f"{kind_of(hf_config)}, layers {hf_config[key].get('layers')}"
    return json.dumps(hf_config[key], ensure_ascii=False)


def digest_of_trunk(hf_config: Mapping[str, Any]) -> str:
    """Compute the sha256 of the trunk's settings in a config.json.

    Keys about heads, precision and the program that wrote the file are excluded.
    """
    # These may differ between the copy of a model that a run started from and the one that it is compared with.
    others = (*KEYS, *_LAYERS_OF_HEADS, "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")
    said = {key: value for key, value in hf_config.items() if key not in others}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
