"""Compute vision towers (`families/vision.py`) with transformers' modules.

The inputs are items, one per output of the tower: the patches of a group of neighboring patches, in the order of the
image processor of transformers, and the group's place in its image.

Shapes: I items of the micro-batch, W numbers of an item (the pixels of its patches), N images of the micro-batch, H
hidden size of the language model.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from swiftlite.families.vision import Qwen2_5Vision, VisionTower
from swiftlite.runtime.device import on_device


def _classes(tower: VisionTower) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    """Return transformers' classes of a tower.

    The tower of Qwen3.5 with experts is Qwen3.5's. Qwen3-VL's tower is recognized by its deepstack mergers.
    """
    if isinstance(tower, Qwen2_5Vision):
        return Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel
    if tower.num_deepstack:
        return Qwen3VLVisionConfig, Qwen3VLVisionModel
    return Qwen3_5VisionConfig, Qwen3_5VisionModel


class VisionTransformer(nn.Module):
    """A vision tower with uninitialized weights. `Trainable` (`plan/trainable.py`) selects the parameters to train.

    The patches are float32; transformers' module casts them to the dtype of its weights.

    Attributes:
        visual: transformers' module.
    """

    def __init__(self, tower: VisionTower, config: TransformerConfig):
        super().__init__()
        config_class, model_class = _classes(tower)
        # Files name the type of the tower differently than transformers.
        settings = {name: value for name, value in tower.config.items() if name != "model_type"}
        hf_config: Any = config_class.from_dict(settings)
        with no_init_weights():  # the bridge sets the weights
            self.visual: Any = model_class._from_config(
                hf_config, attn_implementation="sdpa", dtype=config.params_dtype
            )
        self._merge: int = hf_config.spatial_merge_size
        self._patch_width = prod(tower.shapes()["patch_embed.proj.weight"][1:])
        self._has_windows = isinstance(tower, Qwen2_5Vision)
        self._output_width = (1 + tower.num_deepstack) * config.hidden_size

    def recompute_activations(self) -> None:
        """Store only the inputs of blocks in training, and repeat their forward passes in the backward pass."""
        # transformers' own method also asks for gradients of text embeddings, and warns that the tower has none.
        for block in self.visual.blocks:
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, items: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the outputs [I, H]; with deepstack [I, (1 + number of further outputs) * H].

        Args:
            items: tensors on the host. `patches`, float32 [I, W]: the patches of each item; and `grid`, int64 [I, 4]:
                row and column of the item in its image, and the number of rows and columns of the image, all in items.
                The item at row 0 and column 0 is the first of an image.
        """
        patches, grid_I4 = items["patches"], items["grid"]
        if len(grid_I4):
            return self._outputs(patches, grid_I4)
        learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        if not learns:
            weight = next(self.parameters())
            return weight.new_empty(0, self._output_width)
        # megatron-core's DDP waits for a gradient of each trained parameter. Without images, it is that of a blank
        # image whose output is not used: zeros.
        blank = patches.new_zeros(self._merge**2, self._patch_width)
        return self._outputs(blank, grid_I4.new_tensor([[0, 0, 1, 1]]))[:0]

    def _outputs(self, patches: torch.Tensor, grid_I4: torch.Tensor) -> torch.Tensor:
        is_first_I = (grid_I4[:, :2] == 0).all(dim=1)
        sizes_N2 = grid_I4[is_first_I, 2:] * self._merge
        grid_thw_N3 = F.pad(sizes_N2, (1, 0), value=1)  # an image has one frame
        device = next(self.parameters()).device
        pixels = on_device(patches.view(-1, self._patch_width), device)
        result = self.visual(pixels, grid_thw=grid_thw_N3, **self._indices(grid_thw_N3, device))
        return torch.cat([result.pooler_output, *getattr(result, "deepstack_features", ())], dim=-1)

    def _indices(self, grid_thw_N3: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments that transformers' module otherwise computes from the sizes of the images.

        It would compute them on the GPU, and wait for the GPU in each block to read the starts of images. Here they are
        computed on the host, where the starts remain.
        """
        starts = {"cu_seqlens": get_vision_cu_seqlens(grid_thw_N3)}
        indices = {"position_ids": get_vision_position_ids(grid_thw_N3, self._merge)}
        if self._has_windows:
            window = (self._merge, self.visual.window_size, self.visual.patch_size)
            indices["window_index"], starts["cu_window_seqlens"] = get_vision_window_index(grid_thw_N3, *window)
        else:
            indices["interp_indices"], indices["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid_thw_N3,
                self.visual.num_grid_per_side,
                mode=self.visual.interpolation_mode,
                align_corners=self.visual.interpolation_align_corners,
                spatial_merge_size=self._merge,
            )
        return starts | {name: on_device(tensor, device) for name, tensor in indices.items()}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "VisionTransformer":
        """Apply a conversion, but keep the rotary frequencies in float32 (Float16Module casts all buffers)."""
        rotary = self.visual.rotary_pos_emb
        exact = dict(rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            rotary._buffers[name] = buffer.to(rotary._buffers[name].device)
        return self
