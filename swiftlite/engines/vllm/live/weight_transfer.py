"""Backends of vLLM's weight-transfer API: a worker reloads its model in place.

Registered by `plugin.py`, fed by `weight_transport.py`. vLLM's own backends say nothing of what was left out; these
fail unless every tensor found a parameter and every parameter a tensor. They work on a CPU too, where weights are
repacked.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from swiftlite.engines.loading.load_tracker import CARRIED, RunningLoad
from swiftlite.engines.vllm.live.ipc_handle import as_arguments


class Checked(WeightTransferEngine[Any, Any]):
    """Goes before a backend, and says what became of the tensors that it receives.

    The backend calls `load_weights` of `self.model`, with some of the tensors each time. See vLLM's base class for when
    the methods here are called.
    """

    supports_draft_weight_update = True

    def start_weight_update(self) -> None:
        """Take the model's parameters back to the form in which they are loaded."""
        is_draft = self.model is not self._default_model
        # vLLM gives the target's embedding and output layer to every MTP draft.
        shared = {id(parameter) for parameter in self._default_model.parameters()} if is_draft else ()
        served = {name for name, parameter in self.model.named_parameters() if id(parameter) not in shared}
        initialize_layerwise_reload(self.model)
        _forget_packed_experts(self.model)
        # Names that must be filled are those that parameters have both when they serve and when they are loaded. When
        # they serve, a tied output layer goes by the embedding's name; when they are loaded, what vLLM makes of other
        # parameters (W_UV of latent attention) is not there.
        expected = served & {name for name, _ in self.model.named_parameters()}
        self._expected = {name for name in expected if not name.startswith(CARRIED)}
        self._loaded: set[str] = set()
        self._unread: list[str] = []

    def receive_weights(self, update_info: Any) -> None:
        """Load one bucket as the backend does."""
        model = self.model
        watched: Any = _Watched(model)
        self.model = watched
        try:
            # Drafts refuse heads that are not whole, and a bucket has a part of them.
            with disable_mtp_completeness_check():
                super().receive_weights(update_info)  # pyright: ignore[reportAbstractUsage]  the backend's
        finally:
            self.model = model
        self._loaded |= watched.loaded
        self._unread += watched.unread

    def finish_weight_update(self) -> None:
        """Repack the parameters.

        What was loaded by then stays, also when this raises; that no answer is made with it is the caller's part
        (`WeightUpdate.check_whole`).

        Raises:
            ValueError: a tensor that nothing read, or a parameter that nothing filled.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        problems = [f"nothing reads {name}" for name in self._unread]
        problems += [f"nothing filled {name}" for name in sorted(self._expected - self._loaded)]
        if problems:
            raise ValueError(f"{type(self.model).__name__} did not take the weights:\n  " + "\n  ".join(problems))


class _Watched:
    """A model that loads tensors.

    Attributes:
        loaded: names of the parameters that were filled, wholly or in part.
        unread: names of tensors that nothing read.
    """

    def __init__(self, model: Any):
        self._model = model
        self.loaded: set[str] = set()
        self.unread: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        filling = RunningLoad()
        filling.expect(tensors)
        with filling:
            self.loaded |= self._model.load_weights(tensors.items())
        self.unread += filling.take_unread()


@dataclass
class FileInfo(WeightTransferUpdateInfo):
    """One bucket: a safetensors file that the worker can read, which may go once `update_weights` returns."""

    path: str


class _FileEngine(WeightTransferEngine[WeightTransferInitInfo, FileInfo]):
    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Files need no connection."""

    def receive_weights(self, update_info: FileInfo) -> None:
        model: Any = self.model
        model.load_weights(load_file(update_info.path).items())

    def shutdown(self) -> None:
        """Nothing is open."""


@dataclass
class IpcInfo(WeightTransferUpdateInfo):
    """One bucket: tensors side by side in a buffer on a GPU of the sender, see `ipc_handle.py`.

    Attributes:
        tensor_sizes: in bytes.
        gpu: the GPU's uuid.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    gpu: str
    buffer: dict[str, Any]


class _IpcEngine(IPCWeightTransferEngine):
    """vLLM's, but told of a buffer in plain values."""

    update_info_cls: Any = IpcInfo

    def receive_weights(self, update_info: Any) -> None:
        values = asdict(update_info)
        arguments = as_arguments(values.pop("buffer"), self.device.index)
        handles = {values.pop("gpu"): tuple(arguments)}
        super().receive_weights(IPCWeightTransferUpdateInfo(ipc_handles=handles, **values))


class FileTransfer(Checked, _FileEngine):
    """Buckets are files."""


class NcclTransfer(Checked, NCCLWeightTransferEngine):
    """Buckets are broadcast by the trainer's GPU."""


class IpcTransfer(Checked, _IpcEngine):
    """Buckets are on the GPU that the trainer and the worker share."""


def _forget_packed_experts(model: nn.Module) -> None:
    """Let vLLM repack experts at the end of a reload by removing their kernel.

    vLLM 0.32 packs them for a CPU when it builds their kernel, and keeps the kernel when it reloads (_setup_kernel in
    layers/fused_moe/unquantized_fused_moe_method.py), so the new weights would be treated as packed. There is no
    argument or hook for this; vLLM creates the method that holds the kernel (tests/e2e/test_live_weights.py)."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
            method.moe_kernel = None


def _repack_tied(model: nn.Module) -> None:
    """Repack the output layer of a tied model.

    vLLM reloads a shared parameter through its first layer (limitation 2 in model_loader/reload/__init__.py of 0.32),
    so on a CPU the output layer would use the packed old embedding."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
            layer.quant_method.process_weights_after_loading(layer)
