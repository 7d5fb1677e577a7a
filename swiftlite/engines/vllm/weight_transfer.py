"""A backend of vLLM's weight-transfer API: a worker reloads its model in place from safetensors files.

Registered by `plugin.py`, called by `weight_channel.py`. vLLM's own backends send through GPUs and say nothing of
what was left out; this one works on a CPU too, where the weights are repacked, and fails unless every tensor found a
parameter and every parameter a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from swiftlite.engines.weight_filling import Filling


@dataclass
class FileInfo(WeightTransferUpdateInfo):
    """One bucket: a safetensors file that the worker can read, which may go once `update_weights` returns."""

    path: str


class FileTransfer(WeightTransferEngine[WeightTransferInitInfo, FileInfo]):
    """See vLLM's base class, which also says when each method is called."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileInfo
    supports_draft_weight_update = True

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Files need no connection."""

    def start_weight_update(self) -> None:
        """Take the model's parameters back to the form in which they are loaded."""
        self._is_draft = self.model is not self._default_model
        # vLLM gives the target's embedding and output layer to every MTP draft.
        shared = {id(parameter) for parameter in self._default_model.parameters()} if self._is_draft else ()
        served = {name for name, parameter in self.model.named_parameters() if id(parameter) not in shared}
        initialize_layerwise_reload(self.model)
        _forget_packed_experts(self.model)
        # Names that must be filled are those that parameters have both when they serve and when they are loaded. When
        # they serve, a tied output layer goes by the embedding's name; when they are loaded, what vLLM makes of other
        # parameters (W_UV of latent attention) is not there.
        self._expected = served & {name for name, _ in self.model.named_parameters()}
        self._loaded: set[str] = set()
        self._unread: list[str] = []
        self._draft_tensors: dict[str, torch.Tensor] = {}

    def receive_weights(self, update_info: FileInfo) -> None:
        """Load one bucket. Those of a draft wait for the last one, because drafts refuse heads that are not whole."""
        tensors = load_file(update_info.path)
        if self._is_draft:
            self._draft_tensors |= tensors
        else:
            self._load(tensors)

    def finish_weight_update(self) -> None:
        """Repack the parameters.

        What was loaded by then stays, also when this raises; that no answer is made with it is the caller's part
        (`WeightUpdate.check_whole`).

        Raises:
            ValueError: a tensor that nothing read, or a parameter that nothing filled.
        """
        if self._is_draft:
            self._load(self._draft_tensors)
            self._draft_tensors = {}
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        problems = [f"nothing reads {name}" for name in self._unread]
        problems += [f"nothing filled {name}" for name in sorted(self._expected - self._loaded)]
        if problems:
            raise ValueError(f"{type(self.model).__name__} did not take the weights:\n  " + "\n  ".join(problems))

    def shutdown(self) -> None:
        """Nothing is open."""

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        model: Any = self.model
        filling = Filling()
        filling.expect(tensors)
        with filling:
            self._loaded |= model.load_weights(tensors.items())
        self._unread += filling.take_unread()


def _forget_packed_experts(model: nn.Module) -> None:
    """Let vLLM pack experts anew at the end of a reload, by taking their kernel away.

    vLLM 0.32 packs them for a CPU when it builds their kernel, and keeps the kernel when it reloads (_setup_kernel in
    layers/fused_moe/unquantized_fused_moe_method.py): the new weights would be read as if they were packed. There is no
    argument or hook for it; vLLM makes the method that holds the kernel by itself (tests/e2e/test_live_weights.py).
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
            method.moe_kernel = None


def _repack_tied(model: nn.Module) -> None:
    """Pack the output layer of a tied model anew.

    vLLM reloads a shared parameter through the first layer that has it (limitation 2 in model_loader/reload/__init__.py
    of 0.32), so on a CPU the output layer would compute with what was packed of the old embedding.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
            layer.quant_method.process_weights_after_loading(layer)
