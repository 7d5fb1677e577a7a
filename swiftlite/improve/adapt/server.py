"""Send heads from a Hugging Face directory to a running server, and read its draft counts."""

from collections.abc import Iterator
from pathlib import Path

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.rows import shapes_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.loading.weight_update import Bucket
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.served import ServedVllm
from swiftlite.families.resolved import HfModel
from swiftlite.improve.adapt.state import Served

TIMEOUT = 600


class Server:
    """A vLLM server that was started with `deploy --live_weights`.

    Raises:
        UserError: the server does not respond, was started without --live_weights, or does not draft with heads.
    """

    def __init__(self, url: str, model: HfModel):
        self._client = ServedVllm(url, timeout=TIMEOUT, model=model)
        method = (self._client.config["speculative_config"] or {}).get("method")
        if method != "mtp":
            raise UserError(f"the server at {url} does not draft with heads", "start it with --speculative mtp")
        self.instance: str = self._client.instance_id

    def counts(self) -> Served:
        """Return what the server has counted since its start, for all clients."""
        return Served.of(self._client.draft_counts())

    def send(self, directory: str | Path) -> None:
        """Send the heads of a model. The server finishes running requests first, and answers with the new heads
        afterwards.

        Raises:
            UserError: the heads are not those of the server's model, or the server fails.
        """
        self._client.update_weights(draft=head_buckets(resolve_served(str(directory)), self._client.bucket_device))

    def close(self) -> None:
        """Disconnect; the server keeps running."""
        self._client.close()


def head_buckets(model: HfModel, device: torch.device) -> Iterator[Bucket]:
    """Yield the tensors of each head as a bucket, with the names and dtypes of the files."""
    with Checkpoint(model.directory) as checkpoint:
        for head in range(model.heads.layers):
            names = shapes_of(model.family.head_rows(model.config, head))
            yield {name: checkpoint.read(name).to(device) for name in names}
