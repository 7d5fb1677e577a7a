"""Compute the output of the trunk, which the heads and their losses read: one interface, `TrunkSource`.

    source               decoder layers              output of a micro-batch
    `ComputedTrunk`      in the model                computed by the step, together with the heads
    `StreamedTrunk`      in files                    computed before the first step, for the cache
    `HiddenStateCache`   those of another source     read from a file (`train/hidden_state_cache.py`)

While new heads are fitted, before the first step, a `ReusedTrunk` runs the layers of a `ComputedTrunk` once for all
fits.

A frozen trunk is a `ComputedTrunk` whose model computes no gradients (`ModelSettings.freeze_trunk`). A quantized trunk
is decoded when it is loaded, and differs only in exports (`plan/trunk.py`).

A streamed trunk (not `Trunk.holds_layers`) is larger than the memory. All micro-batches of a group pass through a
layer, while a thread reads the next layer from the files:

    layer in use   1             2             3
    computes       1 for all     2 for all     3 for all     micro-batches of the group
    reads          2             3             4

Two layers and the group's hidden states are in memory. Each group reads every layer once, so larger groups read less.
On a GPU, the states of a micro-batch are copied from and to pinned memory while another micro-batch is computed, and
the weights of the next layer while this one computes (`runtime/transfers.py`). The host waits once per layer, until the
layer before is computed, so that memory does not fill with queued copies.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.binding import Binding
from swiftlite.bridge.layers import DecoderLayers
from swiftlite.data.batch import Batch
from swiftlite.families.resolved import HfModel
from swiftlite.model.forward import forward, on_this_rank, run_batches
from swiftlite.model.gpt import GPTModel, TrunkOutput
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers.streamed import StreamedBlock
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.model.ranks import all_reduce_max
from swiftlite.plan.trunk import Trunk
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.runtime.transfers import Event, Stored, Transfers

HashTensor = Callable[[torch.Tensor], str]
REUSED_GB = 2.0
"""Maximum memory on the host of each rank for the states of a `ReusedTrunk`."""
PROGRESS_SECONDS = 15
"""Minimum interval of progress messages in seconds."""


@dataclass(frozen=True)
class StreamedOutput:
    """The trunk's output for one micro-batch.

    Attributes:
        batch: the micro-batch, as it was given.
        output: the trunk's output.
        last_input_SBH: the input of the last decoder layer; None if it was not requested.
        ends_group: whether the micro-batch is the last of its group.
    """

    batch: Batch
    output: TrunkOutput
    last_input_SBH: torch.Tensor | None
    ends_group: bool = True


class TrunkObserver(Protocol):
    """Receives what `TrunkLayers.run_unlabeled` computes."""

    def begin(self, batch: Batch) -> None:
        """Receive a micro-batch before its heads are computed: the part on this rank, on the device."""
        ...

    def see_last_input(self, hidden_SBH: torch.Tensor) -> None:
        """Receive the input of the trunk's last decoder layer for this micro-batch."""
        ...


class TrunkSource(Protocol):
    """Returns the output of the trunk in a training step."""

    def output(self, model: nn.Module, batch: Batch) -> TrunkOutput | None:
        """Return the argument `trunk` of `GPTModel.forward` for a micro-batch; None: the forward pass computes the
        trunk. Collective.

        Raises:
            UserError: the output cannot be computed or read.
        """
        ...


class TrunkLayers(TrunkSource, Protocol):
    """A source that runs the decoder layers, also before the first step."""

    def outputs_before_steps(self, batches: Iterable[Batch]) -> Iterator[StreamedOutput]:
        """Yield the outputs for the micro-batches if steps cannot compute them, otherwise nothing. Collective.

        Args:
            batches: the part of each micro-batch on this rank, on the device (`on_this_rank`); the same number on all
                ranks.
        """
        ...

    def run_unlabeled(
        self, chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], observers: Sequence[TrunkObserver]
    ) -> None:
        """Run micro-batches through trunk and heads without labels, so that no logits are computed. Collective.

        Args:
            chunks: the stages of the model on this rank. The last decoder layer and all heads must be on one stage.
            batches: this rank's micro-batches, the same number on every data-parallel rank.
            observers: see the micro-batches, if the heads are on this rank.
        """
        ...

    def hashes(self, hash_tensor: HashTensor) -> dict[str, str]:
        """Return the hash of each parameter of decoder layers that the model lacks, by its name in a model that has all
        layers.
        """
        ...


