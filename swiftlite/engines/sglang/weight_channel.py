"""Send new weights to a running SGLang with SGLang's weight updates, in a format of `weight_transfer.py`."""

from typing import Any

import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer

from swiftlite.base.errors import UserError
from swiftlite.engines.loading.weight_update import Bucket, Part, bucket_file
from swiftlite.engines.sglang.weight_transfer import FINISH, KEEP, LOAD


class SglangChannel:
    """The `Channel` for new weights of an SGLang engine.

    Args:
        engine: an `sglang.Engine` with the plugin in its processes.
        num_ranks: number of tensor-parallel ranks, each of which reads every file.
    """

    def __init__(self, engine: Any, num_ranks: int):
        self._engine, self._num_ranks = engine, num_ranks
        self._part: Part = "target"

    def start(self, part: Part) -> None:
        self._part = part
        _check(self._engine.begin_weight_update(part))

    def send(self, bucket: Bucket) -> None:
        # Files of the trunk are loaded one by one, so that a worker does not hold a second copy of the model.
        load_format = LOAD
        if self._part == "draft":  # draft classes reject incomplete heads, so the worker collects all buckets
            load_format = KEEP
        with bucket_file(bucket) as path:
            self._notify(load_format, str(path))

    def finish(self) -> None:
        self._notify(FINISH, self._part)
        _check(self._engine.end_weight_update())

    def reset_prefix_cache(self) -> bool:
        return self._engine.flush_cache().success

    def _notify(self, load_format: str, word: str) -> None:
        """Call `weight_transfer.take` in each worker, with one empty tensor whose name is `word`."""
        payload: Any = MultiprocessingSerializer.serialize([(word, torch.empty(0))])
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._num_ranks,
            load_format=load_format,
            selector=self._part,
            # Once after all buckets instead (`reset_prefix_cache`).
            flush_cache=False,
        )
        manager = self._engine.tokenizer_manager
        _check(self._engine.loop.run_until_complete(manager.update_weights_from_tensor(request, None)))


def _check(answer: tuple[bool, str]) -> None:
    succeeded, message = answer
    if not succeeded:
        raise UserError(f"SGLang rejected the new weights: {message}", "restart the engine")
