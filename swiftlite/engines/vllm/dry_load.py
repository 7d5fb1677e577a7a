"""Run vLLM's own configuration and weight loaders on a checkpoint, without an engine.

Imported in a subprocess (`engines/loading/dry_load.py`).
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported

import vllm
from torch import nn
from vllm import distributed
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.interfaces import supports_multimodal, supports_multimodal_embeddings
from vllm.utils.torch_utils import set_default_torch_dtype

from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.loading.load_report import LoadError, Loading, LoadReport, one_rank, stage
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.options import (
    asked_tokens,
    check_quantization,
    check_trunk_of_drafter,
    mtp_options,
    needs_plugin,
    num_drafting_heads,
    num_tokens_to_draft,
)
from swiftlite.engines.vllm.stock_draft import draft_folder
from swiftlite.families.drafters import SERVED
from swiftlite.families.resolved import HfModel

# vLLM shares these parameters of the target with every MTP draft (v1/spec_decode/llm_base_proposer.py).
SHARED = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")

# Parameters that a checkpoint may omit: scales and zero points of a quantized KV cache, whose default is -1
# (layers/quantization/kv_cache.py of 0.32), and DFlash's own embedding of mask tokens (models/qwen3_dflash.py).
OPTIONAL = (
    "model.mask_embedding",
    ".attn.prob_scale",
    *(f".attn.{part}_{kind}" for part in "qkv" for kind in ("scale", "zero_point")),
)


def dry_load(config: EngineConfig) -> LoadReport:
    """Run vLLM's loaders on the checkpoint's headers; no tensor is read.

    Raises:
        UserError: the model's family is unknown.
    """
    model = config.model
    folder = draft_folder(model)
    if not needs_plugin(model):
        os.environ["VLLM_PLUGINS"] = ""  # vLLM must load the folder without them
    loading = Loading(VLLM, model, folder)
    with loading.until_it_objects():
        speculative = _speculative_config(config, loading.problems)
        _check_support(model)
        with stage("vLLM rejected its options"):
            vllm_config = _vllm_config(config, speculative)
        with set_current_vllm_config(vllm_config), one_rank(distributed):
            loading.target = _load(loading, vllm_config, vllm_config.model_config)
            loading.draft = _load_draft(loading, vllm_config)
        drafting = vllm_config.speculative_config
        if drafting is not None and loading.draft is not None:
            is_same_class = type(loading.draft) is type(loading.target)
            if is_same_class and Path(drafting.draft_model_config.model).samefile(model.directory):
                loading.note_that_target_drafts_for_itself()
    num_drafting = 0
    if loading.draft is not None:
        num_drafting = num_drafting_heads(model)
    return loading.report(vllm.__version__, num_drafting, _sees_images(loading))


def _sees_images(loading: Loading) -> bool | None:
    """Return whether vLLM passes the features of images to the draft model; None without images or drafts."""
    if loading.draft is None or loading.target is None or not supports_multimodal(loading.target):
        return None
    return supports_multimodal_embeddings(loading.draft)


def _speculative_config(config: EngineConfig, problems: list[str]) -> dict[str, Any] | None:
    """Return vLLM's speculative options without checking the heads; the load report shows problems of heads.

    Args:
        problems: a line is appended if vLLM would run another head than the one trained for a draft step.
    """
    model, given = config.model, config.speculative_config
    if (given is None and model.heads.layers == 0) or config.num_speculative_tokens == 0:
        return None
    if given is not None and given.get("method") != "mtp":
        return given
    try:
        num_tokens = num_tokens_to_draft(model, asked_tokens(config))
    except UserError as error:
        problems.append(error.problem)
        num_tokens = 1  # continue, to report other problems as well
    return {**mtp_options(model), **(given or {}), "num_speculative_tokens": num_tokens}


def _check_support(model: HfModel) -> None:
    try:
        check_quantization(model)
        check_trunk_of_drafter(model)
    except UserError as error:
        raise LoadError(f"{error.problem}; {error.hint}") from error


def _vllm_config(config: EngineConfig, speculative: dict[str, Any] | None) -> VllmConfig:
    options = {
        "model": str(config.model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "speculative_config": speculative,
    } | config.engine_kwargs
    # One process holds the complete model on the meta device.
    options |= {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    return EngineArgs(**{name: value for name, value in options.items() if value is not None}).create_engine_config()


def _load_draft(loading: Loading, vllm_config: VllmConfig) -> nn.Module | None:
    """Let vLLM build and fill the draft model; return None if the speculative method has no draft model."""
    drafting = vllm_config.speculative_config
    if drafting is None or drafting.method not in ("draft_model", *SERVED):
        return None
    if drafting.method not in SERVED:
        # KV caches are keyed by layer names; the MTP classes have distinct names.
        return _load(loading, vllm_config, drafting.draft_model_config, prefix="draft_model")
    family, hf_config = loading.model.family, loading.model.config
    has_own = family.outside(hf_config).heads_have_output_layers
    if drafting.method != MTP:
        # Without the plugin, a drafter with a draft vocabulary has an output layer of its own.
        has_own = bool(loading.model.heads.draft_vocab) and not family.drafter(hf_config).needs_plugin
    shared = SHARED[:1] if has_own else SHARED
    if drafting.method == MTP and loading.model.heads.has_output_layer:
        shared = ()  # vLLM replaces the embedding, which is the output layer, after loading
    return _load(loading, vllm_config, drafting.draft_model_config, shared=shared)


def _load(
    loading: Loading, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "", shared: tuple[str, ...] = ()
) -> nn.Module:
    build = partial(initialize_model, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    with set_default_torch_dtype(model_config.dtype):
        return loading.fill(", ".join(model_config.architectures), build, (*shared, *OPTIONAL))
