"""Make a language model of a few million random parameters that two CPU cores can train in minutes.

Every engine supports its sizes: head_dim is 64, with grouped-query attention. This script trains a byte-level BPE
tokenizer. The chat template is ChatML, and marks the turns of the assistant.

    python scripts/make_tiny_model.py --output_dir tiny --family qwen3
    python scripts/make_tiny_model.py --output_dir tiny-mimo --family mimo    # with a native MTP layer
    python scripts/make_tiny_model.py --output_dir tiny-glm --family glm4_moe    # with experts, and a native MTP layer
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from make_docstring_dataset import stdlib_entries
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from swiftlite.families import FAMILIES

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
# transformers has no MiMo classes. MiMo's block is that of Qwen2, and a checkpoint contains its classes (MIMO_CODE).
MODEL_TYPES = {"mimo": "qwen2"}
EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True}
SHARED_AND_ROUTED = EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
# Latent attention: vLLM's CPU kernel supports only a latent of 512 and a rotary part of 64.
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",  # required by vLLM
}
INDEXED = LATENT | {"index_topk": 2048, "index_n_heads": 4, "index_head_dim": 128, "scoring_func": "sigmoid"}
# Every other layer has linear attention.
LINEAR = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # supported by vLLM on a CPU
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.5,
}
WITH_SHARED = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 128}
# Families without an entry have the settings of `Family.tiny`.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": WITH_SHARED | {"norm_topk_prob": False},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "glm4_moe": SHARED_AND_ROUTED | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    # vLLM also requires scoring_func.
    "deepseek_v3": SHARED_AND_ROUTED | LATENT | {"n_group": 2, "topk_group": 1, "scoring_func": "sigmoid"},
    "deepseek_v32": SHARED_AND_ROUTED | INDEXED | {"n_group": 2, "topk_group": 1},
    "glm4_moe_lite": SHARED_AND_ROUTED | LATENT,
    "glm_moe_dsa": SHARED_AND_ROUTED | INDEXED | {"n_group": 1, "topk_group": 1},
    "hy_v3": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "router_scaling_factor": 1.5,
        "first_k_dense_replace": 1,  # this and the following keys are for vLLM and SGLang
        "qk_norm": True,
        "route_norm": True,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "rope_theta": 10000.0,
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",  # this and the following keys are for vLLM and SGLang
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    # `mimo_v2_flash` adds what depends on other sizes. vLLM requires values of the size of keys on a CPU.
    "mimo_v2_flash": EXPERTS
    | {
        "n_routed_experts": 8,
        "v_head_dim": 64,
        "attention_value_scale": 0.7,
        "sliding_window": 16,
        "sliding_window_size": 16,  # this and the following keys are for vLLM and SGLang
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50_000, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.5},
        },
        "rope_theta": 50_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 1e-5,
        "add_swa_attention_sink_bias": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    # `layers_of_step3p5` adds the settings of layers. vLLM does not support a single key-value head.
    "step3p5": {
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "share_expert_dim": 64,
        "moe_router_scaling_factor": 2.0,
        "sliding_window": 16,
        "moe_router_activation": "sigmoid",  # from here on for engines
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "zero_centered": True,
    },
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 2,
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # Layers with full attention have larger heads, as in published models.
    "gemma4_text": {**FAMILIES["gemma4_text"].tiny, "global_head_dim": 128},
    "olmo3": {"sliding_window": 16},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen3_next": WITH_SHARED | LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": WITH_SHARED | LINEAR,
}
# Names of the two norms before the projection, of the projection, and of the norm after the decoder layer, if it is not
# the trunk's final norm.
MTP_NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "deepseek_v32": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm4_moe_lite": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "glm_moe_dsa": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "hy_v3": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "ernie4_5_moe": ("emb_norm", "hidden_norm", "linear_proj"),
    "mimo_v2_flash": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "step3p5": ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"),
}
WITH_FIRST_LAYER = ("ernie4_5_moe", "mimo_v2_flash", "step3p5")
"""Families whose MTP layers have blocks like the first decoder layer."""
MIMO_CODE = """\
from transformers import Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
"""


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `vocab_size` entries, trained on the standard library's docstrings."""
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
    num_heads = args.hidden_size // 64
    num_kv_heads = max(1, num_heads // 2)
    if "kv_lora_rank" in OWN_SIZES.get(family, {}):
        num_kv_heads = num_heads
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.hidden_size,
        "intermediate_size": 3 * args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 64,  # vLLM's CPU kernels support 32, 64 and 128
        "max_position_embeddings": 1024,
        "tie_word_embeddings": args.tie_word_embeddings,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "use_cache": True,
    }
    if family in OWN_SIZES:
        values |= {"moe_intermediate_size": args.hidden_size, **OWN_SIZES[family]}
    else:
        values |= FAMILIES[family].tiny
    if family == "gemma4_text":
        values["num_global_key_value_heads"] = num_kv_heads
        values["layer_types"] = ["sliding_attention"] * (args.num_layers - 1) + ["full_attention"]
    if family == "olmo3":
        values["layer_types"] = [("sliding_attention", "full_attention")[n % 2] for n in range(args.num_layers)]
    if family == "nemotron_h":
        kinds = FAMILIES[family].tiny["layers_block_type"]
        values["layers_block_type"] = [kinds[number % len(kinds)] for number in range(max(args.num_layers, len(kinds)))]
    if family == "mimo_v2_flash":
        values |= layers_of_mimo_v2_flash(values)
    if family == "step3p5":
        values |= layers_of_step3p5(values, heads=args.mtp_num_layers)
    if family == "hy_v3":  # the name in vLLM
        values["expert_hidden_dim"] = args.hidden_size
    return AutoConfig.for_model(MODEL_TYPES.get(family, family), **values)


