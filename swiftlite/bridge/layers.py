"""Read the decoder layers of a Hugging Face directory one at a time, for a trunk that is larger than the memory.

A model whose trunk is streamed has no decoder layers. `DecoderLayers` fills single layers for its forward pass, and
yields the same tensors for an export.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import nn

from swiftlite.bridge import placement
from swiftlite.bridge.binding import Binding, bind
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.rows import HfConfig, Row, RowTable
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.bridge.transfer import read_bindings


class DecoderLayers:
    """The decoder layers in a Hugging Face directory, as a context manager; opening it reads only headers.

    Args:
        hf_dir: directory with model.safetensors, or shards and their index.
        family: the model's family, which defines the rows.
        hf_config: content of the directory's config.json.

    Raises:
        UserError: a file is missing or damaged.
    """

    def __init__(self, hf_dir: str | Path, family: RowTable, hf_config: HfConfig):
        self._family, self._hf_config = family, hf_config
        self._checkpoint = Checkpoint(hf_dir, format_of(hf_config))
        self._rows: defaultdict[int, list[Row]] = defaultdict(list)
        for row in family.rows(hf_config, 0):
            number = placement.decoder_layer_of(row.mcore)
            if number is not None:
                self._rows[number].append(row)

    def __enter__(self) -> Self:
        self._checkpoint.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoint.__exit__(*exception)

    def bind(self, model: nn.Module, number: int) -> list[Binding]:
        """Bind layer `number` (from 0), which must be the only decoder layer of `model`, to its HF tensors.

        Raises:
            UserError: the tensors do not match the layer.
        """
        shards = placement.shards_of([model])
        others_hold = placement.others_hold([model], shards)
        # All other parameters (embedding, norm, output layer, heads) were bound when the model was loaded.
        layer_shards = [shard for shard in shards if placement.decoder_layer_of(shard.name) == number]
        what = str(self._checkpoint.hf_dir)
        return bind(layer_shards, self._rows[number], others_hold=others_hold, what=what)

    @torch.no_grad()
    def read(self, bindings: Sequence[Binding]) -> None:
        """Fill the parameters of a layer; this rank reads only its slices."""
        read_bindings(bindings, self._checkpoint, self._family, self._hf_config)

    def pieces(self, dtype: torch.dtype) -> Iterator[placement.Piece]:
        """Yield the tensors of all layers with the values that a model of this dtype holds; each rank yields a part.

        A float32 tensor in a bfloat16 model has rounded values, as if the layers had been loaded.
        """
        rows = [row for number in sorted(self._rows) for row in self._rows[number]]
        for row in placement.part_of_this_rank(rows):
            held = torch.float32 if row.is_exact else dtype
            for key, shape in row.hf.items():
                whole = (slice(None),) * len(shape)
                tensor = torch.empty(shape, dtype=held)
                self._checkpoint.read_into(tensor, key, whole)
                yield key, whole, tensor
