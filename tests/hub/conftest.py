"""A hub with a tiny model."""

from pathlib import Path

import pytest

from tests.hub.server import files_of, running_hub
from tests.tiny import make_tiny_hf


@pytest.fixture(scope="session")
def tiny(shared) -> Path:
    """The directory of a model, to be read only."""
    return shared("hub-tiny", lambda directory: make_tiny_hf(directory, "qwen3", depth=1, with_tokenizer=True))


@pytest.fixture
def hub(tiny):
    """A hub that has it as org/tiny, with files beside it that nobody should fetch."""
    with running_hub() as hub:
        others = ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "model.gguf")
        hub.add("org/tiny", files_of(tiny) | dict.fromkeys(others, b"x"))
        yield hub
