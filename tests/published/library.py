"""Write models as they are published: config.json with the hub's keys, and tensors with the hub's names and dtypes.

Only sizes are reduced (`configs/`), and no vocabulary is a multiple of 64. All numbers are random, also those of MTP
heads. No code of swiftlite is used, so that it can be tested against these models.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.tiny import (
    CLASSES,
    COPIED_TOWER,
    DSA,
    GEMMA4,
    HEADS_WITH_COPIES,
    STACKED_TRUNK,
    VISION_TOWERS,
    VISUAL_PREFIX,
    WITH_OWN_OUTPUT,
    WRAPPED,
    as_in_files,
    head_block,
    head_in_files,
    head_name,
    hub_name,
    last_of_head,
    mtp_names,
    output_name,
)

CONFIGS = {path.stem: path for path in sorted(Path(__file__).with_name("configs").glob("*.json"))}
MODELS = tuple(CONFIGS)
_ONE_OF_EACH = {json.loads(path.read_text(encoding="utf-8"))["model_type"]: name for name, path in CONFIGS.items()}
_OTHER_SETTINGS = (  # rotary scaling, windows, tied embeddings, storage formats, stacked experts
    "EXAONE-4.0-1.2B",
    "Llama-3.1-8B",
    "Mistral-7B-v0.1",
    "Phi-3.5-mini-instruct",
    "Phi-4-mini-instruct",
    "Qwen3-0.6B",
    "Qwen3-30B-A3B-FP8",
    "Qwen3.5-35B-A3B",
    "Step-3.5-Flash-FP8",
    "gemma-4-26B-A4B-it",
    "gemma-4-E2B-it",
    "gemma-4-31B-it-transformers5",
)
CHOSEN = (*_ONE_OF_EACH.values(), *_OTHER_SETTINGS)
"""Models for which CI computes numbers: one of each family, and those with further settings."""
HEADS = {
    "ernie4_5_moe",
    "mimo",
    "mimo_v2_flash",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "hy_v3",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "step3p5",
}
"""Families that are published with MTP heads, here with one. The config.json of MiMo-V2-Flash declares none of its
three."""
WITHOUT_HEADS = ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-H-56B-Base-8K")
"""Models of these families that are published without heads."""
VISION_LANGUAGE = {"gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
"""Families whose language model transformers has only together with the vision tower."""
ZERO_CENTERED = {"gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_moe", "step3p5"}
"""Families whose norms multiply by 1 + weight, except for the norm after linear attention."""
STACKED = {"Qwen3.5-35B-A3B": "all", "Qwen3.6-35B-A3B": "trunk"}
"""Models with stacked experts, and the part in which experts are stacked."""
BLOCK = 128
_QUANTIZED = re.compile(
    r"((?<!eh)(?<!weights)_proj|_proj_with_mqa|in_proj_qkvz|in_proj_qkv|in_proj_z|indexer\.wq_b|indexer\.wk|\.w[123])"
    r"\.weight$"
)
_FLOAT32 = re.compile(r"(e_score_correction_bias|expert_bias|router_bias)$")

FLOAT32_NAMES: dict[str, tuple[str, ...]] = dict.fromkeys(WRAPPED, ("linear_attn.A_log", "linear_attn.norm.weight"))
FLOAT32_NAMES |= {"ernie4_5_moe": ("mlp.gate.weight",), "minimax_m2": ("block_sparse_moe.gate.weight",)}
FLOAT32_NAMES |= {"step3p5": ("moe.gate.weight",)}
FLOAT32_NAMES |= {"nemotron_h": ("mixer.A_log", "mixer.D")}
FLOAT32_NAMES |= dict.fromkeys(DSA, ("indexer.k_norm.weight", "indexer.k_norm.bias"))
"""Ends of the names of further tensors that are float32 in the files of a family."""

Tensors = dict[str, torch.Tensor]


def content(model: str) -> dict[str, Any]:
    """Return the config.json of a published model."""
    return json.loads(CONFIGS[model].read_text(encoding="utf-8"))


def family(model: str) -> str:
    return content(model)["model_type"]


def is_published_with_heads(model: str) -> bool:
    return family(model) in HEADS and model not in WITHOUT_HEADS


def is_quantized(model: str) -> bool:
    return "quantization_config" in content(model)


def is_in_mxfp4(model: str) -> bool:
    return content(model).get("quantization_config", {}).get("quant_method") == "mxfp4"


def build(directory: Path, model: str, has_new_head: bool = False) -> Path:
    """Write a model; return its directory.

    Args:
        has_new_head: whether an MTP head is added to a vision-language model that was published without heads.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(CONFIGS[model].read_bytes())
    if has_new_head:
        config = content(model)
        config["text_config"]["num_nextn_predict_layers"] = 1
        (directory / "config.json").write_text(json.dumps(config))
    has_head = has_new_head or is_published_with_heads(model)
    tensors = {name: _drawn(model, name, shape) for name, shape in _shapes(model, has_head).items()}
    if family(model) in HEADS.intersection(HEADS_WITH_COPIES):
        head = mtp_names(family(model), 0, content(model)["num_hidden_layers"])[1]
        tensors[f"{head}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{head}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if is_in_mxfp4(model):
        tensors = _in_mxfp4(tensors)
    elif is_quantized(model):
        is_float32 = family(model) in ("deepseek_v3", "deepseek_v32", "kimi_k2", "mimo_v2_flash", "minimax_m2")
        plain: tuple[str, ...] = ("self_attn.o_proj.weight",) if family(model) == "mimo_v2_flash" else ()
        if family(model) == "step3p5":  # gates and heads
            plain = tuple(
                name for name in tensors if "g_proj" in name or _is_other(name, transformers_config(directory))
            )
        tensors = _quantized(tensors, torch.float32 if is_float32 else torch.bfloat16, plain)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def numbers(directory: Path) -> Tensors:
    """Return the tensors of a directory, with FP8 decoded to float32, and MXFP4 to bfloat16."""
    tensors = load_file(directory / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            found[name] = tensor.float() * _spread(tensors[f"{name}_scale_inv"].float(), tensor.shape)
        elif name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            found[name] = convert_moe_packed_tensors(tensor, tensors[f"{name}_scales"])
        elif not name.endswith(("_scale_inv", "proj_scales")):
            found[name] = tensor
    return found


def transformers_config(directory: Path) -> PreTrainedConfig:
    """Return the language model's config as transformers reads the published file, without quantization."""
    raw = json.loads((directory / "config.json").read_text())
    if raw["model_type"] in ("mimo", "kimi_k2"):  # transformers has neither: their trunks are Qwen2's and DeepSeek-V3's
        left_out = ("model_type", "auto_map", "quantization_config")
        return CLASSES[raw["model_type"]][0](**{key: value for key, value in raw.items() if key not in left_out})
    config = AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")
    return text


def transformers_model(directory: Path) -> PreTrainedModel:
    """Return the trunk in float32 as a model of transformers. Models in `VISION_LANGUAGE` include the tower."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    if kind in VISION_LANGUAGE:
        return AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        ).eval()
    config = transformers_config(directory)
    trunk = {name: tensor.float() for name, tensor in numbers(directory).items() if not _is_other(name, config)}
    model_class: Any = CLASSES[kind][1]
    return model_class.from_pretrained(
        None, config=config, state_dict=trunk, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def _is_other(name: str, config: Any) -> bool:
    """Return whether a tensor belongs to a head or to the vision tower."""
    if name.startswith(("mtp.", "model.mtp.", "model.mtp_", "model.visual.")):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer.group(1)) >= config.num_hidden_layers


def _shapes(model: str, has_head: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their published names, without the copies in heads."""
    kind, raw = family(model), content(model)
    config = _config_of(kind, raw)
    model_class: Any = CLASSES[kind][1]
    with torch.device("meta"):
        trunk = model_class(config)
    held = trunk.state_dict()
    if trunk.config.tie_word_embeddings:
        del held["lm_head.weight"]
    shapes = _named(kind, held, stacked=model in STACKED)
    if kind in GEMMA4:
        shapes |= _unread_keys(kind, trunk)
    if has_head:
        names, block = mtp_names(kind, 0, config.num_hidden_layers, last_of_head(config))
        hidden = config.hidden_size
        shapes |= {name: (hidden, 2 * hidden) if role == "projection" else (hidden,) for role, name in names.items()}
        block_state: Any = head_block(trunk, kind)
        if kind == "mimo_v2_flash":  # the attention of another layer
            attention = trunk.model.layers[1].self_attn.state_dict(prefix="self_attn.")
            others = {name: tensor for name, tensor in block_state.items() if not name.startswith("self_attn.")}
            block_state = {head_name(kind, name): tensor for name, tensor in (attention | others).items()}
        if kind in STACKED_TRUNK:
            block_state = head_in_files(kind, block_state)
        inner = _named(kind, block_state, stacked=STACKED.get(model) == "all")
        shapes |= {block + name: shape for name, shape in inner.items()}
        if kind in WITH_OWN_OUTPUT:
            shapes[output_name(block)] = (config.vocab_size, hidden)
    if kind in (*COPIED_TOWER, *GEMMA4):
        shapes |= {name: tuple(tensor.shape) for name, tensor in copied_tower(raw).items()}
    elif kind in WRAPPED:
        config_class, tower_class = VISION_TOWERS[kind]
        settings = {key: value for key, value in raw["vision_config"].items() if key != "model_type"}
        with torch.device("meta"):
            tower = tower_class(config_class(**settings))
        shapes |= {VISUAL_PREFIX[kind] + name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    return shapes


def _unread_keys(kind: str, trunk: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of keys and values of layers that read those of others, which published files have as well."""
    shapes, kinds = {}, trunk.config.layer_types
    for number in range(len(kinds) - trunk.config.num_kv_shared_layers, len(kinds)):
        source = trunk.model.layers[kinds.index(kinds[number])].self_attn
        for name in ("k_proj", "v_proj", "k_norm"):
            key = hub_name(kind, f"model.layers.{number}.self_attn.{name}.weight")
            shapes[key] = tuple(getattr(source, name).weight.shape)
    return shapes


def copied_tower(raw: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of the tower and its projector, by their names in files."""
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**raw))
    if raw["model_type"] in GEMMA4:
        return {
            _published_name(raw["model_type"], name): tensor
            for name, tensor in whole.state_dict().items()
            if not name.startswith(("model.language_model.", "lm_head."))
        }
    held = {name.removeprefix("model."): tensor for name, tensor in whole.state_dict().items()}
    if raw["model_type"] == "gemma3":
        held = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in held.items()}
    return {name: tensor for name, tensor in held.items() if not name.startswith(("language_model.", "lm_head."))}


def _published_name(kind: str, name: str) -> str:
    """Return the name in files of a tensor of the towers of Gemma 4; the 12B has other modules in transformers."""
    if kind != "gemma4_unified" or ".embed_audio." in name:
        return name
    if ".multimodal_embedder." in name:
        return name.replace(".multimodal_embedder.", ".")
    return name.replace(".embed_vision.", ".vision_embedder.")


def _config_of(kind: str, raw: Mapping[str, Any]) -> Any:
    config_class: Any = CLASSES[kind][0]
    left_out = ("model_type", "auto_map", "quantization_config", "rope_scaling", "vision_config")  # shapes need none
    text = raw.get("text_config", raw)
    return config_class(**{key: value for key, value in text.items() if key not in left_out})


def _named(kind: str, held: Mapping[str, torch.Tensor], stacked: bool) -> dict[str, tuple[int, ...]]:
    tensors = dict(held) if stacked else as_in_files(kind, held)
    return {hub_name(kind, name): tuple(tensor.shape) for name, tensor in tensors.items()}


def _drawn(model: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random numbers that keep states at about the same size from layer to layer."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{model}/{name}".encode()))
    drawn = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        is_added_to_1 = family(model) in ZERO_CENTERED and "linear_attn" not in name
        drawn = 0.2 * drawn + (0.0 if is_added_to_1 else 1.0)
    elif len(shape) <= 1:  # biases, what linear attention forgets by, and limits in towers
        drawn = 0.2 * drawn
    elif "embed" not in name:
        drawn = drawn / shape[-1] ** 0.5
    is_float32 = _FLOAT32.search(name) or name.endswith(FLOAT32_NAMES.get(family(model), ()))
    return drawn if is_float32 else drawn.bfloat16()