class ComputedTrunk:
    """A trunk whose decoder layers are in the model. The forward pass of a step computes it together with the heads."""

    def output(self, model: nn.Module, batch: Batch) -> None:
        """Return None: the forward pass computes the trunk."""

    def outputs_before_steps(self, batches: Iterable[Batch]) -> Iterator[StreamedOutput]:
        """Yield nothing: steps compute the outputs."""
        return iter(())

    def run_unlabeled(
        self, chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], observers: Sequence[TrunkObserver]
    ) -> None:
        """Run micro-batches through the model."""

        # megatron-core's block calls layers with keyword arguments (transformer_block.py: `TransformerBlock.forward`).
        def see_input(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            for observer in observers:
                observer.see_last_input(kwargs["hidden_states"])

        def forward_step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Any, Callable]:
            batch = _without_labels(next(batches))
            for observer in observers:
                observer.begin(batch)
            output = forward(chunk, batch)
            return output, lambda losses: (torch.zeros(()), torch.zeros((), dtype=torch.int32), None)

        # `forward_step` announces a micro-batch before the hook sees its input, so observers can pair the two.
        last_layers: list[Any] = [chunk.decoder.layers[-1] for chunk in chunks if chunk.mtp_process]
        hooks = [layer.register_forward_pre_hook(see_input, with_kwargs=True) for layer in last_layers]
        run_batches(chunks, mesh, batches, forward_step, forward_only=True)
        for hook in hooks:
            hook.remove()

    def hashes(self, hash_tensor: HashTensor) -> dict[str, str]:
        """Return nothing: the model has all layers."""
        return {}


COMPUTED = ComputedTrunk()


class ReusedTrunk:
    """A `ComputedTrunk` on one stage whose layers run once; the states that heads and their fits read are kept.

    The states of the trunk do not depend on the heads, so heads can be run again without the layers. The results are
    bitwise identical. Only `run_unlabeled` is needed for fits.
    """

    def __init__(self):
        self._kept: list[tuple[Batch, torch.Tensor, torch.Tensor]] = []

    @staticmethod
    def supports(chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], trunk: TrunkLayers) -> bool:
        """Return whether the states of all micro-batches can be kept: at most REUSED_GB of memory on the host."""
        if trunk is not COMPUTED or len(chunks) > 1 or mesh.pp.size() > 1 or chunks[0].tower is not None:
            return False
        if chunks[0].heads.features:  # which would have to be kept as well
            return False
        num_positions = sum(batch.position_ids_BS.numel() for batch in batches)
        state_bytes = chunks[0].config.hidden_size * next(chunks[0].parameters()).element_size()
        # One decision for all ranks: experts exchange tokens within each forward pass.
        # Two states per position: the input of the last layer, and that of the final norm.
        return all_reduce_max(2 * num_positions * state_bytes, mesh, mesh.dp) <= REUSED_GB * 1e9

    def run_unlabeled(
        self, chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], observers: Sequence[TrunkObserver]
    ) -> None:
        """Run micro-batches, each time the same ones, through trunk and heads; after the first time only through the
        heads.
        """
        (model,) = chunks
        if not self._kept:
            recorder = _Recorder(model)
            COMPUTED.run_unlabeled(chunks, mesh, batches, [*observers, recorder])
            self._kept = recorder.finish()
            return
        # The kept state is that before the final norm, which `streamed_output` applies.
        for batch, last_input_SBH, hidden_SBH in self._kept:
            device = mesh.device.torch_device
            output = model.streamed_output(on_device(hidden_SBH, device), batch.labels_KBS[0])
            _run_heads(model, StreamedOutput(batch, output, on_device(last_input_SBH, device)), observers)


