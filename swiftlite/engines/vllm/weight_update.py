"""New weights for a vLLM that is running, from Hugging Face tensors, through vLLM's weight-transfer API.

This is the caller's side; vLLM's workers take the tensors in `weight_transfer.py`. Buckets travel as files in the
temporary directory, one at a time, so that neither side holds a second model. Who sends them: any iterable, such as
`train/live_weights.py`.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from swiftlite.bridge.binding import compare_shapes
from swiftlite.bridge.rows import Row, Shape
from swiftlite.bridge.tensors import some
from swiftlite.engines.served_model import ServedModel
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from vllm import LLM

Bucket = Mapping[str, torch.Tensor]


class WeightUpdate:
    """Puts new weights into an engine, complete or not at all usable.

    Args:
        llm: started with the backend of `weight_transfer.py`.
        model: what it was started from; new tensors must have the same names and shapes.
        drafts: whether it runs the model's MTP heads.
    """

    def __init__(self, llm: "LLM", model: ServedModel, drafts: bool):
        self._llm, self._drafts = llm, drafts
        family, config = model.family, model.hf_config
        self._target = _shapes(family.trunk_rows(config))
        self._draft: dict[str, Shape] = {}
        for head in range(model.heads.layers):
            self._draft |= _shapes(family.head_rows(config, head))
        self._drafted_rows_are_kept = drafts and bool(model.heads.draft_vocab)
        self._is_torn = False

    def run(self, target: Iterable[Bucket] | None, draft: Iterable[Bucket] | None) -> None:
        """See `VllmEngine.update_weights`."""
        self.check_whole()
        if draft is not None and not self._drafts:
            raise UserError(
                "weights for MTP heads, and an engine that was started without them",
                "start it with speculation, or send the trunk alone",
            )
        if target is not None and self._drafted_rows_are_kept:
            raise UserError(
                "weights for the trunk of an engine that drafts from a draft vocabulary, whose logits it would go on "
                "computing with the old ones",
                "start the engine again with the new weights",
            )
        self._is_torn = True  # until the last transfer is through
        if target is not None:
            self._transfer(self._llm.start_weight_update, target, self._target)
        if draft is not None:
            self._transfer(self._llm.start_draft_weight_update, draft, self._draft)
        # What was computed with the old weights must not answer for the new ones.
        if not self._llm.reset_prefix_cache():
            raise UserError("vLLM keeps keys and values of the old weights: a request is still running")
        self._is_torn = False

    def check_whole(self) -> None:
        """Raises:
        UserError: an update failed, and left weights of two steps or of none.
        """
        if self._is_torn:
            raise UserError(
                "an update of the weights failed and left this engine with half of them", "start the engine again"
            )

    def _transfer(self, start: Callable[[], None], buckets: Iterable[Bucket], wanted: Mapping[str, Shape]) -> None:
        start()
        sent: dict[str, Shape] = {}
        with tempfile.TemporaryDirectory(prefix="swiftlite-weights-") as directory:
            for number, bucket in enumerate(buckets):
                shapes = {key: tuple(tensor.shape) for key, tensor in bucket.items()}
                _check({key: wanted[key] for key in shapes if key in wanted}, shapes)
                sent |= shapes
                path = Path(directory, f"{number}.safetensors")
                save_file({key: tensor.contiguous() for key, tensor in bucket.items()}, path)
                self._llm.update_weights({"update_info": {"path": str(path)}})
                path.unlink()
        _check(wanted, sent)
        self._llm.finish_weight_update()


def _shapes(rows: Iterable[Row]) -> dict[str, Shape]:
    return {key: shape for row in rows for key, shape in row.hf.items()}


def _check(wanted: Mapping[str, Shape], sent: Mapping[str, Shape]) -> None:
    problems = compare_shapes(wanted, sent)
    if problems:
        raise UserError(
            "these are not the tensors that the engine was started with:\n  " + "\n  ".join(some(problems)),
            "send the weights of the same model, its trunk as the target and its heads as the draft",
        )
