"""Model classes of vLLM for vision-language models with MTP heads, and draft models that run the heads.

Supported are Qwen2.5-VL, Qwen3-VL, Gemma 3 and Gemma 4. Heads read an image's features in place of the embeddings of
its placeholders, as in training; those of Gemma 3 and Gemma 4 are trained without images. These classes are in a
separate module from `models.py`, because vLLM's classes of vision-language models import torchvision.

Shapes: T tokens of all requests of a batch, H hidden size, I features of all images of a batch.
"""

from collections.abc import Sequence

import torch
from vllm.model_executor.models.interfaces import SupportsMultiModalEmbeddings

from swiftlite.engines.loading.head_weights import Trunk, Weights
from swiftlite.engines.loading.plugin_classes import class_of
from swiftlite.engines.vllm.models import Gemma3MTPModel, Gemma4HeadMTPModel, MtpDraft, Qwen3MoeMTPModel
from swiftlite.engines.vllm.plugin import PLUGIN_DRAFTS
from swiftlite.families.wrapped import text_name

__all__ = ["ImageDraft", "Trunk"]  # bases of the classes that `class_of` makes


class ImageDraft(MtpDraft, SupportsMultiModalEmbeddings):
    """A draft model whose heads read the features of images.

    vLLM reads from `supports_multimodal_embeddings` whether to pass features. Without it, heads would read the
    embeddings of placeholders.
    """

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor] | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the embeddings [T, H] of ids, with the features of images in place of their placeholders.

        Args:
            input_ids: [T], the token after each position.
            multimodal_embeddings: features [I, H] in parts. If features are added behind decoder layers as well
                (deepstack), each vector contains those after its first H numbers.
            is_multimodal: [T], where input_ids is a placeholder; I places.
        """
        embedding_TH = super().embed_input_ids(input_ids)
        if not multimodal_embeddings or is_multimodal is None:
            return embedding_TH
        features_IH = torch.cat([part[:, : embedding_TH.size(1)] for part in multimodal_embeddings])
        # `MtpHeads` multiplies all of its inputs; in the trunk, only embeddings of ids are multiplied.
        features_IH = features_IH / self.embedding_multiplier
        # masked_scatter fills places in order: features have the order of the placeholders in the batch.
        is_image_T1 = is_multimodal.to(embedding_TH.device, non_blocking=True)[:, None]
        return embedding_TH.masked_scatter(is_image_T1, features_IH.to(embedding_TH.dtype))

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the heads from HF tensors, as `MtpDraft.load_weights` does."""
        return super().load_weights((text_name(name), tensor) for name, tensor in weights)


class Qwen3VLMoeMTPModel(ImageDraft, Qwen3MoeMTPModel):
    """MTP draft model for Qwen3-VL with experts."""


class Gemma3ImageMTPModel(ImageDraft, Gemma3MTPModel):
    """MTP draft model for Gemma 3 with a vision tower."""


class Gemma4ImageMTPModel(ImageDraft, Gemma4HeadMTPModel):
    """MTP draft model for Gemma 4 with its towers."""


def __getattr__(name: str) -> type:
    """Return a class that consists only of names in the file of a family."""
    return class_of(name, PLUGIN_DRAFTS, "vllm.model_executor.models", globals())