def _quantized(tensors: Tensors, factors: torch.dtype, plain: tuple[str, ...] = ()) -> Tensors:
    """Return the tensors with each matrix of a linear layer in FP8, and its scales.

    Args:
        plain: ends of the names of matrices that are not in FP8.
    """
    found = {}
    for name, tensor in tensors.items():
        if not _QUANTIZED.search(name) or "visual" in name or name.endswith(plain):
            found[name] = tensor
            continue
        *experts, _, _ = tensor.shape  # of a stack
        rows, columns = (-(-length // BLOCK) for length in tensor.shape[-2:])
        scale = torch.empty(*experts, rows, columns)
        for row in range(rows):
            for column in range(columns):
                block = tensor[..., row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
                scale[..., row, column] = block.float().abs().amax((-2, -1)) / 448
        scale = scale.to(factors)
        found[name] = (tensor.float() / _spread(scale.float(), tensor.shape)).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = scale
    return found


def _in_mxfp4(tensors: Tensors) -> Tensors:
    """Return the tensors with random codes and scales instead of the matrices of experts."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape = (experts, rows, columns // 32, 16)
        found[f"{name}_blocks"] = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        # Codes are up to 6, so these exponents keep states at about the same size.
        found[f"{name}_scales"] = torch.randint(121, 124, shape[:3], generator=generator, dtype=torch.uint8)
    return found


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeat each scale over its whole block. Blocks at the end of the matrix are truncated."""
    return scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., : shape[-2], : shape[-1]]
