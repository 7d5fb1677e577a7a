"""Backends of vLLM's weight-transfer API, with which a worker reloads its model in place.

`plugin.py` registers the backends, and `weight_transport.py` sends the weights. Unlike vLLM's backends, they raise an
error if a tensor was not read or a parameter was not filled. They also support CPUs, where vLLM stores weights in
another layout.
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
    """Base class placed before a backend. It checks that all tensors were read and all parameters filled.

    The backend calls `self.model.load_weights` repeatedly, each time with some of the tensors. vLLM's base class
    documents when the methods are called.
    """

    supports_draft_weight_update = True

    def start_weight_update(self) -> None:
        """Convert the model's parameters back to the layout for loading."""
        shared: set[int] = set()
        # The transfer of the draft model brings no embedding and output layer: they are filled with the target's.
        if self.model is not self._default_model:
            # A draft model, which shares the target's embedding and output layer.
            shared = {id(parameter) for parameter in self._default_model.parameters()}
        served = {name for name, parameter in self.model.named_parameters() if id(parameter) not in shared}
        # After this call, parameters are on the meta device until all tensors of their layer have arrived.
        initialize_layerwise_reload(self.model)
        _forget_packed_experts(self.model)
        # Expected names exist both while serving and while loading. While serving, a tied output layer has the
        # embedding's name; while loading, derived parameters (W_UV of latent attention) do not exist.
        expected = served & {name for name, _ in self.model.named_parameters()}
        # Parameters outside of the language model keep the values of the files with which the engine started.
        self._expected = {name for name in expected if not name.startswith(CARRIED)}
        self._loaded: set[str] = set()
        self._unread: list[str] = []
        self._casts: list[str] = []

    def receive_weights(self, update_info: Any) -> None:
        """Load one bucket with the backend."""
        model = self.model
        # Backends of vLLM call `self.model.load_weights` and drop its result, the names of filled parameters.
        watched: Any = _Watched(model)
        self.model = watched
        try:
            # Draft classes reject incomplete heads, and a bucket contains only some of their tensors.
            with disable_mtp_completeness_check():
                super().receive_weights(update_info)  # pyright: ignore[reportAbstractUsage]  the backend's
        finally:
            self.model = model
        self._loaded |= watched.loaded
        self._unread += watched.unread
        self._casts += watched.casts

    def finish_weight_update(self) -> None:
        """Convert the parameters to the layout for computing, and check that all were filled.

        If this method raises, loaded weights remain; the caller must not generate with them
        (`WeightUpdate.check_whole`).

        Raises:
            ValueError: a tensor was not read, or cast to codes of a quantization, or a parameter was not filled.
        """
        # Before the check, because it also restores the layers that got no tensors.
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        # Both directions: a renamed tensor is unread, and its parameter unfilled.
        problems = [f"not read: {name}" for name in self._unread]
        problems += [f"not filled: {name}" for name in sorted(self._expected - self._loaded)]
        problems += self._casts
        if problems:
            raise ValueError(f"incomplete weights for {type(self.model).__name__}:\n  " + "\n  ".join(problems))


class _Watched:
    """A model during a transfer. It records which tensors it loads.

    Attributes:
        loaded: names of the parameters that were filled, completely or in part.
        unread: names of tensors that were not read.
        casts: a line for each tensor that was cast to codes of a quantization, as `LoadTracker.cast_problems` returns.
    """

    def __init__(self, model: Any):
        self._model = model
        self.loaded: set[str] = set()
        self.unread: list[str] = []
        self.casts: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        filling = RunningLoad()
        filling.expect(tensors)
        with filling:
            self.loaded |= self._model.load_weights(tensors.items())
        self.unread += filling.take_unread()
        self.casts += filling.cast_problems()


@dataclass
class FileInfo(WeightTransferUpdateInfo):
    """One bucket: a safetensors file that the worker can read.

    The file may be deleted after `update_weights` has returned.
    """

    path: str


class _FileEngine(WeightTransferEngine[WeightTransferInitInfo, FileInfo]):
    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing, because files need no connection."""

    def receive_weights(self, update_info: FileInfo) -> None:
        model: Any = self.model
        model.load_weights(load_file(update_info.path).items())

    def shutdown(self) -> None:
        """Do nothing, because there is no connection."""


@dataclass
class IpcInfo(WeightTransferUpdateInfo):
    """One bucket: a buffer of concatenated tensors on a GPU of the sender, see `ipc_handle.py`.

    Attributes:
        tensor_sizes: size of each tensor in bytes.
        gpu: uuid of the GPU.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    gpu: str
    buffer: dict[str, Any]


class _IpcEngine(IPCWeightTransferEngine):
    """vLLM's backend for CUDA IPC, which receives the buffer's handle as numbers and strings (`ipc_handle.py`)."""

    update_info_cls: Any = IpcInfo

    def receive_weights(self, update_info: Any) -> None:
        values = asdict(update_info)
        arguments = as_arguments(values.pop("buffer"), self.device.index)
        handles = {values.pop("gpu"): tuple(arguments)}
        super().receive_weights(IPCWeightTransferUpdateInfo(ipc_handles=handles, **values))


class FileTransfer(Checked, _FileEngine):
    """Backend for buckets in files."""


class NcclTransfer(Checked, NCCLWeightTransferEngine):
    """Backend for buckets that the trainer broadcasts from its GPU."""


class IpcTransfer(Checked, _IpcEngine):
    """Backend for buckets on a GPU that the trainer and the worker share."""


def _forget_packed_experts(model: nn.Module) -> None:
    """Remove the kernel of experts, so that vLLM packs their weights again at the end of a reload.

    On a CPU, vLLM 0.32 packs the weights of experts when it builds their kernel. It keeps the kernel in a reload
    (_setup_kernel in layers/fused_moe/unquantized_fused_moe_method.py) and would treat new weights as packed. vLLM has
    no argument or hook to change this (tests/e2e/test_live_weights.py).
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
            method.moe_kernel = None


def _repack_tied(model: nn.Module) -> None:
    """Pack the weights of the output layer again, if it shares the embedding.

    vLLM reloads a shared parameter through its first layer (limitation 2 in model_loader/reload/__init__.py of 0.32).
    On a CPU, the output layer would therefore use the packed old embedding.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
            layer.quant_method.process_weights_after_loading(layer)
