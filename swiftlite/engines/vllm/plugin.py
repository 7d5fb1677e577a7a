"""Plugin of vLLM to serve swiftlite's checkpoints.

The plugin adds a config class for MiMo, draft models for the architectures in `DRAFTS`, backends for live weights,
fixes of drafts behind images and of sampling on a CPU, and on a CPU DSpark drafters, clusters of tokens of Gemma 4's
assistants and a kernel for FP8.

vLLM calls `register` in each of its processes, through the entry point group `vllm.general_plugins`. If swiftlite is
installed, a checkpoint with heads can therefore be served with

    vllm serve DIR --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'

The classes in `CORRECTED` replace those of vLLM. Other models whose config.json declares no MTP heads are not affected.
The model classes are in `models.py` and `image_models.py`, and are imported when a checkpoint needs them.
"""

from contextlib import suppress
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from vllm import ModelRegistry, envs
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from swiftlite.args.serving_fields import WeightTransport
from swiftlite.base.heads import KEYS
from swiftlite.engines.loading.head_weights import heads_of
from swiftlite.engines.mimo_config import MiMoConfig
from swiftlite.engines.vllm import cpu_sampling, draft_slots, dspark_drafts, ngram_drafts, postponed
from swiftlite.engines.vllm.live.weight_transport import BACKENDS
from swiftlite.families.mtp_features import CLASS_ENDING
from swiftlite.families.serving.index import drafts_of_plugin, model_types
from swiftlite.families.serving.vllm import convention

_FEATURE_HEADS = "swiftlite.engines.vllm.mtp_features"
_MODELS, _IMAGE_MODELS = "swiftlite.engines.vllm.models", "swiftlite.engines.vllm.image_models"
PLUGIN_DRAFTS = drafts_of_plugin(convention)
"""Conventions of the plugin's draft classes, by architecture of the trunk."""
_MODEL_TYPES = model_types(convention)
DRAFTS = {trunk: known.draft for trunk, known in PLUGIN_DRAFTS.items()}
"""Architecture of the trunk -> architecture of its draft. Both are classes of `_module_of` the trunk."""
# architecture in vLLM -> class of _MODELS that corrects vLLM's
CORRECTED = {
    "Ernie4_5_MoeForCausalLM": "Ernie4_5_MoeForCausalLM",
    "ErnieMTPModel": "Ernie4_5_MoeMTP",
    "Step3p5ForCausalLM": "Step3p5ForCausalLM",
}
_TRANSFER = "swiftlite.engines.vllm.live.weight_transfer"
# transport of live weights -> class of _TRANSFER that receives them in the workers
_RECEIVERS: dict[WeightTransport, str] = {"file": "FileTransfer", "nccl": "NcclTransfer", "ipc": "IpcTransfer"}
_vllm_hf_config_override = SpeculativeConfig.hf_config_override


