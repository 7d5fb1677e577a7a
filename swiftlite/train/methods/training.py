"""Define `Training`, the part of a training method that requires torch.

`Method` in `swiftlite/methods` is the other part.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import Prompt
from swiftlite.args.commands import SftArgs
from swiftlite.data.batch import Extra
from swiftlite.data.encoder import Encoder
from swiftlite.data.rows.columns import WithColumns
from swiftlite.families.resolved import HfModel
from swiftlite.methods.index import method_of
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.methods.conversations import LoadData, MakeEncoder, conversation_prompts, load_data
from swiftlite.train.objective import Objective
from swiftlite.train.phases import Run


def unchanged(run: Run) -> Run:
    """Return the run unchanged, for methods without preparation."""
    return run


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
