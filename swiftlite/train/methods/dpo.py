"""`megatron dpo`: a loss over pairs of answers, compared with a reference model where the loss needs one."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from swiftlite.args.commands import DpoArgs
from swiftlite.data.encoder import ConversationEncoder, Encoder
from swiftlite.data.rows.pair import parse_pair
from swiftlite.data.sample import Sample
from swiftlite.data.template import ChatTemplate
from swiftlite.plan.preference import preference_of
from swiftlite.train.methods.preference import REFERENCE, PreferenceObjective
from swiftlite.train.methods.reference import score_with_reference
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run


def make_pair_encoder(args: DpoArgs, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Encoder:
    """Return the encoder of pairs; only the last turn of a row trains."""
    template = ChatTemplate(tokenizer, vocab_size=vocab_size)
    return ConversationEncoder(template, args.max_length, args.truncation_strategy, parse_pair)


def compare_with_reference(run: Run) -> Run:
    """Return the run, its pairs with the log-probabilities of the reference model if the loss needs one; collective.

    Raises:
        UserError: the reference model or its cache cannot be used.
    """
    if not preference_of(run.args).needs_reference:
        return run
    return score_with_reference(run, pair_of=lambda pair: pair, scored=_scored)


def _scored(pair: Sample, chosen: float, rejected: float) -> Sample:
    (other,) = pair.others
    return replace(pair.with_extras(reference=chosen), others=(other.with_extras(reference=rejected),))


def preference_objective(run: Run) -> PreferenceObjective:
    """Return the objective of a run."""
    return PreferenceObjective(preference_of(run.args), run.plan.heads, run.args.mtp_loss_scaling_factor)


DPO = Training(
    make_encoder=make_pair_encoder,
    prepare=compare_with_reference,
    make_objective=preference_objective,
    extras=(REFERENCE,),
)