def hf_config_override(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the draft model's config from a copy of the target's.

    This function replaces SpeculativeConfig.hf_config_override (vllm/config/speculative.py of 0.32, called when the
    draft model's ModelConfig is created). That function has a branch for each architecture with a draft class in vLLM,
    but none for the architectures in DRAFTS. Without the replacement, vLLM raises "Unsupported speculative method:
    'mtp'" (tests/e2e/test_engines.py). vLLM sends the function to its worker processes by name, so it must be defined
    at the top level of this module.
    """
    architecture = (hf_config.architectures or [""])[0]
    # vLLM's function below selects a draft class by the model type, under which some families have none.
    hf_config.update({"model_type": _MODEL_TYPES.get(hf_config.model_type, hf_config.model_type)})
    if architecture == "Step3p5ForCausalLM":
        return _with_windows_of_heads(_vllm_hf_config_override(hf_config))
    # A trunk without heads can have another drafter, whose config must stay as it is.
    if architecture not in DRAFTS or not heads_of(hf_config).layers:
        return _vllm_hf_config_override(hf_config)
    # "mtp" is one of vLLM's MTPModelTypes, without special treatment.
    changes = {"model_type": "mtp", "architectures": [DRAFTS[architecture]], "n_predict": heads_of(hf_config).layers}
    # Heads are parts of the language model: also a model with images gets the config of a draft without towers.
    text_config = hf_config.get_text_config()
    changes |= layers_like_the_last(architecture, text_config, changes["n_predict"])
    text_config.update(_settings_outside(hf_config, text_config) | changes)
    return text_config


def _with_windows_of_heads(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the draft model's config of Step-3.5 with an entry in `layer_types` for each MTP head.

    vLLM's config class removes these entries, and its draft class then fails: "IndexError: list index out of range".
    """
    layers = hf_config.num_hidden_layers
    heads = ["sliding_attention"] * heads_of(hf_config).layers
    hf_config.update({"layer_types": [*hf_config.layer_types[:layers], *heads]})
    return hf_config


def _settings_outside(hf_config: PreTrainedConfig, text_config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings of the language model that a vision-language model's config has outside of `text_config`."""
    names = (*KEYS, "tie_word_embeddings", "quantization_config")
    return {name: value for name, value in vars(hf_config).items() if name in names and name not in vars(text_config)}


def _module_of(trunk: str) -> str:
    if trunk.endswith("ForConditionalGeneration"):
        return _IMAGE_MODELS
    return _MODELS


def layers_like_the_last(architecture: str, hf_config: PreTrainedConfig, num_heads: int) -> dict[str, Any]:
    """Return settings with which MTP heads have the same kind of layer as the trunk's last layer.

    For these architectures, vLLM selects the kind of a layer by its index; the indices of heads start from 0.
    """
    if architecture not in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"):
        return {}
    last = hf_config.num_hidden_layers - 1
    dense_heads: list[int] = []
    # As in models/qwen3_moe.py: Qwen3MoeDecoderLayer, which counts layers from 1 for the step.
    if last in hf_config.mlp_only_layers or (last + 1) % hf_config.decoder_sparse_step != 0:
        # With the step 1, exactly the heads in this list have no experts.
        dense_heads = list(range(num_heads))
    return {"mlp_only_layers": dense_heads, "decoder_sparse_step": 1}


def check_draft_steps(num_tokens: int, depth: int, runs_all_heads: bool) -> None:
    """Reject numbers of draft tokens with which vLLM 0.32 would run another head than the one trained for a draft step.

    Args:
        num_tokens: number of draft tokens per step. A single head can draft any number, because it continues from its
            previous state.
        runs_all_heads: whether vLLM runs a separate head for each draft step. vLLM's newer model runner does so for
            classes that support it. The older model runner, which is used without Triton (for example on a CPU), does
            not pass the number of the draft step.

    Raises:
        ValueError: the number is not supported; the error names the supported numbers.
    """
    if depth == 1 or num_tokens == 1:
        return
    # The acceptance would drop without an error, because a head that is trained for another step still drafts tokens.
    if not runs_all_heads:
        raise ValueError(
            f"num_speculative_tokens {num_tokens} is not supported with {depth} MTP heads: vLLM on this machine runs "
            "the first head at every step; use 1"
        )
    if num_tokens > depth:
        raise ValueError(
            f"num_speculative_tokens {num_tokens} is not supported with {depth} MTP heads: vLLM would run the first "
            f"head again at step {depth + 1}; use at most {depth}"
        )


def has_multi_module_runner() -> bool:
    """Return whether vLLM uses its newer model runner, which runs a separate head for each draft step."""
    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    if chosen is None:
        return HAS_TRITON
    return chosen


def register() -> None:
    """Register the classes with vLLM. May be called repeatedly."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    # As names, because vLLM forks processes after `register`: importing a model class here could initialize CUDA before
    # (models/registry.py: register_model).
    for trunk, draft in DRAFTS.items():
        # vLLM's own classes reject mtp.* tensors: "There is no module or parameter named 'mtp'".
        ModelRegistry.register_model(trunk, f"{_module_of(trunk)}:{trunk}")
        ModelRegistry.register_model(draft, f"{_module_of(trunk)}:{draft}")
        if _module_of(trunk) == _MODELS:
            ModelRegistry.register_model(trunk + CLASS_ENDING, f"{_FEATURE_HEADS}:{trunk}{CLASS_ENDING}")
    for architecture, corrected in CORRECTED.items():
        ModelRegistry.register_model(architecture, f"{_MODELS}:{corrected}")
    # On the class, where compose_draft_hf_overrides (vllm/config/speculative.py) looks it up for each draft model.
    SpeculativeConfig.hf_config_override = staticmethod(hf_config_override)
    for transport, receiver in _RECEIVERS.items():
        with suppress(ValueError):  # already registered
            WeightTransferEngineFactory.register_engine(BACKENDS[transport], _TRANSFER, receiver)
    # Also with Triton, because VLLM_USE_V2_MODEL_RUNNER=0 selects the older model runner, whose methods these replace.
    draft_slots.install()
    ngram_drafts.install()
    postponed.install()
    if not HAS_TRITON:
        cpu_sampling.install()
        dspark_drafts.install()
    if current_platform.is_cpu():
        # Not imported at the top, because this module imports vLLM's kernels, and `register` runs in every process.
        from swiftlite.engines.vllm import cluster_drafts, cpu_fp8

        cluster_drafts.install()
        cpu_fp8.install()
