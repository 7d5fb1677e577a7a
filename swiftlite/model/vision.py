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

from swiftlite.families.vision import Qwen2_5Vision, VisionTower


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

    def recompute_activations(self) -> None:
        """Store only the inputs of blocks in training, and repeat their forward passes in the backward pass."""
        # transformers' own method also asks for gradients of text embeddings, and warns that the tower has none.
        for block in self.visual.blocks:
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, items: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the outputs [I, H]; with deepstack [I, (1 + number of further outputs) * H].

        Args:
            items: `patches`, float32 [I, W]: the patches of each item; and `grid`, int64 [I, 4]: row and column of the
                item in its image, and the number of rows and columns of the image, all in items. The item at row 0 and
                column 0 is the first of an image.
        """
        patches, grid_I4 = items["patches"], items["grid"]
        if len(grid_I4):
            return self._outputs(patches, grid_I4)
        # megatron-core's DDP waits for a gradient of each trained parameter. Without images, it is that of a blank
        # image whose output is not used: zeros.
        blank = patches.new_zeros(self._merge**2, self._patch_width)
        return self._outputs(blank, grid_I4.new_tensor([[0, 0, 1, 1]]))[:0]

    def _outputs(self, patches: torch.Tensor, grid_I4: torch.Tensor) -> torch.Tensor:
        is_first_I = (grid_I4[:, :2] == 0).all(dim=1)
        sizes_N2 = grid_I4[is_first_I, 2:] * self._merge
        grid_thw_N3 = F.pad(sizes_N2, (1, 0), value=1)  # an image has one frame
        result = self.visual(patches.view(-1, self._patch_width), grid_thw=grid_thw_N3)
        return torch.cat([result.pooler_output, *getattr(result, "deepstack_features", ())], dim=-1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "VisionTransformer":
        """Apply a conversion, but keep the rotary frequencies in float32 (Float16Module casts all buffers)."""
        rotary = self.visual.rotary_pos_emb
        exact = dict(rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            rotary._buffers[name] = buffer.to(rotary._buffers[name].device)
        return self
