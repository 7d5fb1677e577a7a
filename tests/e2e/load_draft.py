"""Runs vLLM's configuration, registry and weight loader on the draft of a checkpoint, without an engine.

    python load_draft.py MODEL_DIR

Prints the draft's class and how many of its parameters were loaded; fails as vLLM would.
"""

import sys
import tempfile

from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model

if __name__ == "__main__":
    options = EngineArgs(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    config = options.create_engine_config()
    assert config.speculative_config is not None
    with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel()
        draft_config = config.speculative_config.draft_model_config
        draft = initialize_model(vllm_config=config, model_config=draft_config)
        get_model_loader(config.load_config).load_weights(draft, draft_config)
    print(type(draft).__name__, sum(1 for _ in draft.parameters()))