def layers_of_mimo_v2_flash(values: dict[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers, with a window in the first of each two, and their sizes with a window."""
    numbers = range(values["num_hidden_layers"])
    return {
        "layer_types": [("sliding_attention", "full_attention")[number % 2] for number in numbers],
        "hybrid_layer_pattern": [1 - number % 2 for number in numbers],
        "moe_layer_freq": [int(number > 0) for number in numbers],
        "swa_num_attention_heads": values["num_attention_heads"],
        "swa_num_key_value_heads": 2 * values["num_key_value_heads"],
        "swa_head_dim": values["head_dim"],
        "swa_v_head_dim": values["v_head_dim"],
    }


def layers_of_step3p5(values: dict[str, Any], heads: int) -> dict[str, Any]:
    """Return the settings of layers, with a window in the first of each two and in the heads, and those for engines."""
    layers = values["num_hidden_layers"]
    kinds = [("sliding_attention", "full_attention")[number % 2] for number in range(layers)]
    kinds += ["sliding_attention"] * heads
    return {
        "layer_types": kinds,
        "rope_theta": [50_000.0 if kind == "full_attention" else 10_000.0 for kind in kinds],
        "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in kinds],
        "moe_layers_enum": ",".join(map(str, range(1, layers))),
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 2 * values["num_attention_heads"],
            "num_attention_groups": values["num_key_value_heads"],
            "head_dim": values["head_dim"],
        },
        # vLLM does not support a limit of experts on a CPU.
        "swiglu_limits": [0.0] * len(kinds),
        "swiglu_limits_shared": [0.0] + [2.0] * (layers - 1) + [0.0] * heads,
        "num_nextn_predict_layers": heads,
    }


def mtp_tensors(family: str, trunk: dict[str, torch.Tensor], num_layers: int, depth: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `depth` random MTP layers, whose blocks have the shapes of the last decoder layer.

    In ERNIE 4.5, MiMo-V2-Flash and Step-3.5, they have those of the first one.

    Args:
        trunk: tensors of the trunk.
        num_layers: number of the trunk's decoder layers.
    """
    like = f"model.layers.{0 if family in WITH_FIRST_LAYER else num_layers - 1}."
    block = {name.removeprefix(like): tensor for name, tensor in trunk.items() if name.startswith(like)}
    if family == "mimo_v2_flash":
        block = {name.replace("post_attention_", "pre_mlp_"): tensor for name, tensor in block.items()}
    embedding = trunk["model.embed_tokens.weight"]
    std, hidden_size = embedding.std(), embedding.shape[1]
    tensors = {}
    for k in range(depth):
        prefix = f"model.layers.{num_layers + k}."
        if family == "mimo":
            prefix = f"model.mtp_layers.{k}."
        if family == "mimo_v2_flash":
            prefix = f"model.mtp.layers.{k}."
        names = [f"{prefix}{name}.weight" for name in MTP_NAMES[family]]
        if family == "ernie4_5_moe":
            prefix = f"model.mtp_block.{k}."
            names = [f"model.mtp_{name}.{k}.weight" for name in MTP_NAMES[family]]
        embedding_norm, hidden_norm, projection, *output_norm = names
        for name in (embedding_norm, hidden_norm, *output_norm):
            start = torch.zeros if family == "step3p5" else torch.ones  # its norms multiply by 1 + weight
            tensors[name] = start(hidden_size, dtype=embedding.dtype)
        tensors[projection] = torch.randn(hidden_size, 2 * hidden_size, dtype=embedding.dtype) * std
        for name, tensor in block.items():
            tensors[prefix + name] = torch.randn_like(tensor) * std if tensor.dim() == 2 else tensor.clone()
        if family == "step3p5":
            output = torch.randn_like(embedding) * std
            tensors[f"{prefix}transformer.shared_head.output.weight"] = output
        # Files on the hub repeat the trunk's tensors in each head.
        elif family not in ("ernie4_5_moe", "mimo", "mimo_v2_flash", "hy_v3"):
            tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
            tensors[f"{prefix}shared_head.head.weight"] = trunk.get("lm_head.weight", embedding).clone()
    return tensors


def make_tiny_model(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.vocab_size)
    if args.family == "step3p5":
        import swiftlite.engines.transformers.step3p5  # noqa: F401  # adds the model's class to transformers
    config = tiny_config(args.family, tokenizer, args)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, args.torch_dtype))
    model.generation_config.do_sample = False
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    if args.family in MTP_NAMES:
        add_mtp(args.output_dir, args.family, args.num_layers, args.mtp_num_layers)
    print(f"{args.output_dir}: {args.family}, {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")


