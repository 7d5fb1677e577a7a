"""Run SGLang's own configuration and weight loaders on a checkpoint, without an engine.

Imported in a subprocess (`engines/loading/dry_load.py`).
"""

import os
from functools import partial
from typing import Any

from torch import nn

from swiftlite.engines.sglang.options import cpu_options, cpu_variables, depth_problem

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

from swiftlite.bridge.tensors import some
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.loading.load_report import Loading, LoadReport, one_rank, stage
from swiftlite.engines.sglang.engine import checked_options
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.sglang.weight_transfer import SHARED

# Scales of keys and values in FP8 that a checkpoint may leave out: -1 means so (layers/quantization/kv_cache.py of
# 0.5.23).
OPTIONAL = (".k_scale", ".v_scale")


def dry_load(config: EngineConfig) -> LoadReport:
    """Let SGLang's loaders run on the checkpoint's headers; no tensor is read.

    Raises:
        UserError: no model of a known family is there.
    """
    model = config.model
    drafts = model.heads.layers > 0 and config.num_speculative_tokens != 0
    loading = Loading(SGLANG, model)
    problem = depth_problem(model, config.num_speculative_tokens) if drafts else None
    if problem:
        loading.problems.append(problem)
    with loading.until_it_objects():
        with stage("SGLang refuses its options"):
            server_args = checked_options(_options(config, drafts))
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        with one_rank(distributed):
            initialize_dp_attention(server_args)
            initialize_moe_config()
            loading.target = _load(loading, server_args)
            if drafts:
                loading.draft = _load(loading, server_args, is_draft_model=True)
                loading.problems += _replaced(loading)
                if type(loading.draft) is type(loading.target):
                    loading.note_that_target_drafts_for_itself()
    known = SGLANG.convention_for(model.family)
    num_drafting = known.num_drafting(model.heads.layers) if loading.draft is not None else 0
    return loading.report(sglang.__version__, num_drafting)


def _replaced(loading: Loading) -> list[str]:
    """Tensors of the checkpoint that the draft has taken, and then others in their place."""
    keys = sorted(key for key in loading.recorder.replaced if not key.endswith(SHARED))
    return [f"{type(loading.draft).__name__} loads another tensor over {key}" for key in some(keys)]


def _options(config: EngineConfig, drafts: bool) -> dict[str, Any]:
    """SGLang's options for heads that may be broken: what is wrong with them is to be found out."""
    num_tokens = config.num_speculative_tokens or 1
    drafting = {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": num_tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": num_tokens + 1,
    }
    return {
        "model_path": str(config.model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,
        "log_level": "error",
        **(drafting if drafts else {}),
        **cpu_options(drafts),
    }


def _load(loading: Loading, server_args: Any, is_draft_model: bool = False) -> nn.Module:
    with stage("SGLang refuses config.json"):
        config = ModelConfig.from_server_args(server_args, is_draft_model=is_draft_model)
        load_config = LoadConfig()
        quantization = _get_quantization_config(config, load_config)
    build = partial(_initialize_model, config, load_config, quantization)
    with set_default_torch_dtype(config.dtype):
        not_loaded = (*SHARED, *OPTIONAL) if is_draft_model else OPTIONAL
        return loading.fill(str(config.hf_config.architectures), build, not_loaded)
