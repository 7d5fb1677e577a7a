"""Define where the trainer gets the micro-batches of all steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.module import MegatronModule

from swiftlite.data.batch import Batch
from swiftlite.train.metrics.trackers import Table


@dataclass(frozen=True)
class TrainBatches:
    """The source of the micro-batches of all steps.

    Attributes:
        get: returns this rank's micro-batches of a step (counted from 0). All data-parallel ranks have the same number
            of micro-batches, which depend only on the step or the state of the data, so that a resumed run continues
            with the same data. It may raise `Stopped` on every rank.
        get_state: returns the state of the data for a checkpoint, on the first rank.
        sources_of: returns the rows of the step that `get` was called for last, as `file:line` or as a number; on the
            first rank, after a fault.
        evaluate: returns further metrics of held-out rows, named `eval_...`, given the number of completed steps. It is
            called on all ranks, and may raise `Stopped` on all of them. None: there are none.
        release: ends processes that the other functions use; called when training has ended, also by an error.
        table: returns a table for trackers about the step that `get` was called for last, on the first rank.
        after_step: called on every rank with the number of each step, before an evaluation and a checkpoint.
        reference: chunks of a reference model that `after_step` changes; checkpoints contain their weights.
    """

    get: Callable[[int], Sequence[Batch]]
    get_state: Callable[[], dict[str, Any]] = dict
    sources_of: Callable[[int], Sequence[str]] = lambda step: ()
    evaluate: Callable[[int], Mapping[str, float]] | None = None
    release: Callable[[], None] = lambda: None
    table: Callable[[int], Table | None] = lambda step: None
    after_step: Callable[[int], None] = lambda step: None
    reference: Sequence[MegatronModule] = ()
