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

from swiftlite.base.errors import UserError
from swiftlite.bridge.rows import HfConfig, Row, Shape
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank
from swiftlite.families.tower import TowerActivations, TowerMacs, TrainedParts

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

    @property
    @abstractmethod
    def num_deepstack(self) -> int:
        """Number of mergers behind blocks. Their outputs are added to the outputs of the first decoder layers."""

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tower's tensors by their names within the tower."""

    @property
    @abstractmethod
    def num_full_attention(self) -> int:
        """Number of blocks in which all patches of an image attend to each other."""

    @property
    @abstractmethod
    def patches_of_window(self) -> int:
        """Number of patches that attend to each other in the other blocks; 0 without such blocks."""

    @property
    @abstractmethod
    def _index_bytes(self) -> int:
        """Bytes per patch of the indices and weights that the backward pass reads."""

    @abstractmethod
    def _block_bytes(self, itemsize: int) -> int:
        """Count the bytes per patch that a block stores."""

    @abstractmethod
    def _aligner_bytes(self, num_patches: int, itemsize: int) -> int:
        """Count the bytes that the mergers store, without outputs of blocks that the next block also stores."""

    def rows(self) -> list[Row]:
        """Return the bridge rows with names in the whole model."""
        return [Row(_MODULE + name, {self.hf_prefix + name: shape}) for name, shape in self.shapes().items()]

    def parameters(self, rank: Rank) -> ParameterCount:
        """Count the parameters on a rank. Each rank of the stage with the embedding holds the whole tower."""
        return self.trained_parameters(TrainedParts(vit=True, aligner=True))

    def trained_parameters(self, trained: TrainedParts) -> ParameterCount:
        """Count the trained parameters on a rank."""
        counts = {name: prod(shape) for name, shape in self.shapes().items()}
        aligner = sum(count for name, count in counts.items() if is_aligner_parameter(_MODULE + name))
        count = 0
        if trained.vit:
            count += sum(counts.values()) - aligner
        if trained.aligner:
            count += aligner
        return ParameterCount(count)

    def macs(self, trained: TrainedParts) -> TowerMacs:
        """Count the multiply-adds of matrix products in the forward and backward pass.

        A backward pass computes the gradients of weights that are trained, and of inputs that depend on such weights.
        """
        patches = self._merge**2  # of an item
        macs = 0.0
        for name, shape in self.shapes().items():
            if len(shape) == 1 or name == "pos_embed.weight":
                continue
            if is_aligner_parameter(_MODULE + name):  # the norm before its matrices is trained with them
                macs += (1 + trained.aligner + any(trained)) * prod(shape)
            elif name.startswith("patch_embed."):
                macs += (1 + trained.vit) * patches * prod(shape)
            else:
                macs += (1 + 2 * trained.vit) * patches * prod(shape)
        # Scores and values of the patches in an image or a window.
        pair = (1 + 2 * trained.vit) * 2 * self.config["hidden_size"]
        depth, num_full = self.config["depth"], self.num_full_attention
        macs += pair * (depth - num_full) * patches * self.patches_of_window
        return TowerMacs(macs, pair * num_full * patches**2)

    def activation_bytes(
        self, num_items: int, itemsize: int, trained: TrainedParts, *, recomputes: bool
    ) -> TowerActivations:
        """Count the bytes of activations, as if both parts were trained if the part before the aligner is."""
        if not any(trained):
            return TowerActivations(0, 0)
        num_patches = num_items * self._merge**2
        aligner = self._aligner_bytes(num_patches, itemsize)
        if not trained.vit:
            inputs = self.num_deepstack * num_patches * self.config["hidden_size"] * itemsize
            return TowerActivations(aligner + inputs, 0)
        block = num_patches * self._block_bytes(itemsize)
        head_size = self.config["hidden_size"] // self.config["num_heads"]
        pixels = prod(_kernel(self.config)[1:]) * itemsize
        shared = num_patches * (pixels + 2 * head_size * FLOAT32 + self._index_bytes)
        depth = self.config["depth"]
        if recomputes:
            boundaries = depth * num_patches * self.config["hidden_size"] * itemsize
            return TowerActivations(aligner + shared + boundaries, block)
        return TowerActivations(aligner + shared + depth * block, 0)

    @property
    def _merge(self) -> int:
        return self.config.get("spatial_merge_size", 2)


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
        return len(self.config.get("deepstack_visual_indexes") or ())

    @property
    def num_full_attention(self) -> int:
        return self.config["depth"]

    @property
    def patches_of_window(self) -> int:
        return 0

    @property
    def _index_bytes(self) -> int:
        return 4 * (8 + FLOAT32)  # index and weight of the four nearest learned positions

    def _block_bytes(self, itemsize: int) -> int:
        hidden, intermediate = self.config["hidden_size"], self.config["intermediate_size"]
        # Inputs of two norms and four matrices, rotated queries and keys, queries with keys and values, their result.
        states = 2 + 3 + 2 + 3 + 1
        statistics = (2 * 2 + self.config["num_heads"]) * FLOAT32
        return (states * hidden + 2 * intermediate) * itemsize + statistics

    def _aligner_bytes(self, num_patches: int, itemsize: int) -> int:
        # Inputs of the norm (of the last merger), of the two matrices and of the activation.
        states = 4 + 3 * self.num_deepstack
        # Mean and scale of the norm: of each patch, or of each item with deepstack.
        statistics = 2 * FLOAT32 * (num_patches + num_patches // self._merge**2 * self.num_deepstack)
        return states * num_patches * self.config["hidden_size"] * itemsize + statistics

    def _merger(self, prefix: str, norm_width: int) -> dict[str, Shape]:
        merged = _merged_width(self.config)
        return {
            **_norm(f"{prefix}norm", norm_width),
            **_linear(f"{prefix}linear_fc1", merged, merged),
            **_linear(f"{prefix}linear_fc2", self.config["out_hidden_size"], merged),
        }


@dataclass(frozen=True)
class Qwen2_5Vision(_Vision):
    """The tower of Qwen2.5-VL, in which most blocks attend within windows."""

    hf_prefix: str = "visual."

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

    @property
    def num_deepstack(self) -> int:
        return 0

    @property
    def num_full_attention(self) -> int:
        return len(self.config.get("fullatt_block_indexes", (7, 15, 23, 31)))  # transformers' default

    @property
    def patches_of_window(self) -> int:
        side = self.config.get("window_size", 112) // self.config["patch_size"] // self._merge * self._merge
        return side**2

    @property
    def _index_bytes(self) -> int:
        return 2 * 8 // self._merge**2  # the orders of items in windows and in the image

    def _block_bytes(self, itemsize: int) -> int:
        hidden, intermediate = self.config["hidden_size"], self.config["intermediate_size"]
        # Results of two norms before and after their weights, rotated queries and keys, queries with keys and values,
        # their result, and the input of the projection.
        states = 2 * 2 + 2 + 3 + 1 + 1
        norms = 2 * (hidden + 1) * FLOAT32
        return (states * hidden + 4 * intermediate) * itemsize + norms + self.config["num_heads"] * FLOAT32

    def _aligner_bytes(self, num_patches: int, itemsize: int) -> int:
        hidden = self.config["hidden_size"]
        # Result of the norm before its weight, inputs of the two matrices and of the activation; input of the norm.
        return num_patches * (4 * hidden * itemsize + (hidden + 1) * FLOAT32)


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
