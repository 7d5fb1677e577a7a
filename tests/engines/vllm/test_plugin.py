"""Test the names of the plugin's classes."""

import ast
import importlib.util
from pathlib import Path

import pytest

VLLM = importlib.util.find_spec("vllm")


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
def test_the_plugin_replaces_no_draft_class_of_vllm():
    """The registry is read as text, because importing it takes longer than this test."""
    from swiftlite.engines.vllm.plugin import PLUGIN_DRAFTS

    assert VLLM is not None
    assert VLLM.submodule_search_locations
    package = Path(VLLM.submodule_search_locations[0])
    registry = ast.parse((package / "model_executor" / "models" / "registry.py").read_text())
    of_vllm = set()
    for statement in registry.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_SPECULATIVE_DECODING_MODELS":
            of_vllm = set(ast.literal_eval(statement.value))
    assert "MiMoMTPModel" in of_vllm
    assert not of_vllm & {convention.draft for convention in PLUGIN_DRAFTS.values()}
