"""Run DSpark drafters in vLLM's older model runner, which vLLM 0.32 uses without Triton, as on a CPU.

vLLM runs them only in its newer model runner: "Model Runner V1 does not support: dspark speculative decoding"
(`VllmConfig._get_v1_model_runner_unsupported_features`, vllm/config/vllm.py of 0.32, called when an engine starts). The
older runner has the class `DFlashProposer` for DFlash (v1/spec_decode/dflash.py), whose block differs from that of
DSpark (`families/dflash.py`). The subclass here builds the block of DSpark, and selects the most likely drafts from
left to right with the Markov head. The draft model itself is vLLM's. Drafts are not drawn at a temperature above 0.

With Triton nothing is replaced. Without the replacements, tests/e2e/test_drafters.py fails for DSpark.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiftlite.engines.vllm.replace import replace


def without_dspark(unsupported: Callable[[Any], list[str]], vllm_config: Any) -> list[str]:
    """Return the names of what the older runner does not support, without DSpark."""
    return [name for name in unsupported(vllm_config) if not name.startswith("dspark")]


def uses_block(stock: Callable[[Any], bool], speculative_config: Any) -> bool:
    """Return whether the drafter is a block drafter: vLLM's `SpeculativeConfig.use_dflash`, also for DSpark."""
    return speculative_config.method in ("dflash", "dspark")


def block_proposer(stock: Any) -> Any:
    """Return a subclass of vLLM's `DFlashProposer` that also drafts with DSpark. It is a class, because the runner uses
    its name in annotations."""

    class BlockProposer(stock):
        def __init__(self, vllm_config: Any, *arguments: Any, **named: Any):
            self.is_dspark = vllm_config.speculative_config.method == "dspark"
            if self.is_dspark:
                vllm_config.speculative_config.method = "dflash"  # which the base classes compare
            super().__init__(vllm_config, *arguments, **named)

        def set_inputs_first_pass(self, *arguments: Any, **named: Any) -> tuple[int, torch.Tensor, Any]:
            """Return the number of queries, the indices of those that draft, and the metadata of attention."""
            if not self.is_dspark:
                return super().set_inputs_first_pass(*arguments, **named)
            # The base class adds an anchor to its masks. DSpark drafts from the anchor's state too: one mask less.
            number = self.num_speculative_tokens
            self.num_speculative_tokens = number - 1  # the anchor and a mask token for each further draft
            try:
                num_queries, _, metadata = super().set_inputs_first_pass(*arguments, **named)
            finally:
                self.num_speculative_tokens = number
            return num_queries, torch.arange(num_queries, device=self.device), metadata

        def _sample_draft_tokens(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, Any]:
            if not self.is_dspark:
                return super()._sample_draft_tokens(hidden_states, sampling_metadata)
            number = self.num_speculative_tokens
            logits = self.model.compute_draft_logits(hidden_states).unflatten(0, (-1, number))
            before = self.input_ids[: len(hidden_states) : number]  # the anchors
            drafts = []
            # One pass gives the logits of all places, but the Markov head reads the draft before each of them.
            for place in range(number):
                bias = self.model.markov_bias(self.model.markov_embed(before))
                before = self.model.map_draft_to_target((logits[:, place] + bias).argmax(dim=-1))
                drafts.append(before)
            return torch.stack(drafts, dim=1).flatten(), None

    return BlockProposer


def install() -> None:
    """Replace vLLM's methods and its class; repeated calls have no effect."""
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.worker import gpu_model_runner

    replace(VllmConfig, "_get_v1_model_runner_unsupported_features", without_dspark)
    replace(SpeculativeConfig, "use_dflash", uses_block)
    runner: Any = gpu_model_runner
    if runner.DFlashProposer.__module__ != __name__:
        runner.DFlashProposer = block_proposer(runner.DFlashProposer)
