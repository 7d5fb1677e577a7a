"""Merge adapters into a temporary copy of a model, for `swiftlite infer --adapters`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from swiftlite.base.log import logger
from swiftlite.bridge.adapters.files import read_adapter
from swiftlite.bridge.adapters.merge import write_merged
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.resolved import HfModel

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")


@contextmanager
def with_adapters(base: HfModel, adapters: str | None) -> Iterator[HfModel]:
    """Yield the model for an engine: the model itself, or a temporary copy with the adapters merged.

    Merged adapters work with every engine and do not slow it down. Adapters of MTP heads are merged as well.

    Raises:
        UserError: the adapters are unreadable or belong to another model.
    """
    if adapters is None:
        yield base
        return
    adapter = read_adapter(Path(adapters))
    adapter.check_base(base.directory)
    with TemporaryDirectory(prefix="swiftlite-adapters-") as place:
        merged = Path(place) / base.directory.name
        merged.mkdir()
        for path in base.directory.iterdir():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copy2(path, merged / path.name)
        logger.info("merging the adapters in %s into a copy of the model in %s", adapters, place)
        write_merged(base.directory, base.config, base.family, adapter, merged)
        yield resolve_served(merged)
