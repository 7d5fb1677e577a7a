"""Pass images to vLLM, and compare the length of the prompts that vLLM makes with swiftlite's.

vLLM reads one placeholder token per image, and repeats it for each output of the image tower. It would repeat
placeholders that are repeated already, without an error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftlite.base.errors import UserError
from swiftlite.data.batch import ITEM
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.prompts import ImagePrompt


def image_options(config: EngineConfig) -> dict[str, Any]:
    """Return vLLM's options for a model with an image tower, also one that swiftlite only copies; empty for other
    models.

    Without images in the prompts, vLLM does not load the tower.

    Raises:
        UserError: a prompt has more images than --vllm_limit_mm_per_prompt allows.
    """
    if not config.model.family.language_model:
        return {}
    given = config.engine_kwargs.get("limit_mm_per_prompt") or {}
    limit = given.get("image", config.max_images)
    if limit < config.max_images:
        problem = f"--vllm_limit_mm_per_prompt allows {limit} images, but a prompt has {config.max_images}"
        raise UserError(problem, f"""use '{{"image": {config.max_images}}}', or remove the option""")
    limits = {"limit_mm_per_prompt": {"image": limit, "video": 0, **given}}
    if not any(limits["limit_mm_per_prompt"].values()):
        return limits
    return {**limits, "skip_tokenizer_init": False}  # vLLM's processor of images requires a tokenizer


def vllm_prompt(prompt: Sequence[int]) -> dict[str, Any]:
    """Return a prompt as vLLM's `TokensPrompt`. The images of the prompt are decoded here."""
    if not isinstance(prompt, ImagePrompt):
        return {"prompt_token_ids": list(prompt)}
    return {
        "prompt_token_ids": with_one_placeholder_each(prompt),
        "multi_modal_data": {"image": [image.load() for image in prompt.images]},
        # With the bounds of --max_pixels and --min_pixels instead of those in preprocessor_config.json.
        "mm_processor_kwargs": {"size": prompt.image_size},
    }


def with_one_placeholder_each(prompt: ImagePrompt) -> list[int]:
    """Return the tokens of a prompt with one placeholder per image."""
    item_S = np.asarray(prompt.extras[ITEM])
    # Items are numbered over all images: images of 6 and 4 items start with the items 0 and 6, and only these are kept.
    lengths = [rows * columns for rows, columns in prompt.grids]
    first_items = np.cumsum([0, *lengths[:-1]])
    is_kept_S = (item_S < 0) | np.isin(item_S, first_items)
    return np.asarray(prompt.token_ids)[is_kept_S].tolist()


def check_same_length(prompt: Sequence[int], num_tokens: int) -> None:
    """Check that vLLM divides images into as many tokens as swiftlite.

    Args:
        num_tokens: number of tokens of the prompt that vLLM has processed.

    Raises:
        UserError: the numbers of tokens differ.
    """
    if num_tokens != len(prompt):
        raise UserError(
            f"vLLM divides the images of a prompt into other tokens: {num_tokens} tokens instead of {len(prompt)}",
            "compare preprocessor_config.json with that of the model's source",
        )
