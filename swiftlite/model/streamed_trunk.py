"""Compute the output of a frozen trunk that is larger than the memory, one decoder layer at a time (`--stream_trunk`).

All micro-batches of a group pass through a layer, while a thread reads the next layer from the files:

    layer in use   1             2             3
    computes       1 for all     2 for all     3 for all     micro-batches of the group
    reads          2             3             4

Two layers and the group's hidden states are in memory. Each group reads every layer once, so larger groups read less.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from swiftlite.base.log import logger
from swiftlite.bridge.binding import Binding
from swiftlite.bridge.layers import DecoderLayers
from swiftlite.data.batch import Batch
from swiftlite.families.resolved import HfModel
from swiftlite.model.gpt import GPTModel, TrunkOutput
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.layers.streamed import StreamedBlock
from swiftlite.model.ranks import all_reduce_max
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh

HashTensor = Callable[[torch.Tensor], str]
PROGRESS_SECONDS = 15
"""Minimum interval of progress messages in seconds."""


@dataclass(frozen=True)
class StreamedOutput:
    """The trunk's output for one micro-batch.

    Attributes:
        batch: the micro-batch, as it was given.
        output: the trunk's output.
        last_input_SBH: the input of the last decoder layer, on the host; None if it was not requested.
    """

    batch: Batch
    output: TrunkOutput
    last_input_SBH: torch.Tensor | None


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
    """Computes the trunk of a model that was built with `streams_trunk`.

    Args:
        model: the model without decoder layers.
        hf_model: the directory that has the layers.
        mesh: the ranks of the model; all of them call the same methods in the same order.
        group_bytes: maximum size of the hidden states that wait between two layers, on each rank.
    """

    def __init__(self, model: GPTModel, hf_model: HfModel, mesh: Mesh, group_bytes: int):
        assert isinstance(model.decoder, StreamedBlock)
        tower = hf_model.family.tower(hf_model.config)
        assert tower is None or not tower.num_deepstack  # layers are computed without the tower's outputs
        self._model, self._block = model, model.decoder
        self._hf_model = hf_model
        self._mesh = mesh
        self._group_bytes = group_bytes
        self._progress = _Progress(self.num_layers)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._block.layer_specs)

    def outputs(self, batches: Iterable[Batch], *, with_last_input: bool = False) -> Iterator[StreamedOutput]:
        """Yield the trunk's output for each micro-batch, in order; collective.

        The result is bitwise identical to `GPTModel.trunk_output`.

        Args:
            batches: the part of each micro-batch on this rank, on the device (`on_this_rank`); the same number on all
                ranks.
            with_last_input: whether to return the input of the last decoder layer as well.

        Raises:
            UserError: a layer cannot be read.
        """
        for group in self._groups(batches, 1 + with_last_input):
            yield from self._group_outputs(group, with_last_input)

    def _groups(self, batches: Iterable[Batch], num_states: int) -> Iterator[list[Batch]]:
        """Split micro-batches into groups whose hidden states fit into `group_bytes`; each has at least one.

        Ranks may have rows of different lengths, but all ranks must run the layers together.

        Args:
            num_states: number of states that are kept for each micro-batch.
        """
        state_bytes = num_states * self._model.config.hidden_size * next(self._model.parameters()).element_size()
        group: list[Batch] = []
        num_bytes = 0
        for batch in batches:
            num_states_kept = batch.position_ids_BS.numel() + batch.num_items  # outputs of a tower are kept, too
            more = all_reduce_max(num_states_kept, self._mesh) * state_bytes
            if group and num_bytes + more > self._group_bytes:
                yield group
                group, num_bytes = [], 0
            group.append(batch)
            num_bytes += more
        if group:
            yield group

    @torch.no_grad()
    def _group_outputs(self, group: Sequence[Batch], with_last_input: bool) -> Iterator[StreamedOutput]:
        states_SBH: list[torch.Tensor] = []
        tower_outputs: list[torch.Tensor | None] = []
        for batch in group:
            embeddings_SBH, outputs = self._model.streamed_input(ModelInputs.of(batch))
            states_SBH.append(embeddings_SBH.cpu())
            tower_outputs.append(None if outputs is None else outputs.cpu())
        last_inputs_SBH: list[torch.Tensor | None] = [None] * len(group)

        def run_group(number: int, layer: nn.Module) -> None:
            if with_last_input and number == self.num_layers - 1:
                last_inputs_SBH[:] = states_SBH
            for index, batch in enumerate(group):
                states_SBH[index] = self._run(layer, states_SBH[index], batch)
            self._progress.show(number + 1, f"computed for a group of {len(group)} micro-batches")

        self._for_each_layer(run_group)
        for index, batch in enumerate(group):
            outputs = tower_outputs[index]
            if outputs is not None:
                outputs = self._on_device(outputs)
            hidden_SBH = self._on_device(states_SBH[index])
            output = self._model.streamed_output(hidden_SBH, batch.labels_KBS[0], outputs)
            yield StreamedOutput(batch, output, last_inputs_SBH[index])

    def _run(self, layer: nn.Module, hidden_SBH: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return a layer's output for a micro-batch, on the host."""
        inputs = ModelInputs.of(batch)
        rotary_emb = self._model.rotary_emb(inputs)
        return self._block.run_layer(layer, self._on_device(hidden_SBH), rotary_emb, inputs.packed_seq_params).cpu()

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return on_device(tensor, self._mesh.device.torch_device)

    def hashes(self, hash_tensor: HashTensor) -> dict[str, str]:
        """Read all layers once; return the hash of each parameter by its name in a model that has all layers."""
        found = {}

        def hash_layer(number: int, layer: nn.Module) -> None:
            for name, parameter in layer.named_parameters():
                found[f"decoder.layers.{number}.{name}"] = hash_tensor(parameter)
            self._progress.show(number + 1, "hashed")

        self._for_each_layer(hash_layer)
        return found

    def _for_each_layer(self, use: Callable[[int, nn.Module], None]) -> None:
        """Call `use` with the number (from 0) and the module of each layer, while a thread reads the next layer.

        `use` must not keep a reference to the module, so that its memory is freed. A generator would not free it: the
        loop of the caller refers to a layer until it gets the next one.
        """
        hf_model = self._hf_model
        with (
            DecoderLayers(hf_model.directory, hf_model.family, hf_model.config) as files,
            ThreadPoolExecutor(max_workers=1) as reader,
        ):
            reading = self._start_reading(0, files, reader)
            for number in range(self.num_layers):
                layer = reading.result()
                if number + 1 < self.num_layers:
                    reading = self._start_reading(number + 1, files, reader)
                use(number, layer)

    def _start_reading(self, number: int, files: DecoderLayers, reader: ThreadPoolExecutor) -> "Future[nn.Module]":
        """Build a layer, and start a thread that fills it."""
        with self._mesh.active():
            layer = self._block.build_layer(number).to(self._mesh.device.torch_device)
        layer.requires_grad_(False)  # as in a trunk in memory: linear layers with frozen weights use another function
        layer.train(self._model.training)
        self._block.layers = nn.ModuleList([layer])  # so that the bridge finds its parameters
        bindings = files.bind(self._model, number)
        self._block.layers = nn.ModuleList()
        return reader.submit(_fill, files, layer, bindings)


def _fill(files: DecoderLayers, layer: nn.Module, bindings: Sequence[Binding]) -> nn.Module:
    files.read(bindings)
    return layer