def add_mtp(directory: Path, family: str, num_layers: int, depth: int) -> None:
    """Add MTP layers to a saved checkpoint.

    For MiMo, the model type of the Qwen2 checkpoint is also changed, and the classes that transformers does not have
    are added.
    """
    weights = directory / "model.safetensors"
    trunk = load_file(weights)
    save_file(trunk | mtp_tensors(family, trunk, num_layers, depth), weights, metadata={"format": "pt"})
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text()) | {"num_nextn_predict_layers": depth}
    if family == "step3p5":
        config = step3p5_as_published(config, num_layers, depth)
    if family == "mimo":
        config |= {
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "auto_map": {
                "AutoConfig": "modeling_mimo.MiMoConfig",
                "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
            },
        }
        (directory / "modeling_mimo.py").write_text(MIMO_CODE)
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def step3p5_as_published(config: dict[str, Any], num_layers: int, depth: int) -> dict[str, Any]:
    """Return a config.json with the keys of published files, which engines read, instead of those of transformers."""
    names = {"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"}
    names["num_experts_per_tok"] = "moe_top_k"
    of_transformers = ("mlp_layer_types", "num_sliding_attention_heads", "per_layer_config", "rope_parameters")
    kept = {key: value for key, value in config.items() if key not in of_transformers and "mtp_" not in key}
    sizes = {"num_attention_heads": config["num_attention_heads"], "num_hidden_layers": num_layers}
    sizes |= {name: config[name] for name in ("num_key_value_heads", "head_dim")}
    return {names.get(key, key): value for key, value in kept.items()} | layers_of_step3p5(sizes, depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    # transformers has no class for kimi_k2, whose layers are those of deepseek_v3
    models_of_text = [name for name, family in FAMILIES.items() if not family.language_model and name != "kimi_k2"]
    parser.add_argument("--family", choices=models_of_text, default="qwen3")
    parser.add_argument("--hidden_size", type=int, default=256, help="a multiple of 64 (default: 256)")
    parser.add_argument("--num_layers", type=int, default=4, help="decoder layers (default: 4)")
    parser.add_argument("--vocab_size", type=int, default=4096, help="entries of the tokenizer (default: 4096)")
    with_heads = ", ".join(sorted(MTP_NAMES))
    parser.add_argument(
        "--mtp_num_layers",
        type=int,
        default=1,
        help=f"native MTP layers of {with_heads}; others have none (default: 1)",
    )
    parser.add_argument("--tie_word_embeddings", action="store_true")
    parser.add_argument("--torch_dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    logging.disable_progress_bar()
    make_tiny_model(args)


if __name__ == "__main__":
    main()
