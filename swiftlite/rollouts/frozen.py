"""Compute log-probabilities of completions under the frozen models of `megatron grpo`: reference model and teacher."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from swiftlite.args.commands import GrpoArgs
from swiftlite.base.heads import Heads
from swiftlite.data.sample import Sample
from swiftlite.model.gpt import GPTModel
from swiftlite.plan.distillation import teacher_layout
from swiftlite.rollouts.log_probabilities import token_log_probabilities
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.methods.frozen import open_frozen
from swiftlite.train.phases import Run


@dataclass(frozen=True)
class FrozenPolicy:
    """A frozen model on the ranks of the trained model.

    Attributes:
        name: the model as the options name it, which is stored with the log-probabilities.
        chunks: its stages on this rank.
        mesh: its ranks and layout.
    """

    name: str
    chunks: Sequence[GPTModel]
    mesh: Mesh
    batches: Batches

    def log_probabilities(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the log-probabilities of all tokens of completions, one completion after another. Collective."""
        return np.concatenate(token_log_probabilities(self.chunks, self.mesh, self.batches, samples))


def open_frozen_policies(run: Run, args: GrpoArgs) -> dict[str, FrozenPolicy]:
    """Load the frozen models that the loss needs, "reference" and "teacher". Collective.

    Raises:
        UserError: a model cannot be opened.
    """
    batches = replace(run.batches, plan=replace(run.plan, heads=Heads()))
    policies = {}
    if args.beta:
        model, flag = run.ref_model or run.hf_model, "--ref_model" if run.ref_model else "--model"
        opened = open_frozen(run, model, run.mesh.layout, flag)
        policies["reference"] = FrozenPolicy(args.ref_model or args.model, *opened, batches)
    if args.teacher_model:
        assert run.teacher_model is not None
        layout = teacher_layout(args, run.teacher_model.family.architecture(run.teacher_model.config))
        opened = open_frozen(run, run.teacher_model, layout, "--teacher_model")
        policies["teacher"] = FrozenPolicy(args.teacher_model, *opened, batches)
    return policies
