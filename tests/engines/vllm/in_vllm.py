"""Functions that `dry_loads` calls in a process with vLLM on a CPU."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported

import torch
from safetensors.torch import save_file
from vllm import distributed
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from swiftlite.engines.loading.load_report import one_rank
from swiftlite.engines.vllm.live.weight_transfer import FileInfo, FileTransfer
from tests.weights_of import trunk_and_heads

torch.accelerator.empty_cache = lambda: None  # which raises where there is no accelerator


def reload(name: str) -> dict[str, Any]:
    """Load a model into vLLM's class, then load its weights again in the way in which a worker receives new weights.

    No engine is started. Returns the errors of the transfer, the changed parameters and all parameters.
    """
    directory = Path(name)
    options: Any = {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True}
    vllm_config = EngineArgs(model=str(directory), **options).create_engine_config()
    with set_current_vllm_config(vllm_config), one_rank(distributed):
        model = get_model(vllm_config=vllm_config)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        worker = FileTransfer(WeightTransferConfig(), vllm_config, torch.device("cpu"), model)
        trunk, _ = trunk_and_heads(directory)
        worker.start_weight_update()
        for number, bucket in enumerate(trunk):
            path = directory / f"bucket-{number}"
            save_file(bucket, path)
            worker.receive_weights(FileInfo(path=str(path)))
            path.unlink()
        problems = ""
        try:
            worker.finish_weight_update()
        except ValueError as error:
            problems = str(error)
        after = dict(model.named_parameters())
        changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    return {"problems": problems, "changed": changed, "parameters": list(before)}


def support_nvfp4() -> None:
    """Let vLLM build modules in NVFP4, for which it has no kernel on a CPU. A dry load runs none."""
    from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel

    kernel: Any = MarlinNvFp4LinearKernel
    kernel.is_supported = lambda *arguments: (True, None)


def support_fp8() -> None:
    """Let vLLM build modules in FP8. Its kernels for a CPU require AMX, and a dry load runs none."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    for kernel in vars(cpu).values():
        if getattr(kernel, "__module__", "") == cpu.__name__ and "is_supported" in vars(kernel):
            kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
