"""Load models into vLLM's classes on a CPU, then load the weights again in the way in which a worker receives new
weights.

    python reload.py MODEL_DIR...

No engine is started. For each model, a line of JSON with the errors of the transfer and the changed parameters is
printed.
"""

import json
import os
import sys
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


def reload(directory: Path) -> dict[str, Any]:
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


for each in sys.argv[1:]:
    print(json.dumps(reload(Path(each))))
