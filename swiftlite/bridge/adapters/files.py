"""Write and read directories of adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

swiftlite adds two things. `mtp_heads.safetensors` contains the complete MTP heads, which PEFT's format cannot
represent. The metadata of `adapter_model.safetensors` contains the digest of the base model, so that another base model
is detected.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.json_file import read_json
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.rows import HF_MAGNITUDE, leaf_of
from swiftlite.bridge.hf_config import digest_of_trunk, read_config
from swiftlite.bridge.tensors import ADAPTER_CONFIG, Checkpoint, some

TENSORS_FILE = "adapter_model.safetensors"
HEADS_FILE = "mtp_heads.safetensors"
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", f".{HF_MAGNITUDE}"
_DIGEST = "base_sha256"
_PROMISE = "config"
# Options of PEFT's LoRA that are not supported, with their default values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}


@dataclass(frozen=True)
class AdapterBase:
    """The base model of adapters.

    Attributes:
        model: a directory or a name on the hub.
        sha256: digest of the base model's directory, as computed by `digest_of`.
    """

    model: str
    sha256: str


def digest_of(hf_dir: str | Path) -> str:
    """Return a sha256 of all tensors of a Hugging Face directory and of the trunk's settings in config.json.

    The digest does not depend on how tensors are distributed over files.
    """
    with Checkpoint(hf_dir) as checkpoint:
        return combine_digests(hf_dir, {key: digest_of_tensor(checkpoint, key) for key in checkpoint.entries})


def digest_of_tensor(checkpoint: Checkpoint, key: str) -> str:
    """Return the sha256 of a tensor's dtype, shape and bytes."""
    entry = checkpoint.entries[key]
    digest = hashlib.sha256(f"{entry.dtype} {list(entry.shape)}\n".encode())
    for chunk in checkpoint.chunks(key):
        digest.update(chunk.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def combine_digests(hf_dir: str | Path, digests: Mapping[str, str]) -> str:
    """Return the result of `digest_of` for a directory, given the digests of its tensors. Several processes can compute
    these digests."""
    # Settings too: equal tensors with another rope_theta are another model.
    digest = hashlib.sha256(digest_of_trunk(read_config(hf_dir)).encode())
    for key in sorted(digests):
        digest.update(f"{key} {digests[key]}\n".encode())
    return digest.hexdigest()


def write_adapter(
    directory: Path,
    lora: Lora,
    base: AdapterBase,
    tensors: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    task_type: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM",
) -> None:
    """Write the two files that PEFT reads.

    Args:
        tensors: adapter tensors (A, B and magnitudes) by the HF names of `adapter_rows`.
        saved: tensors that were trained in full, by HF name.
        task_type: kind of model that PEFT adds the adapters to: a language model, or a reward model.
    """
    modules = {key.removesuffix(_A) for key in tensors if key.endswith(_A)}
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base.model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.is_rank_stabilized,
        "use_dora": lora.has_magnitudes,
        # Last components, because PEFT adapts every module whose name ends with one of them.
        "target_modules": sorted({leaf_of(module) for module in modules}),
        # Full names, because PEFT matches name suffixes, and many names end in "norm".
        "modules_to_save": sorted({key.rpartition(".")[0] for key in saved}) or None,
        "bias": "none",
        "inference_mode": True,
    }
    atomic_write(directory / ADAPTER_CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    # safetensors refuses tensors with gaps between their rows.
    content = {_PREFIX + key: tensor.contiguous() for key, tensor in (*tensors.items(), *saved.items())}
    atomic_write(directory / TENSORS_FILE, save(content, metadata={"format": "pt", _DIGEST: base.sha256}))


def write_heads(
    directory: Path, base: AdapterBase, tensors: Mapping[str, torch.Tensor], heads: Heads, model_type: str
) -> None:
    """Write MTP heads into a directory of adapters.

    Args:
        tensors: tensors of the heads, by HF name.
    """
    promise = heads.config_change({"model_type": model_type})
    metadata = {"format": "pt", _DIGEST: base.sha256, _PROMISE: json.dumps(promise)}
    atomic_write(directory / HEADS_FILE, save(dict(tensors), metadata=metadata))


@dataclass(frozen=True)
class SavedAdapter:
    """A directory of adapters, as read by `read_adapter`.

    Attributes:
        rank: number of rows of each A.
        scaling: factor of the product B A that is added to a weight.
        pairs: A and B of each module, by HF name.
        magnitudes: DoRA magnitudes of each module; empty for LoRA.
        saved: tensors of the trunk that were trained in full, by HF name.
        heads: tensors of the MTP heads, by HF name; empty without heads.
        promise: the keys and values of config.json that declare the heads.
        base_sha256: digest of the base model; empty if it was not recorded.
    """

    directory: Path
    rank: int
    scaling: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    magnitudes: Mapping[str, torch.Tensor]
    saved: Mapping[str, torch.Tensor]
    heads: Mapping[str, torch.Tensor]
    promise: Mapping[str, Any]
    base_sha256: str

    def heads_of(self, hf_config: Mapping[str, Any]) -> Heads:
        """Return the MTP heads of the base model with these adapters.

        These are the heads in this directory, or those of the base model if the directory has no heads.

        Args:
            hf_config: content of the base model's config.json.
        """
        if not self.heads:
            return Heads.from_config(hf_config)
        return Heads.from_config({"model_type": hf_config.get("model_type"), **self.promise})

    def check_base(self, hf_dir: Path) -> None:
        """Check that a directory is the base model of these adapters.

        Raises:
            UserError: the digest of the directory is not `base_sha256`.
        """
        if self.base_sha256 and digest_of(hf_dir) != self.base_sha256:
            made_for = read_json(self.directory / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise UserError(
                f"--adapters {self.directory} were not trained on {hf_dir}: its tensors or config.json differ",
                f"use the model that they were trained on: {made_for}",
            )

    def apply(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the base model merged with its adapter, summed in float32, in the tensor's dtype."""
        if key in self.saved:
            return self.saved[key].to(tensor.dtype)
        module = key.removesuffix(".weight")
        pair = self.pairs.get(module)
        if pair is None:
            return tensor
        # In bfloat16, the small product would be rounded before the sum.
        a, b = (each.float() for each in pair)
        whole = tensor.float() + (b @ a) * self.scaling
        magnitude = self.magnitudes.get(module)
        if magnitude is not None:
            # Rounded like PEFT's norm (peft/tuners/lora/dora.py: get_weight_norm), by which its magnitude is divided.
            lengths = torch.linalg.norm(whole, dim=1).to(magnitude.dtype).float()
            whole = whole * (magnitude.float() / lengths)[:, None]
        return whole.to(tensor.dtype)

    def check_places(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the base model has a tensor of the right shape for each adapter.

        Args:
            shapes: shapes of the base model's tensors.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        wanted = {key: tuple(tensor.shape) for key, tensor in self.saved.items()}
        wanted |= {f"{module}.weight": (b.size(0), a.size(1)) for module, (a, b) in self.pairs.items()}
        problems = []
        for key, shape in wanted.items():
            if key not in shapes:
                problems.append(f"the model has no {key}")
            elif tuple(shapes[key]) != shape:
                problems.append(f"{key} has shape {tuple(shapes[key])} in the model and {shape} in the adapters")
        if problems:
            raise UserError(
                f"--adapters {self.directory}:\n  " + "\n  ".join(some(problems)),
                "use the model that the adapters were trained on",
            )


def read_adapter(directory: Path) -> SavedAdapter:
    """Read a directory of adapters in PEFT's format.

    Raises:
        UserError: the directory is missing or damaged, or uses options of PEFT that are not supported.
    """
    try:
        config = read_json(directory / ADAPTER_CONFIG)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1:
            raise ValueError(f"r is {rank}")
        with safe_open(directory / TENSORS_FILE, "pt") as file:
            digest = (file.metadata() or {}).get(_DIGEST, "")
            tensors = {key.removeprefix(_PREFIX): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        heads, promise, heads_digest = _read_heads(directory / HEADS_FILE)
        # The two files of different exports can be in one directory after copying.
        if digest and heads_digest and digest != heads_digest:
            raise ValueError(f"{HEADS_FILE} and {TENSORS_FILE} belong to different base models")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(
            f"--adapters {directory} cannot be read: {type(error).__name__}: {error}",
            f"use a directory with {ADAPTER_CONFIG} and {TENSORS_FILE}, from export --merge_lora false or PEFT",
        ) from None
    # Ignored, each of these options would silently give other weights than PEFT.
    if unknown := [f"{key} {config[key]!r}" for key, plain in _PLAIN.items() if config.get(key, plain[0]) not in plain]:
        raise UserError(
            f"--adapters {directory}: {', '.join(unknown)} is not supported", "merge them with PEFT: merge_and_unload()"
        )
    lora = Lora(rank, alpha, is_rank_stabilized=bool(config.get("use_rslora")))
    # What remains in `tensors` after the pairs are taken out are modules that were trained in full (modules_to_save).
    modules = [key.removesuffix(_A) for key in tensors if key.endswith(_A)]
    if lost := [module for module in modules if module + _B not in tensors]:
        raise UserError(f"--adapters {directory}: {lost[0]} has no lora_B", "export the adapters again")
    pairs = {module: (tensors.pop(module + _A), tensors.pop(module + _B)) for module in modules}
    has_magnitudes = bool(config.get("use_dora"))
    if has_magnitudes and (lost := [module for module in modules if module + _MAGNITUDE not in tensors]):
        raise UserError(
            f"--adapters {directory}: use_dora is true, but {lost[0]} has no magnitudes", "export the adapters again"
        )
    magnitudes = {module: tensors.pop(module + _MAGNITUDE) for module in modules if has_magnitudes}
    if not pairs:
        raise UserError(f"--adapters {directory}: {TENSORS_FILE} has no adapter", "export the adapters again")
    for module, (a, b) in pairs.items():
        if a.dim() != 2 or b.dim() != 2 or (a.size(0), b.size(1)) != (rank, rank):
            shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)}"
            raise UserError(
                f"--adapters {directory}: {module} has {shapes}, but r is {rank}", "export the adapters again"
            )
        if has_magnitudes and magnitudes[module].shape != (b.size(0),):
            shape = tuple(magnitudes[module].shape)
            raise UserError(
                f"--adapters {directory}: {module} has magnitudes {shape} for {b.size(0)} rows",
                "export the adapters again",
            )
    return SavedAdapter(
        directory, rank, lora.scaling, pairs, magnitudes, tensors, heads, promise, digest or heads_digest
    )


def _read_heads(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """Return the tensors of MTP heads by HF name, the config.json keys that declare the heads, and the base model's
    digest.

    All are empty if there are no heads.
    """
    if not path.exists():
        return {}, {}, ""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        promise, digest = json.loads(metadata[_PROMISE]), metadata.get(_DIGEST, "")
        return {key: file.get_tensor(key) for key in file.keys()}, promise, digest  # noqa: SIM118
