"""A tokenizer, a chat template and image files for tests of rows with images."""

import base64
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from swiftlite.data.image_inputs import ImageEncoder, ImageProcessing
from swiftlite.data.image_sizes import ImageSizes
from tests.data.templates import QWEN3
from tests.tiny import make_tiny_vision_hf

TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VIDEO = "<|video_pad|>"

# As Qwen2.5-VL's.
VISION = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}{{ m.content }}
    {%- else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen3.5's: contents are trimmed, and thinking stays only after the last user turn.
THINKING = """\
{%- macro render(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for part in content %}
            {%- if 'image' in part or 'image_url' in part or part.type == 'image' -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'text' in part %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
""" + QWEN3.replace("set content = m.content", "set content = render(m.content) | trim")


def with_vision(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Add the tokens of images to a tokenizer."""
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS, VIDEO]})
    return tokenizer


def make_processor(**settings: Any) -> Any:
    """Return an image processor with small patches, so that images have few tokens."""
    small: dict[str, Any] = {"patch_size": 4, "min_pixels": 8 * 8, "max_pixels": 40 * 8 * 8}
    return Qwen2VLImageProcessorPil(**small | settings)


def make_image_encoder(
    tokenizer: PreTrainedTokenizerFast, directory: Path, media_root: Path | None = None, **settings
) -> ImageEncoder:
    """Return the encoder of images of a model whose preprocessor_config.json is written to the directory."""
    processor = make_processor(**settings)
    processor.save_pretrained(directory)
    sizes = make_sizes(tokenizer)
    return ImageEncoder(ImageProcessing.read(directory, sizes), media_root)


def make_sizes(tokenizer: Any) -> ImageSizes:
    """Return the sizes that `make_processor` produces, with the tokens of images."""
    start, end, placeholder, video = tokenizer.convert_tokens_to_ids([*TOKENS, VIDEO])
    return ImageSizes(4, 2, 2, 3, placeholder, start, end, video)


def make_image_model(directory: Path, family: str) -> None:
    """Write a tiny vision-language model with the files of a published one."""
    make_tiny_vision_hf(directory, family, depth=1, with_tokenizer=True, vocab_size=336)
    tokenizer: Any = with_vision(AutoTokenizer.from_pretrained(directory))
    tokenizer.chat_template = VISION
    tokenizer.save_pretrained(directory)
    make_processor().save_pretrained(directory)
    start, end, placeholder, video = tokenizer.convert_tokens_to_ids([*TOKENS, VIDEO])
    config = json.loads((directory / "config.json").read_text())
    config |= {"image_token_id": placeholder, "video_token_id": video}
    config |= {"vision_start_token_id": start, "vision_end_token_id": end}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image of random pixels."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.RandomState(seed).randint(0, 256, height * width * channels, np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """Return the content of an image file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_uri(image: Image.Image) -> str:
    """Return an image as rows contain it without a file."""
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


def writer(directory: Path) -> Callable[..., Path]:
    """Return a function that writes an image of random pixels to a file in the directory."""

    def write(name: str, width: int = 20, height: int = 12, seed: int = 0) -> Path:
        path = directory / name
        path.write_bytes(encoded(noise(width, height, seed)))
        return path

    return write