class _Recorder:
    """Keeps each micro-batch, the input of the last decoder layer, and the input of the final norm."""

    def __init__(self, model: GPTModel):
        self._batches: list[Batch] = []
        self._last_inputs_SBH: list[torch.Tensor] = []
        self._outputs_SBH: list[torch.Tensor] = []
        # The input of the norm, because heads may read the state before it.
        final_norm: Any = model.decoder.final_layernorm
        self._hook = final_norm.register_forward_pre_hook(self._see_output)

    def begin(self, batch: Batch) -> None:
        self._batches.append(batch)

    def see_last_input(self, hidden_SBH: torch.Tensor) -> None:
        self._last_inputs_SBH.append(hidden_SBH.cpu())

    def _see_output(self, norm: nn.Module, args: tuple) -> None:
        self._outputs_SBH.append(args[0].cpu())

    def finish(self) -> list[tuple[Batch, torch.Tensor, torch.Tensor]]:
        """Return what was kept, by micro-batch."""
        self._hook.remove()
        return list(zip(self._batches, self._last_inputs_SBH, self._outputs_SBH, strict=True))


def _run_heads(model: GPTModel, streamed: StreamedOutput, observers: Sequence[TrunkObserver]) -> None:
    assert streamed.last_input_SBH is not None
    for observer in observers:
        observer.begin(streamed.batch)
        observer.see_last_input(streamed.last_input_SBH)
    model(ModelInputs.of(streamed.batch), Target.of(streamed.batch), streamed.output)


def open_trunk(trunk: Trunk, chunks: Sequence[GPTModel], hf_model: HfModel, mesh: Mesh) -> TrunkLayers:
    """Return the source that runs the decoder layers of a model.

    Args:
        hf_model: the directory that has the decoder layers, if the model has none.
    """
    if trunk.holds_layers:
        return COMPUTED
    return StreamedTrunk(chunks[0], hf_model, mesh, trunk)


def _without_labels(batch: Batch) -> Batch:
    return replace(batch, labels_KBS=torch.full_like(batch.labels_KBS, IGNORE_INDEX))


class _Progress:
    """Logs how many layers are done, at most every PROGRESS_SECONDS."""

    def __init__(self, num_layers: int):
        self._num_layers = num_layers
        self._last = time.monotonic()

    def show(self, number: int, done: str) -> None:
        """Log the number of layers that are done, if it is time.

        Args:
            done: what was done with the layers, such as "hashed".
        """
        now = time.monotonic()
        if now - self._last > PROGRESS_SECONDS:
            logger.info("trunk: %d of %d layers %s", number, self._num_layers, done)
            self._last = now


