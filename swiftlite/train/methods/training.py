"""Define `Training`, the part of a training method that requires torch.

`Method` in `swiftlite/methods` is the other part.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.transformer.module import MegatronModule
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import Prompt
from swiftlite.args.commands import SftArgs
from swiftlite.data.batch import Batch, Extra
from swiftlite.data.encoder import Encoder
from swiftlite.data.rows.columns import WithColumns
from swiftlite.families.resolved import HfModel
from swiftlite.methods.index import method_of
from swiftlite.train.methods.conversations import LoadData, MakeEncoder, conversation_prompts, load_data
from swiftlite.train.metrics.trackers import Table
from swiftlite.train.objective import Objective
from swiftlite.train.phases import Run


def unchanged(run: Run) -> Run:
    """Return the run unchanged, for methods without preparation."""
    return run


@dataclass(frozen=True)
class TrainBatches:
    """The source of the micro-batches of all steps.

    Attributes:
        get: returns this rank's micro-batches of a step.
        get_state: returns the state of the data for a checkpoint, on the first rank.
        sources_of: returns the rows of the step that `get` was called for last, as `file:line` or as a number; on the
            first rank, after a fault.
        evaluate: returns further metrics of held-out rows, named `eval_...`, given the number of completed steps. It is
            called on all ranks, and may raise `Stopped` on all of them. None: there are none.
        release: ends processes that the other functions use.
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


@dataclass(frozen=True)
class Training:
    """The data and the objective of a training method.

    Attributes:
        make_encoder: returns the encoder of rows for the options, the tokenizer and the model.
        make_objective: returns the objective; called after the model was loaded and `prepare` was called.
        load: reads training and held-out rows.
        prepare: called once before the first step. The function returns the run with scores added to the samples, such
            as the log-probabilities of a reference model.
        held_out_prompts: returns the prompts that acceptance.json continues, and the tokens that end an answer.
        open_batches: returns the source of the micro-batches; called before the first step. None: the rows of --dataset
            in the order of a sampler.
        extras: additional tensors that batches contain, collated from values of samples.
    """

    make_encoder: MakeEncoder
    make_objective: Callable[[Run], Objective]
    load: LoadData = load_data
    prepare: Callable[[Run], Run] = unchanged
    held_out_prompts: Callable[[Run], tuple[Sequence[Prompt], Collection[int | None]]] = conversation_prompts
    open_batches: Callable[[Run], TrainBatches] | None = None
    extras: Sequence[Extra] = ()

    def encoder(self, args: SftArgs, tokenizer: PreTrainedTokenizerBase, hf_model: HfModel) -> Encoder:
        """Return the encoder of rows, whose columns --columns can rename."""
        encoder: Any = self.make_encoder(args, tokenizer, hf_model)
        if args.columns:
            return replace(encoder, parse=WithColumns(encoder.parse, args.columns))
        return encoder


def training_of(args: SftArgs) -> Training:
    """Return the `Training` of the method of a run with these options."""
    return method_of(args).load_training()
