"""Send new weights to a running vLLM through its weight-transfer API, with the backends of `weight_transfer.py`."""

from typing import TYPE_CHECKING, Any

from swiftlite.engines.loading.weight_update import Bucket, Part
from swiftlite.engines.vllm.live.weight_transport import TransferClient, Transport

if TYPE_CHECKING:
    from vllm import LLM


class LlmClient:
    """The `TransferClient` of a vLLM engine in this process.

    Args:
        llm: an engine that was started with one of swiftlite's backends.
    """

    part: Part = "target"

    def __init__(self, llm: "LLM"):
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        if self.part == "target":
            self._llm.start_weight_update()
        else:
            self._llm.start_draft_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> bool:
        # Outputs of an image tower are cached as well. A server clears both caches when it pauses.
        self._llm.llm_engine.reset_encoder_cache()
        return self._llm.reset_prefix_cache()


class VllmChannel:
    """The `Channel` for new weights of a vLLM engine or server."""

    def __init__(self, client: TransferClient, transport: Transport):
        self._client, self._transport = client, transport

    def start(self, part: Part) -> None:
        # The client keeps the part, because vLLM's senders call its methods without it.
        self._client.part = part
        self._client.start_weight_update()

    def send(self, bucket: Bucket) -> None:
        self._transport.send(bucket)

    def finish(self) -> None:
        self._client.finish_weight_update()

    def reset_prefix_cache(self) -> bool:
        return self._client.reset_prefix_cache()
