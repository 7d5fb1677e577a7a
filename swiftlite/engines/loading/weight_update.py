"""Send new weights to a running engine as Hugging Face tensors. This is the sender's code that all engines share.

Weights are sent in buckets (groups of tensors), one at a time, so that neither side holds a second model. A bucket is
sent as a file in the temporary directory, or from GPU to GPU if the engine supports it. Each engine has its own
`Channel` (`engines/vllm/live/weight_channel.py`, `engines/sglang/weight_channel.py`). The engine's workers load the
tensors with the code in `weight_transfer.py` of the same folder. The caller passes the weights as an iterable of
buckets, for example from `train/live_weights.py`.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import save_file

from swiftlite.base.errors import UserError
from swiftlite.bridge.binding import compare_shapes
from swiftlite.bridge.rows import Shape, shapes_of
from swiftlite.bridge.tensors import some
from swiftlite.families.resolved import HfModel

Bucket = Mapping[str, torch.Tensor]
Part = Literal["target", "draft"]


class Channel(Protocol):
    """The way in which one engine receives new weights.

    A transfer calls `start`, `send` for each bucket, then `finish`.
    """

    def start(self, part: Part) -> None:
        """Start a transfer to the target (trunk) or to the draft model (heads)."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Send a bucket of tensors to the workers. The workers have received it when this method returns."""
        ...

    def finish(self) -> None:
        """End the transfer.

        An exception is raised if a tensor was not read or a parameter was not filled.
        """
        ...

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, which was computed with the old weights; return whether this succeeded."""
        ...


def unsupported_layout(pipeline_stages: int, shares_experts: bool) -> str:
    """Return why an engine with this layout does not support weight updates; empty if it supports them.

    Every worker must read every tensor and fill every parameter (with tensor parallelism, its part). A worker that
    holds only some layers or experts skips the tensors of the others. Skipped tensors cannot be distinguished from
    tensors that were lost.
    """
    if pipeline_stages > 1:
        return f"{pipeline_stages} pipeline stages"
    if shares_experts:
        return "experts on different workers (expert parallelism)"
    return ""


@contextmanager
def bucket_file(bucket: Bucket) -> Iterator[Path]:
    """Write a bucket to a safetensors file in the temporary directory, which is deleted when the context ends."""
    with tempfile.TemporaryDirectory(prefix="swiftlite-weights-") as directory:
        path = Path(directory, "bucket.safetensors")
        # safetensors refuses views with gaps.
        save_file({key: tensor.contiguous() for key, tensor in bucket.items()}, path)
        yield path


class WeightUpdate:
    """Sends new weights to an engine. After an incomplete transfer, `check_whole` raises an error.

    Args:
        name: name of the engine.
        model: the model that the engine was started with; new tensors must have the same names and shapes.
        drafts: whether the engine runs the model's MTP heads.
        layout: result of `unsupported_layout`: why the engine's layout does not support updates; empty if it supports
            them.
    """

    def __init__(self, name: str, channel: Channel, model: HfModel, drafts: bool, layout: str = ""):
        self._name, self._channel, self._drafts, self._layout = name, channel, drafts, layout
        family, config = model.family, model.config
        self._target = shapes_of(family.trunk_rows(config))
        self._draft: dict[str, Shape] = {}
        for head in range(model.heads.layers):
            self._draft |= shapes_of(family.head_rows(config, head))
        # Draft classes copy the draft vocabulary's rows of the output layer once (vllm/models.py: compute_logits).
        self._drafted_rows_are_kept = drafts and bool(model.heads.draft_vocab)
        self._is_torn = False

    def run(self, target: Iterable[Bucket] | None, draft: Iterable[Bucket] | None) -> None:
        """Send new weights to the engine, target and draft in separate transfers.

        The prefix cache is cleared, and the next request uses the new weights. After a failure, `check_whole` raises an
        error.

        Args:
            target: all HF tensors of the trunk; None keeps the current trunk.
            draft: all HF tensors of the MTP heads; None keeps the current heads.

        Raises:
            UserError: names or shapes differ from the engine's model, the engine has no heads, or its layout is not
                supported.
        """
        self.check_whole()
        self.check_layout()
        if draft is not None and not self._drafts:
            raise UserError(
                f"{self._name} was started without MTP heads and does not support new weights for them",
                "start it with speculation, or send only the trunk",
            )
        if target is not None and self._drafted_rows_are_kept:
            raise UserError(
                f"{self._name} does not support new weights for the trunk of heads with a draft vocabulary",
                "restart the engine with the new weights",
            )
        self._is_torn = True  # until the last transfer is complete
        if target is not None:
            self._transfer("target", target, self._target)
        if draft is not None:
            self._transfer("draft", draft, self._draft)
        # The KV cache of the old weights must not be used with the new ones.
        if not self._channel.reset_prefix_cache():
            raise UserError(
                f"{self._name} cannot clear the KV cache of the old weights: a request is still running",
                "restart the engine, and wait for requests before the next update",
            )
        # Only after the cache is cleared: cached keys of the old weights would spoil answers as well.
        self._is_torn = False

    @property
    def is_whole(self) -> bool:
        """Whether the engine has consistent weights, because no update has failed."""
        return not self._is_torn

    def check_whole(self) -> None:
        """Check that the engine has consistent weights.

        Raises:
            UserError: an update has failed, so the weights are incomplete or of different steps.
        """
        if self._is_torn:
            raise UserError(
                f"a previous weight update failed, and {self._name} has only part of the new weights",
                "restart the engine",
            )

    def check_layout(self) -> None:
        """Check that the engine's layout supports weight updates.

        Raises:
            UserError: the layout does not support weight updates.
        """
        if self._layout:
            raise UserError(
                f"{self._name} with {self._layout} does not support new weights",
                "start it with only tensor parallelism",
            )

    def _transfer(self, part: Part, buckets: Iterable[Bucket], wanted: Mapping[str, Shape]) -> None:
        self._channel.start(part)
        sent: dict[str, Shape] = {}
        for bucket in buckets:
            shapes = {key: tuple(tensor.shape) for key, tensor in bucket.items()}
            # Before the bucket is sent: in some engines, a tensor of a wrong shape ends the worker.
            _check({key: wanted[key] for key in shapes if key in wanted}, shapes)
            sent |= shapes
            self._channel.send(bucket)
        # At the end all tensors must have been sent: an engine would keep the old values of missing ones.
        _check(wanted, sent)
        self._channel.finish()


def _check(wanted: Mapping[str, Shape], sent: Mapping[str, Shape]) -> None:
    problems = compare_shapes(wanted, sent)
    if problems:
        raise UserError(
            "tensors differ from those of the engine's model:\n  " + "\n  ".join(some(problems)),
            "send weights of the same model: the trunk as target, the heads as draft",
        )
