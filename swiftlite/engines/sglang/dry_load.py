"""Run SGLang's own configuration and weight loaders on a checkpoint, without an engine.

Imported in a subprocess (`engines/loading/dry_load.py`).
"""

import os
from functools import partial
from typing import Any

from torch import nn

from swiftlite.engines.sglang.options import (
    cpu_options,
    cpu_variables,
    depth_problem,
    draft_folder,
    draft_model_options,
    is_on_cpu,
    is_recurrent,
    trunk_problem,
)

os.environ.update(cpu_variables())  # read when SGLang is imported

import sglang
from sglang.srt import distributed
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish

from swiftlite.base.heads import MTP
from swiftlite.bridge.tensors import some
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.loading.head_weights import OF_ORDER
from swiftlite.engines.loading.load_report import Loading, LoadReport, one_rank, stage
from swiftlite.engines.sglang.engine import checked_options
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.sglang.weight_transfer import SHARED
from swiftlite.families import gemma4_assistant
from swiftlite.families.drafters import BLOCKS
from swiftlite.families.resolved import HfModel

# Scales of an FP8 KV cache, which a checkpoint may omit; their default is -1 (layers/quantization/kv_cache.py of
# 0.5.23).
OPTIONAL = (".k_scale", ".v_scale")
OF_ASSISTANT = (".self_attn.qkv_proj.weight", ".self_attn.k_norm.weight")
"""Parameters in SGLang's class of an assistant for keys and values of its own, which its attention does not compute.
The queries of `qkv_proj` are in the files (`_missing`)."""


def dry_load(config: EngineConfig) -> LoadReport:
    """Run SGLang's loaders on the checkpoint's headers; no tensor is read.

    Raises:
        UserError: the model's family is unknown.
    """
    model = config.model
    drafts = model.heads.layers > 0 and config.num_speculative_tokens != 0
    loading = Loading(SGLANG, model, draft_folder(model) if drafts else None)
    if problem := trunk_problem(model):
        loading.problems.append(problem)
    if drafts and (problem := depth_problem(model, config.num_speculative_tokens)):
        loading.problems.append(problem)
    with loading.until_it_objects():
        with stage("SGLang rejected its options"):
            server_args = checked_options(_options(config, drafts))
        # Layers read the options of the server from this context while they are built.
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        with one_rank(distributed):
            initialize_dp_attention(server_args)
            initialize_moe_config()
            loading.target = _load(loading, server_args)
            if drafts:
                for number in _draft_models(model):
                    loading.draft = _load(loading, server_args, is_draft_model=True, number=number)
                loading.problems += _replaced(loading) + _missing(loading)
                loading.problems += _without_features(loading)
                if type(loading.draft) is type(loading.target):
                    loading.note_that_target_drafts_for_itself()
    num_drafting = 0
    if loading.draft is not None:
        num_drafting = 1
        if model.heads.kind == MTP:
            num_drafting = SGLANG.convention_for(model.family).num_drafting(model.heads.layers)
    return loading.report(sglang.__version__, num_drafting)


def _draft_models(model: HfModel) -> list[int | None]:
    """Return the numbers of the draft models, of which SGLang has one for each head that drafts in its step; a single
    None if one draft model has all heads.
    """
    has_several = model.heads.kind == MTP and SGLANG.convention_for(model.family).heads == "each"
    return list(range(model.heads.layers)) if has_several else [None]


def _replaced(loading: Loading) -> list[str]:
    """Return a description of the tensors in the draft model that are later overwritten by other tensors."""
    # Some classes load all heads into the same parameters, without an error.
    keys = sorted(key for key in loading.recorder.replaced if not key.endswith((*SHARED, OF_ORDER)))
    return [f"{type(loading.draft).__name__} overwrites {key} with another tensor" for key in some(keys)]


def _missing(loading: Loading) -> list[str]:
    """Return a problem for each tensor of an assistant that is not in the files."""
    model = loading.model
    if model.heads.kind != gemma4_assistant.KIND:
        return []
    wanted = [key for row in model.family.head_rows(model.config, 0) for key in row.hf]
    return [f"{key} is missing" for key in some(key for key in wanted if key not in loading.recorder.keys)]


def _without_features(loading: Loading) -> list[str]:
    """Return a problem if the trunk does not return the states that the drafter reads."""
    heads = loading.model.heads
    name = "set_dflash_layers_to_capture" if heads.kind in BLOCKS else "set_eagle3_layers_to_capture"
    reads_states = heads.features and heads.kind != gemma4_assistant.KIND  # which reads the cache of these layers
    if not reads_states or hasattr(loading.target, name):
        return []
    return [f"{type(loading.target).__name__} does not return the states that the drafter {heads.kind!r} reads"]


def _options(config: EngineConfig, drafts: bool) -> dict[str, Any]:
    """Return SGLang's options without checking the heads; the load report shows problems of heads."""
    num_tokens = config.num_speculative_tokens or 1
    drafting: dict[str, Any] = {}
    if drafts and not SGLANG.requires_gpu(config.model.heads.kind):  # SGLang rejects the options on a CPU
        drafting = draft_model_options(config.model, num_tokens)
    return {
        "model_path": str(config.model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,
        "log_level": "error",
        **drafting,
        **cpu_options(config.model.family, drafts),
        **_without_snapshots(config.model),
    }


def _without_snapshots(model: HfModel) -> dict[str, bool]:
    """Return the option without which SGLang refuses models with recurrent layers on a CPU, which cannot keep snapshots
    of their states."""
    return {"disable_radix_cache": True} if is_recurrent(model) and is_on_cpu() else {}


def _load(loading: Loading, server_args: Any, is_draft_model: bool = False, number: int | None = None) -> nn.Module:
    with stage("SGLang rejected config.json"):
        folder = loading.draft_folder if is_draft_model else None
        path: Any = str(folder) if folder else None  # None: that of the trunk
        config = ModelConfig.from_server_args(server_args, model_path=path, is_draft_model=is_draft_model)
        load_config = LoadConfig(draft_model_idx=number)
        quantization = _get_quantization_config(config, load_config)
    build = partial(_initialize_model, config, load_config, quantization)
    with set_default_torch_dtype(config.dtype):
        not_loaded = OPTIONAL
        if is_draft_model:
            not_loaded = (*SHARED, *OPTIONAL)
            if loading.model.heads.kind == gemma4_assistant.KIND:
                not_loaded += OF_ASSISTANT
        return loading.fill(str(config.hf_config.architectures), build, not_loaded)
