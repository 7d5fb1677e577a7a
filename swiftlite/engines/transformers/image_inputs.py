"""Compute the image features of a prompt with transformers' vision tower, and the positions of a row with images.

Trunk and MTP heads read the same features in place of placeholder tokens. Generated tokens continue the positions after
the largest position of the prompt along all three axes, as in transformers (`rope_deltas`).

Shapes: S tokens of the prompt, I items (outputs of the tower), H hidden size.
"""

from typing import Any

import numpy as np
import torch

from swiftlite.data.batch import AXES, ITEM
from swiftlite.data.image_inputs import PATCHES
from swiftlite.engines.prompts import ImagePrompt


class ImageInputs:
    """The image features and positions of one prompt.

    Args:
        prompt: the prompt; its images are decoded here.
        model: transformers' vision-language model without its output layer.

    Attributes:
        outputs: outputs of the vision tower, as the argument `mm_encoder_outputs` of `model`.
    """

    def __init__(self, prompt: ImagePrompt, model: Any):
        device = model.device
        patches = torch.from_numpy(np.stack(list(prompt.extras[PATCHES])))
        merge: int = model.config.vision_config.spatial_merge_size
        pixel_values = patches.view(len(patches) * merge**2, -1).to(device)
        sizes = [(1, merge * rows, merge * columns) for rows, columns in prompt.grids]  # frames, rows, columns
        images = model.get_image_features(pixel_values, torch.tensor(sizes, device=device), return_dict=True)
        self.outputs = {"image": images}
        self._features_IH = torch.cat(images.pooler_output).to(model.dtype)
        self._item_S = torch.tensor(np.asarray(prompt.extras[ITEM]), dtype=torch.int64, device=device)
        self._axes_3S = torch.tensor(np.asarray(prompt.extras[AXES]).T, dtype=torch.int64, device=device)

    def put_into(self, embeddings_1SH: torch.Tensor, start: int) -> torch.Tensor:
        """Return the embeddings, with features in place of placeholder tokens.

        Args:
            embeddings_1SH: embeddings of consecutive tokens of the row, also of generated ones.
            start: position of the first of these tokens.
        """
        item_S = self._item_S[start : start + embeddings_1SH.shape[1]]
        (places,) = torch.nonzero(item_S >= 0, as_tuple=True)
        result = embeddings_1SH.clone()
        result[0, places] = self._features_IH[item_S[places]]
        return result

    def positions(self, start: int, length: int) -> torch.Tensor:
        """Return positions along three axes, int64 [3, 1, length], of tokens of the row, also of generated ones.

        Args:
            start: position of the first of these tokens in the row.
        """
        of_prompt = self._axes_3S[:, start : start + length]
        num_generated = length - of_prompt.shape[1]
        # Positions behind an image are smaller than indices: after 100 tokens, the last one can be 40, the next 41.
        first = self._axes_3S.max() + 1 + max(start - self._axes_3S.shape[1], 0)
        generated = first + torch.arange(num_generated, device=first.device)
        return torch.cat((of_prompt, generated.expand(3, -1)), dim=1)[:, None]
