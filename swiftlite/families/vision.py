"""The vision towers of Qwen's vision-language models: sizes and tensor names. No torch.

A tower consists of an embedding of patches, blocks of attention and MLP, and mergers. A merger maps a group of
neighboring patches to one vector of the language model's hidden size. The mergers are also called the aligner.
`model/vision.py` computes the towers with transformers' modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from swiftlite.bridge.rows import HfConfig, Row, Shape
from swiftlite.errors import UserError
from swiftlite.families.rank import ParameterCount, Rank

_MODULE = "tower.visual."
_ALIGNER = (f"{_MODULE}merger.", f"{_MODULE}deepstack_merger_list.")
_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size")


def is_tower_parameter(name: str) -> bool:
    """Return whether a Megatron parameter belongs to a tower."""
    return name.startswith("tower.")


def is_aligner_parameter(name: str) -> bool:
    """Return whether a Megatron parameter belongs to the aligner of a tower."""
    return name.startswith(_ALIGNER)


def is_vit_parameter(name: str) -> bool:
    """Return whether a Megatron parameter belongs to a tower without its aligner."""
    return is_tower_parameter(name) and not is_aligner_parameter(name)


@dataclass(frozen=True)
class _Vision(ABC):
    """A vision tower.

    Attributes:
        config: `vision_config` of config.json.
        hf_prefix: prefix of the HF names of the tower's tensors.
    """

    config: Mapping[str, Any]
    hf_prefix: str

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tower's tensors by their names within the tower."""

    def rows(self) -> list[Row]:
        """Return the bridge rows with names in the whole model."""
        return [Row(_MODULE + name, {self.hf_prefix + name: shape}) for name, shape in self.shapes().items()]

    def parameters(self, rank: Rank) -> ParameterCount:
        """Count the parameters on a rank. Each rank of the stage with the embedding holds the whole tower."""
        return ParameterCount(sum(map(prod, self.shapes().values())))


@dataclass(frozen=True)
class Qwen3Vision(_Vision):
    """The tower of Qwen3.5, and of Qwen3-VL, whose tower has additional mergers behind some blocks (deepstack)."""

    hf_prefix: str = "model.visual."

    @classmethod
    def of(cls, hf_config: HfConfig) -> "Qwen3Vision":
        """Return the tower of a model. Errors are those of `vision_config_of`."""
        return cls(vision_config_of(hf_config, "num_position_embeddings"))

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tower's tensors by their names within the tower."""
        hidden, intermediate = self.config["hidden_size"], self.config["intermediate_size"]
        merged = _merged_width(self.config)
        shapes = {"patch_embed.proj.weight": _kernel(self.config), "patch_embed.proj.bias": (hidden,)}
        shapes["pos_embed.weight"] = (self.config["num_position_embeddings"], hidden)
        for number in range(self.config["depth"]):
            block = f"blocks.{number}."
            shapes |= _norm(f"{block}norm1", hidden) | _norm(f"{block}norm2", hidden)
            shapes |= _attention(block, hidden)
            shapes |= _linear(f"{block}mlp.linear_fc1", intermediate, hidden)
            shapes |= _linear(f"{block}mlp.linear_fc2", hidden, intermediate)
        shapes |= self._merger("merger.", norm_width=hidden)
        for number in range(self.num_deepstack):
            shapes |= self._merger(f"deepstack_merger_list.{number}.", norm_width=merged)
        return shapes

    @property
    def num_deepstack(self) -> int:
        """Number of mergers behind blocks. Their outputs are added to the outputs of the first decoder layers."""
        return len(self.config.get("deepstack_visual_indexes") or ())

    def _merger(self, prefix: str, norm_width: int) -> dict[str, Shape]:
        merged = _merged_width(self.config)
        return {
            **_norm(f"{prefix}norm", norm_width),
            **_linear(f"{prefix}linear_fc1", merged, merged),
            **_linear(f"{prefix}linear_fc2", self.config["out_hidden_size"], merged),
        }


@dataclass(frozen=True)
class Qwen2_5Vision(_Vision):
    """The tower of Qwen2.5-VL, in which most blocks attend within windows.

    Attributes:
        num_deepstack: see `Tower`.
    """

    hf_prefix: str = "visual."
    num_deepstack: int = 0

    @classmethod
    def of(cls, hf_config: HfConfig) -> "Qwen2_5Vision":
        """Return the tower of a model. Errors are those of `vision_config_of`."""
        return cls(vision_config_of(hf_config))

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tower's tensors by their names within the tower."""
        hidden, intermediate = self.config["hidden_size"], self.config["intermediate_size"]
        merged = _merged_width(self.config)
        shapes = {"patch_embed.proj.weight": _kernel(self.config)}
        for number in range(self.config["depth"]):
            block = f"blocks.{number}."
            shapes |= {f"{block}norm1.weight": (hidden,), f"{block}norm2.weight": (hidden,)}
            shapes |= _attention(block, hidden)
            shapes |= _linear(f"{block}mlp.gate_proj", intermediate, hidden)
            shapes |= _linear(f"{block}mlp.up_proj", intermediate, hidden)
            shapes |= _linear(f"{block}mlp.down_proj", hidden, intermediate)
        shapes["merger.ln_q.weight"] = (hidden,)
        shapes |= _linear("merger.mlp.0", merged, merged)
        return shapes | _linear("merger.mlp.2", self.config["out_hidden_size"], merged)


VisionTower = Qwen3Vision | Qwen2_5Vision


def vision_config_of(hf_config: HfConfig, *more_sizes: str) -> Mapping[str, Any]:
    """Return `vision_config` of a config.json.

    Args:
        more_sizes: required sizes besides those of all towers.

    Raises:
        UserError: it is missing, a size is missing, or its outputs do not have the language model's hidden size.
    """
    found = hf_config.get("vision_config")
    if not isinstance(found, Mapping):
        raise UserError("config.json: vision_config is missing", _HINT)
    missing = [key for key in (*_SIZES, *more_sizes) if not isinstance(found.get(key), int)]
    if missing:
        raise UserError(f"config.json: vision_config: missing or not a number: {', '.join(missing)}", _HINT)
    width, hidden = found["out_hidden_size"], hf_config["hidden_size"]
    if width != hidden:
        raise UserError(f"config.json: vision_config: out_hidden_size {width}, but hidden_size {hidden}", _HINT)
    return found


_HINT = "copy config.json from the model's source again"


def _merged_width(config: Mapping[str, Any]) -> int:
    """Return the number of channels of a group of patches."""
    return config["hidden_size"] * config.get("spatial_merge_size", 2) ** 2


def _kernel(config: Mapping[str, Any]) -> Shape:
    """Return the shape of the convolution that embeds patches."""
    patch = config["patch_size"]
    return config["hidden_size"], channels_of(config), config.get("temporal_patch_size", 2), patch, patch


def channels_of(config: Mapping[str, Any]) -> int:
    """Return the number of colors of `vision_config`. Files of Qwen2.5-VL name it in_chans."""
    return config.get("in_channels", config.get("in_chans", 3))


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _attention(block: str, hidden: int) -> dict[str, Shape]:
    return _linear(f"{block}attn.qkv", 3 * hidden, hidden) | _linear(f"{block}attn.proj", hidden, hidden)
