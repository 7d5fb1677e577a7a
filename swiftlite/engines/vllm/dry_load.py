"""What vLLM would do with a checkpoint, found out by its own configuration and weight loaders, without an engine.

Imported in a process of its own (`engines/dry_load.py`).
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported

import torch
import vllm
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from swiftlite.bridge.tensors import Checkpoint
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
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.options import num_drafting_heads, num_tokens_to_draft
from swiftlite.engines.weight_recorder import WeightRecorder
from swiftlite.errors import UserError

# What vLLM takes from the target for every MTP draft (v1/spec_decode/llm_base_proposer.py), loaded or not.
SHARED = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")


def dry_load(config: EngineConfig) -> LoadReport:
    """Let vLLM's loaders run on the checkpoint's headers; no tensor is read.

    Raises:
        UserError: no model of a known family is there.
    """
    model = read_model(config.model)
    problems: list[str] = []
    recorder = WeightRecorder(Checkpoint(model.directory).stored)
    target = draft = None
    try:
        speculative = _speculative_config(model, config, problems)
        with stage("vLLM refuses its options"):
            vllm_config = _vllm_config(model, config, speculative)
        with _process_groups(vllm_config):
            target = _load(vllm_config, vllm_config.model_config, recorder)
            problems += unfilled(recorder, target)
            draft = _load_draft(vllm_config, recorder)
        drafting = vllm_config.speculative_config
        if draft is not None and drafting is not None:
            problems += unfilled(recorder, draft, SHARED if drafting.method == "mtp" else ())
            directory = Path(drafting.draft_model_config.model)
            if type(draft) is type(target) and directory.samefile(model.directory):
                problems.append(drafts_for_itself(target))
        if model.heads.layers == 0 or draft is not None:
            problems += unread(VLLM, model, recorder)
    except LoadError as error:
        problems.append(str(error))
    return LoadReport(
        engine=f"vllm {vllm.__version__}",
        target=target and type(target).__name__,
        draft=draft and type(draft).__name__,
        num_mtp_heads=model.heads.layers,
        num_drafting=num_drafting_heads(model) if draft is not None else 0,
        problems=problems,
        notes=unknown_class(VLLM, model, draft),
    )


def _speculative_config(model: ServedModel, config: EngineConfig, problems: list[str]) -> dict[str, Any] | None:
    """vLLM's options of drafting for heads that may be broken: what is wrong with them is to be found out.

    Args:
        problems: gets a line when vLLM would run another head than the one trained for a step.
    """
    given = config.speculative_config
    if (given is None and model.heads.layers == 0) or config.num_speculative_tokens == 0:
        return None
    if given is not None and given.get("method") != "mtp":
        return given
    num_tokens = config.num_speculative_tokens if given is None else given.get("num_speculative_tokens")
    try:
        num_tokens = num_tokens_to_draft(model, num_tokens)
    except UserError as error:
        problems.append(error.problem)
        num_tokens = 1  # the rest can be found out all the same
    return {"method": "mtp", **(given or {}), "num_speculative_tokens": num_tokens}


def _vllm_config(model: ServedModel, config: EngineConfig, speculative: dict[str, Any] | None) -> VllmConfig:
    options = {
        "model": str(model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "speculative_config": speculative,
    } | config.engine_kwargs
    # One process holds all of it, without memory; which part of a tensor a rank has is not in question.
    options |= {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    return EngineArgs(**{name: value for name, value in options.items() if value is not None}).create_engine_config()


@contextmanager
def _process_groups(vllm_config: VllmConfig) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            initialize_model_parallel()  # groups for experts too, where the model has some
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _load_draft(vllm_config: VllmConfig, recorder: WeightRecorder) -> nn.Module | None:
    """The draft model as vLLM makes and fills it; None where drafting needs no model."""
    drafting = vllm_config.speculative_config
    if drafting is None or drafting.method not in ("mtp", "draft_model"):
        return None
    # Key-value caches go by the layers' names; the MTP classes have names of their own.
    prefix = "draft_model" if drafting.method == "draft_model" else ""
    return _load(vllm_config, drafting.draft_model_config, recorder, prefix)


def _load(vllm_config: VllmConfig, model_config: ModelConfig, recorder: WeightRecorder, prefix: str = "") -> nn.Module:
    """The model as vLLM makes and fills it, without numbers."""
    name = ", ".join(model_config.architectures)
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        with stage(f"vLLM cannot build {name}"):
            model: Any = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        with stage(f"vLLM's {type(model).__name__} stops at the checkpoint"), recorder:
            model.load_weights(recorder.weights())
    return model
