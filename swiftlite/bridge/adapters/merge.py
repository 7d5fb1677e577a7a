"""Merge adapters into the weights of a Hugging Face directory, tensor by tensor, without building the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.adapters.files import SavedAdapter
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import write_patched
from swiftlite.bridge.rows import HfConfig, RowTable
from swiftlite.bridge.tensors import Checkpoint, ShardedFiles

_SHARD_BYTES = 5_000_000_000


class _Family(RowTable, Protocol):
    def copies(self, hf_config: HfConfig, head: int, /) -> dict[str, str]:
        """Return the HF keys of a head that copy a tensor of the trunk, each with the trunk's key."""
        ...

    def config_with(self, hf_config: HfConfig, heads: Heads, /) -> dict[str, Any]:
        """Return the change of a config.json that makes it declare these heads."""
        ...


def write_merged(base: Path, hf_config: HfConfig, family: _Family, adapter: SavedAdapter, out_dir: Path) -> None:
    """Write config.json and safetensors files of the base model merged with the adapters.

    Args:
        hf_config: content of the base model's config.json.
        out_dir: existing directory without safetensors files.

    Raises:
        UserError: the adapters do not match the base model, or the base model is quantized.
    """
    if format_of(hf_config):
        raise UserError(f"--adapters is not supported on the quantized model {base}", "use the model in BF16")
    heads = adapter.heads_of(hf_config)
    with Checkpoint(base) as checkpoint:
        adapter.check_places({key: entry.shape for key, entry in checkpoint.entries.items()})
        # Heads of the adapters replace those of the base model, which can have another number.
        dropped = {key for key in checkpoint.entries if adapter.heads and family.is_mtp(hf_config, key)}
        copies: dict[str, str] = {}
        if adapter.heads:
            for head in range(heads.layers):
                copies |= family.copies(hf_config, head)
        # Copies of the embedding in heads are merged again from their originals, which adapters may have changed.
        origin = {key: key for key in checkpoint.entries if key not in dropped} | copies
        types = {key: (checkpoint.entries[of].dtype, checkpoint.entries[of].shape) for key, of in origin.items()}
        types |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in adapter.heads.items()}

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for key, of in origin.items():
                yield key, adapter.apply(of, checkpoint.read(of))
            yield from adapter.heads.items()

        # Experts as in the base model, so that the same engines read the result.
        files = ShardedFiles(out_dir, checkpoint.fold(types), _SHARD_BYTES)
        files.create()
        try:
            for key, tensor in tensors():
                files.write(key, (slice(None),) * tensor.dim(), tensor)
            files.flush()
            files.publish()
        except BaseException:
            files.discard()
            raise
    (out_dir / "config.json").unlink(missing_ok=True)
    write_patched(base, out_dir, family.config_with(hf_config, heads))
