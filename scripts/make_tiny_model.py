"""A language model of a few million random parameters, small enough to train on two CPU cores in minutes and shaped so
that every engine takes it: head_dim 64, grouped-query attention, a byte-level BPE tokenizer trained on the spot, ChatML
turns of which the template marks the assistant's.

    python scripts/make_tiny_model.py --output_dir tiny --family qwen3
    python scripts/make_tiny_model.py --output_dir tiny-mimo --family mimo    # with a native MTP layer
"""

import argparse
import json
from pathlib import Path

import torch
from make_docstring_dataset import stdlib_entries
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# MiMo's block is Qwen2's. transformers has no MiMo classes, so a MiMo checkpoint brings its own (MIMO_CODE).
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mimo": (Qwen2Config, Qwen2ForCausalLM),
}
MIMO_CODE = """\
from transformers import Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
"""


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` entries, trained on the standard library's docstrings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (f"{e.name}{e.signature}\n{e.docstring}" for e in stdlib_entries())
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHATML,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )


def tiny_config(family: str, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> PreTrainedConfig:
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=max(1, args.hidden_size // 128),
        head_dim=64,  # vLLM's CPU kernels take 32, 64 and 128
        max_position_embeddings=1024,
        tie_word_embeddings=args.tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        use_cache=True,
    )
    config.architectures = [model_class.__name__]
    return config


def mimo_mtp_tensors(model: Qwen2ForCausalLM, depth: int) -> dict[str, torch.Tensor]:
    """Tensors of `depth` random MTP layers under MiMo's names; each block has a decoder layer's shapes."""
    hidden_size, std = model.config.hidden_size, model.config.initializer_range
    tensors = {}
    for i in range(depth):
        prefix = f"model.mtp_layers.{i}."
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden_size, dtype=model.dtype)
        tensors[f"{prefix}input_proj.weight"] = torch.randn(hidden_size, 2 * hidden_size, dtype=model.dtype) * std
        for name, tensor in model.model.layers[0].state_dict().items():
            is_matrix = tensor.dim() == 2
            tensors[prefix + name] = torch.randn_like(tensor) * std if is_matrix else tensor.clone()
    return tensors


def make_tiny_model(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.vocab_size)
    config = tiny_config(args.family, tokenizer, args)
    model = FAMILIES[args.family][1](config).to(getattr(torch, args.torch_dtype))
    model.generation_config.do_sample = False
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    if args.family == "mimo":
        become_mimo(args.output_dir, mimo_mtp_tensors(model, args.mtp_num_layers), args.mtp_num_layers)
    print(f"{args.output_dir}: {args.family}, {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")


def become_mimo(directory: Path, mtp_tensors: dict[str, torch.Tensor], depth: int) -> None:
    """Turns a saved Qwen2 checkpoint into a MiMo one: MTP tensors, config, and the classes transformers lacks."""
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | mtp_tensors, weights, metadata={"format": "pt"})
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text())
    config |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": depth,
        "auto_map": {"AutoConfig": "modeling_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    }
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    (directory / "modeling_mimo.py").write_text(MIMO_CODE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3")
    parser.add_argument("--hidden_size", type=int, default=256, help="a multiple of 64 (default: 256)")
    parser.add_argument("--num_layers", type=int, default=4, help="decoder layers (default: 4)")
    parser.add_argument("--vocab_size", type=int, default=4096, help="entries of the tokenizer (default: 4096)")
    parser.add_argument("--mtp_num_layers", type=int, default=1, help="native MTP layers, mimo only (default: 1)")
    parser.add_argument("--tie_word_embeddings", action="store_true")
    parser.add_argument("--torch_dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_tiny_model(args)


if __name__ == "__main__":
    main()