class StreamedTrunk:
    """Computes the trunk of a model without decoder layers.

    Args:
        model: the model.
        hf_model: the directory that has the layers.
        mesh: the ranks of the model; all of them call the same methods in the same order.
        trunk: the cache of the outputs, and the size of the hidden states that wait between two layers, on each rank.
    """

    def __init__(self, model: GPTModel, hf_model: HfModel, mesh: Mesh, trunk: Trunk):
        assert isinstance(model.decoder, StreamedBlock)
        tower = hf_model.tower
        assert tower is None or not tower.num_deepstack  # layers are computed without the tower's outputs
        self._model, self._block = model, model.decoder
        self._hf_model = hf_model
        self._mesh = mesh
        self._trunk = trunk
        self._transfers = Transfers(mesh.device.torch_device)
        self._progress = _Progress(self.num_layers)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._block.layer_specs)

    def output(self, model: nn.Module, batch: Batch) -> None:
        """Refuse to read all layers for one micro-batch. Only the cache calls this function, for an output that it
        lacks, because a streamed trunk requires one (`rules/training/sft_heads.py`).

        Raises:
            UserError: always.
        """
        assert self._trunk.cache is not None
        problem = f"--cache_trunk_states: {Path(self._trunk.cache)} lacks an output, which was damaged"
        hint = "use --resume, which computes it again, as a restart by --max_restarts does"
        raise UserError(problem, hint, is_final=False)

    def outputs_before_steps(self, batches: Iterable[Batch]) -> Iterator[StreamedOutput]:
        """Yield the outputs for all micro-batches."""
        return self._outputs(batches, with_last_input=False)

    def run_unlabeled(
        self, chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], observers: Sequence[TrunkObserver]
    ) -> None:
        """Run micro-batches through the layers, and their outputs through the heads."""
        unlabeled = map(_without_labels, on_this_rank(batches, mesh))
        for streamed in self._outputs(unlabeled, with_last_input=True):
            _run_heads(chunks[0], streamed, observers)

    def _outputs(self, batches: Iterable[Batch], *, with_last_input: bool) -> Iterator[StreamedOutput]:
        """Yield the trunk's output for each micro-batch, in order; collective.

        The result is bitwise identical to `GPTModel.trunk_output`.

        Args:
            batches: as for `TrunkLayers.outputs_before_steps`.
            with_last_input: whether to return the input of the last decoder layer as well.

        Raises:
            UserError: a layer cannot be read.
        """
        for group in self._groups(batches, 1 + with_last_input + len(self._model.heads.features)):
            yield from self._group_outputs(group, with_last_input)

    def _groups(self, batches: Iterable[Batch], num_states: int) -> Iterator[list[Batch]]:
        """Split micro-batches into groups whose hidden states fit into `waiting_gb`; each has at least one.

        Ranks may have rows of different lengths, but all ranks must run the layers together.

        Args:
            num_states: number of states that are kept for each micro-batch.
        """
        state_bytes = num_states * self._model.config.hidden_size * next(self._model.parameters()).element_size()
        group_bytes = int(self._trunk.waiting_gb * 1e9)
        group: list[Batch] = []
        num_bytes = 0
        for batch in batches:
            num_states_kept = batch.position_ids_BS.numel() + batch.num_items  # outputs of a tower are kept, too
            more = all_reduce_max(num_states_kept, self._mesh) * state_bytes
            if group and num_bytes + more > group_bytes:
                yield group
                group, num_bytes = [], 0
            group.append(batch)
            num_bytes += more
        if group:
            yield group

    @torch.no_grad()
    def _group_outputs(self, group: Sequence[Batch], with_last_input: bool) -> Iterator[StreamedOutput]:
        store, fetch = self._transfers.store, self._transfers.fetch
        states_SBH: list[Stored] = []
        tower_outputs: list[Stored] = []
        for batch in group:
            embeddings_SBH, outputs = self._model.streamed_input(ModelInputs.of(batch))
            states_SBH.append(store(embeddings_SBH))
            if outputs is not None:
                tower_outputs.append(store(outputs))
        last_inputs_SBH: list[Stored] = []
        features_SBH: list[list[Stored]] = []
        computed: list[Event | None] = []

        def run_group(number: int, read: _ReadLayer) -> None:
            self._transfers.fill(read.pairs, read.free)
            is_feature = number in self._model.heads.features
            is_last_input = with_last_input and number == self.num_layers - 1
            if is_feature:
                # A copy of the list, whose entries are replaced below.
                features_SBH.append(states_SBH.copy())
            if is_last_input:
                last_inputs_SBH[:] = states_SBH
            for index, (batch, hidden_SBH) in enumerate(zip(group, fetch(states_SBH), strict=True)):
                # The output takes the memory of the input, unless the input is kept.
                place = None if is_feature or is_last_input else states_SBH[index]
                states_SBH[index] = store(self._run(read.layer, hidden_SBH, batch), place)
            computed.append(self._transfers.mark())
            # The layer before, not this one: the queue of the GPU is never empty, and at most two layers long.
            if number and (layer_before := computed[number - 1]):
                layer_before.synchronize()
            self._progress.show(number + 1, f"computed for a group of {len(group)} micro-batches")

        self._for_each_layer(run_group)
        kept = [states_SBH, tower_outputs, last_inputs_SBH, *features_SBH]
        on_device: list[Iterator[Any]] = [fetch(each) if each else repeat(None) for each in kept]
        for index, batch in enumerate(group, 1):
            hidden_SBH, outputs, last_input_SBH, *features = map(next, on_device)
            output = self._model.streamed_output(hidden_SBH, batch.labels_KBS[0], outputs, features)
            yield StreamedOutput(batch, output, last_input_SBH, ends_group=index == len(group))

    def _run(self, layer: nn.Module, hidden_SBH: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return a layer's output for a micro-batch."""
        inputs = ModelInputs.of(batch)
        rotary_emb = self._model.rotary_emb(inputs)
        return self._block.run_layer(layer, hidden_SBH, rotary_emb, inputs.packed_seq_params)

    def hashes(self, hash_tensor: HashTensor) -> dict[str, str]:
        """Read all layers once; return the hash of each parameter by its name in a model that has all layers."""
        found = {}

        def hash_layer(number: int, read: _ReadLayer) -> None:
            # By their memory, because `pairs` has no names.
            contents = {tensor.data_ptr(): content for tensor, content in read.pairs}
            for name, parameter in read.layer.named_parameters():
                found[f"decoder.layers.{number}.{name}"] = hash_tensor(contents[parameter.data_ptr()])
            self._progress.show(number + 1, "hashed")

        self._for_each_layer(hash_layer)
        return found

    def _for_each_layer(self, use: Callable[[int, "_ReadLayer"], None]) -> None:
        """Call `use` with the number (from 0) and the content of each layer, while a thread reads the next layer.

        `use` must not keep a reference to the layer, so that its memory is freed. A generator would not free it: the
        loop of the caller refers to a layer until it gets the next one.
        """
        hf_model = self._hf_model
        with (
            DecoderLayers(hf_model.directory, hf_model.family, hf_model.config) as files,
            ThreadPoolExecutor(max_workers=1) as reader,
        ):
            reading = self._start_reading(0, files, reader)
            for number in range(self.num_layers):
                read = reading.result()
                # Before `use`, so that the thread reads while this layer computes.
                if number + 1 < self.num_layers:
                    reading = self._start_reading(number + 1, files, reader)
                use(number, read)

    def _start_reading(self, number: int, files: DecoderLayers, reader: ThreadPoolExecutor) -> "Future[_ReadLayer]":
        """Build a layer, and start a thread that reads its weights."""
        with self._mesh.active():
            layer = _allocated(self._block.build_layer(number), self._mesh.device.torch_device)
        layer.requires_grad_(False)  # as in a trunk in memory: linear layers with frozen weights use another function
        layer.train(self._model.training)
        self._block.layers = nn.ModuleList([layer])  # so that the bridge finds its parameters
        bindings, pairs = [], []
        for binding in files.bind(self._model, number):
            content = self._transfers.staged(binding.shard.tensor)
            pairs.append((binding.shard.tensor, content))
            bindings.append(replace(binding, shard=replace(binding.shard, tensor=content)))
        self._block.layers = nn.ModuleList()
        return reader.submit(_read, files, bindings, _ReadLayer(layer, pairs, self._transfers.mark()))


@dataclass(frozen=True)
class _ReadLayer:
    """A decoder layer and its weights.

    Attributes:
        layer: the layer. On a GPU, `Transfers.fill` fills it.
        pairs: each parameter on the device, and its content on the host; on a CPU they are the same tensor.
        free: event after the computations with other layers that had the same memory; None on a CPU.
    """

    layer: nn.Module
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    free: Event | None


def _allocated(layer: nn.Module, device: torch.device) -> nn.Module:
    """Move a layer to a device without copying its parameters, which have no content yet."""
    for parameter in layer.parameters():
        if parameter.device != device:
            parameter.data = torch.empty_like(parameter, device=device)
    return layer.to(device)


def _read(files: DecoderLayers, bindings: Sequence[Binding], read: _ReadLayer) -> _ReadLayer:
    files.read(bindings)
    return read
