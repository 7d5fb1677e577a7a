"""Implement `megatron dpo`: a loss over pairs of answers, relative to a reference model if the loss requires one."""

from dataclasses import replace
from functools import partial

from swiftlite.data.rows.pair import parse_pair
from swiftlite.data.sample import Sample
from swiftlite.plan.preference import preference_of
from swiftlite.train.methods.conversations import make_conversation_encoder
from swiftlite.train.methods.preference import REFERENCE, PreferenceObjective
from swiftlite.train.methods.reference import score_with_reference
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run


def compare_with_reference(run: Run) -> Run:
    """Add log-probabilities of the reference model to the run's pairs if the loss requires them; return the run.

    Collective.

    Raises:
        UserError: the reference model or its cache cannot be used.
    """
    if not preference_of(run.args).needs_reference:
        return run
    return score_with_reference(run, pair_of=lambda pair: pair, scored=_scored)


def _scored(pair: Sample, chosen: float, rejected: float) -> Sample:
    (other,) = pair.others
    return replace(pair.with_extras(reference=chosen), others=(other.with_extras(reference=rejected),))


DPO = Training(
    make_encoder=partial(make_conversation_encoder, parse=parse_pair),
    prepare=compare_with_reference,
    make_objective=lambda run: PreferenceObjective(
        run.plan.heads, run.args.mtp_loss_scaling_factor, preference_of(run.args)
    ),
    extras=(REFERENCE,),
)
