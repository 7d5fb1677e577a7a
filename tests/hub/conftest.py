"""Fixtures with a hub and a tiny model."""

import json
from pathlib import Path

import pytest

from tests.hub.asking import start
from tests.hub.server import files_of, running_hub
from tests.tiny import make_tiny_hf

ROWS = b"".join(b'{"query": "q%d", "response": "a"}\n' % number for number in range(24))
SFT = """megatron sft --model org/tiny --dataset org/rows#20 --output_dir run --train_iters 2 --global_batch_size 2
    --max_length 64 --torch_dtype float32 --acceptance_samples 2 --acceptance_max_new_tokens 4""".split()


@pytest.fixture(scope="session")
def tiny(shared) -> Path:
    """Return the directory of a model, which must not be changed."""
    return shared("hub-tiny", lambda directory: make_tiny_hf(directory, "qwen3", depth=1, with_tokenizer=True))


@pytest.fixture(scope="session")
def run(shared, tiny) -> Path:
    """Return a directory with `run`: two steps of a model and a dataset of the hub, in two processes.

    It must not be changed.
    """

    def make(directory: Path) -> None:
        with running_hub() as hub:
            hub.add("org/tiny", files_of(tiny))
            hub.add("org/rows", {"README.md": b"", "rows.jsonl": ROWS}, kind="datasets")
            done = start(hub, directory, *SFT, NPROC_PER_NODE="2")
            assert done.returncode == 0, done.stderr
            (directory / "stderr").write_text(done.stderr)
            (directory / "asked.json").write_text(json.dumps(hub.asked))

    return shared("hub-run", make)


@pytest.fixture
def hub(tiny):
    """Run a hub with the model org/tiny, and with additional files that must not be downloaded."""
    with running_hub() as hub:
        others = ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "model.gguf")
        hub.add("org/tiny", files_of(tiny) | dict.fromkeys(others, b"x"))
        yield hub
