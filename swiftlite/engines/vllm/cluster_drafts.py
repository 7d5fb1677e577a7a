"""Draft with assistants of Gemma 4 that have clusters of tokens on a CPU.

vLLM 0.32 captures a CUDA graph of their output layer when it loads one (`Gemma4Proposer` in v1/spec_decode/gemma4.py).
On a CPU this fails: "RuntimeError: Tried to instantiate dummy base class CUDAGraph". Without graphs, vLLM computes the
same drafts from logits. Without the replacement, tests/e2e/test_gemma4_e.py fails.
"""

from typing import Any


def install() -> None:
    """Replace vLLM's method by one that captures nothing; repeated calls have no effect."""
    from vllm.v1.spec_decode import gemma4

    drafts: Any = gemma4
    drafts.Gemma4Proposer._setup_centroids_cuda_graphs = lambda proposer: None
