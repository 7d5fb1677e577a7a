"""What SGLang would do with a checkpoint, found out by its own configuration and weight loaders, without an engine.

Imported in a process of its own (`engines/dry_load.py`).
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from swiftlite.engines.sglang.options import cpu_options, cpu_variables, depth_problem

os.environ.update(cpu_variables())  # read when SGLang is imported

import sglang
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish

from swiftlite.bridge.tensors import Checkpoint, some
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.load_report import (
    LoadError,
    LoadReport,
    drafts_for_itself,
    stage,
    unfilled,
    unknown_class,
    unread,
)
from swiftlite.engines.served_model import ServedModel, read_model
from swiftlite.engines.sglang.engine import checked_options
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.weight_recorder import WeightRecorder

# What SGLang takes from the target for every MTP draft (`set_embed_and_head` of the draft classes), loaded or not.
SHARED = ("embed_tokens.weight", "lm_head.weight")


def dry_load(config: EngineConfig) -> LoadReport:
    """Let SGLang's loaders run on the checkpoint's headers; no tensor is read.

    Raises:
        UserError: no model of a known family is there.
    """
    model = read_model(config.model)
    drafts = model.heads.layers > 0 and config.num_speculative_tokens != 0
    problem = depth_problem(model, config.num_speculative_tokens) if drafts else None
    problems = [problem] if problem else []
    recorder = WeightRecorder(Checkpoint(model.directory).stored)
    target = draft = None
    try:
        with stage("SGLang refuses its options"):
            server_args = checked_options(_options(model, config, drafts))
        with _process_groups(server_args):
            target = _load(server_args, recorder)
            problems += unfilled(recorder, target)
            if drafts:
                draft = _load(server_args, recorder, is_draft_model=True)
                problems += unfilled(recorder, draft, SHARED)
                problems += _replaced(recorder, draft)
                if type(draft) is type(target):
                    problems.append(drafts_for_itself(target))
        if model.heads.layers == 0 or draft is not None:
            problems += unread(SGLANG, model, recorder)
    except LoadError as error:
        problems.append(str(error))
    known = SGLANG.convention_for(model.family)
    return LoadReport(
        engine=f"sglang {sglang.__version__}",
        target=target and type(target).__name__,
        draft=draft and type(draft).__name__,
        num_mtp_heads=model.heads.layers,
        num_drafting=known.num_drafting(model.heads.layers) if draft is not None else 0,
        problems=problems,
        notes=unknown_class(SGLANG, model, draft),
    )


def _replaced(recorder: WeightRecorder, draft: nn.Module) -> list[str]:
    """Tensors of the checkpoint that the draft has taken, and then others in their place."""
    keys = sorted(key for key in recorder.replaced if not key.endswith(SHARED))
    return [f"{type(draft).__name__} loads another tensor over {key}" for key in some(keys)]


def _options(model: ServedModel, config: EngineConfig, drafts: bool) -> dict[str, Any]:
    """SGLang's options for heads that may be broken: what is wrong with them is to be found out."""
    num_tokens = config.num_speculative_tokens or 1
    drafting = {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": num_tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": num_tokens + 1,
    }
    return {
        "model_path": str(model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,
        "log_level": "error",
        **(drafting if drafts else {}),
        **cpu_options(drafts),
    }


@contextmanager
def _process_groups(server_args: Any) -> Iterator[None]:
    """One process holds all of it, without memory; which part of a tensor a rank has is not in question."""
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            initialize_model_parallel()
            initialize_dp_attention(server_args)
            initialize_moe_config()
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _load(server_args: Any, recorder: WeightRecorder, is_draft_model: bool = False) -> nn.Module:
    """The model as SGLang makes and fills it, without numbers."""
    with stage("SGLang refuses config.json"):
        config = ModelConfig.from_server_args(server_args, is_draft_model=is_draft_model)
        load_config = LoadConfig()
        quantization = _get_quantization_config(config, load_config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        with stage(f"SGLang cannot build {config.hf_config.architectures}"):
            model: Any = _initialize_model(config, load_config, quantization)
        with stage(f"SGLang's {type(model).__name__} stops at the checkpoint"), recorder:
            model.load_weights(recorder.weights())
    return model
