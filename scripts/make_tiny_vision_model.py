"""Make a vision-language model of two million random parameters that a CPU core can train in minutes.

Four patches form one token. They are smaller than those of published models, so that small pictures have several
tokens. The tokenizer is that of make_tiny_model.py. vLLM supports the sizes on a CPU.

    python scripts/make_tiny_vision_model.py --output_dir tiny --family qwen3_vl
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from make_tiny_model import train_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils import logging

IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}{{ message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{ part['text'] }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
PATCH = 8  # height and width in pixels
TOWER_WIDTH = 128


def initializer_range(width: int) -> float:
    """Return the standard deviation of weights. transformers' 0.02 suits a width of 2500; narrow models learn slowly
    with it.
    """
    return width**-0.5


def tower_config(family: str, hidden_size: int) -> dict[str, Any]:
    """Return the config of a tower with three blocks."""
    common = {"depth": 3, "num_heads": 4, "patch_size": PATCH, "hidden_size": TOWER_WIDTH}
    common |= {"intermediate_size": 2 * TOWER_WIDTH, "out_hidden_size": hidden_size}
    common |= {"initializer_range": initializer_range(TOWER_WIDTH)}
    if family == "qwen2_5_vl":
        return common | {"fullatt_block_indexes": [0, 2], "window_size": 8 * PATCH}
    return common | {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]}


def text_config(family: str, tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Return the config of the language model; a head has 64 channels, 32 pairs of which are rotated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    num_heads = hidden_size // 64
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "initializer_range": initializer_range(hidden_size),
        "rope_parameters": rope,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_processors(directory: Path, family: str) -> None:
    """Write the files that transformers and engines read the sizes of patches from."""
    settings = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"size": {"shortest_edge": 32 * 32, "longest_edge": 448 * 448}}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video = "Qwen2VLVideoProcessor" if family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {"video_processor_type": video},
    }
    for name, kind in files.items():
        (directory / name).write_text(json.dumps(settings | kind, indent=2) + "\n")


def make_model(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.vocab_size)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *IMAGE_TOKENS.values()]})
    tokenizer.chat_template = CHATML
    config = AutoConfig.for_model(
        args.family,
        text_config=text_config(args.family, tokenizer, args.hidden_size, args.num_layers),
        vision_config=tower_config(args.family, args.hidden_size),
        tie_word_embeddings=False,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()},
    )
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.do_sample = False
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    write_processors(args.output_dir, args.family)
    print(f"{args.output_dir}: {args.family}, {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument("--hidden_size", type=int, default=128, help="a multiple of 64 (default: 128)")
    parser.add_argument("--num_layers", type=int, default=2, help="decoder layers (default: 2)")
    parser.add_argument("--vocab_size", type=int, default=1024, help="entries of the tokenizer (default: 1024)")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_model(args)


if __name__ == "__main__":
    main()
