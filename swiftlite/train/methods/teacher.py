"""Open the teacher of `megatron gkd`, and compute its predictions for the micro-batches of a step.

The loss compares two distributions over the whole vocabulary for each token. The teacher's is kept as the final state
of the token, from which the loss computes logits of a few tokens at a time. The states of a step are on the host, so
that their number does not matter on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from swiftlite.base.errors import UserError
from swiftlite.data.batch import Batch
from swiftlite.data.template import load_tokenizer
from swiftlite.families.resolved import HfModel
from swiftlite.model.forward import forward, run_batches
from swiftlite.model.gpt import GPTModel
from swiftlite.model.loss.chunked_loss import TeacherTarget
from swiftlite.plan.layout import ParallelLayout
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.frozen import open_frozen
from swiftlite.train.phases import Run


@dataclass(frozen=True)
class Teacher:
    """A frozen model in the layout of the trained model.

    Attributes:
        chunks: the teacher's stages on this rank.
        mesh: ranks and layout of the teacher.
    """

    chunks: Sequence[GPTModel]
    mesh: Mesh

    @classmethod
    def open(cls, run: Run, model: HfModel, layout: ParallelLayout) -> "Teacher":
        """Load the teacher. Collective.

        Raises:
            UserError: the model cannot be opened, or is not the same on all ranks.
        """
        return cls(*open_frozen(run, model, layout, "--teacher_model", is_teacher=True))

    def states(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the `label_states` of this rank's micro-batches. Collective."""
        return label_states(self.chunks, self.mesh, batches) if batches else []

    def target(self, states_NH: torch.Tensor, beta: float) -> TeacherTarget:
        """Return the target of the loss of a micro-batch on the last stage, from its `states`."""
        output = self.chunks[-1].output_layers.of_trunk()
        states_NH = on_device(states_NH, self.mesh.device.torch_device)
        return TeacherTarget(states_NH, output.weight_VH.detach(), beta, output.cap)


@torch.no_grad()
def label_states(chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Return, for each micro-batch, the final states [N, H] at positions with a label, on the host. Collective over the
    mesh.

    Returns:
        One tensor per micro-batch, for this context-parallel rank's positions; empty before the last stage.
    """

    def forward_step(given: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
        return forward(model, without_heads(next(given))), _kept

    with mesh.active():
        return run_batches(chunks, mesh, batches, forward_step, forward_only=True)


def check_tokenizer(run: Run) -> Run:
    """Return the run, if its teacher, if any, has its tokenizer.

    Raises:
        UserError: the teacher has another tokenizer, so that its distribution is over other tokens.
    """
    model = run.teacher_model
    if model is None:
        return run
    theirs = load_tokenizer(model.directory, run.args.trust_remote_code).get_vocab()
    ours = run.tokenizer.get_vocab()
    hint = "give a teacher of the same family; both models must number all tokens alike"
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            problem = f"token {token!r} is {_number(theirs.get(token))}, in --model {_number(ours.get(token))}"
            raise UserError(f"--teacher_model {model.name} has another tokenizer: {problem}", hint)
    return run


def _number(token_id: int | None) -> str:
    return "absent" if token_id is None else f"number {token_id}"


def without_heads(batch: Batch) -> Batch:
    """Return the inputs of a model without heads."""
    return replace(
        batch,
        tokens_KBS=batch.tokens_KBS[:1],
        labels_KBS=batch.labels_KBS[:1],
        sequence_KBS=batch.sequence_KBS[:1],
    )


def _kept(states_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the states as the statistics of a micro-batch."""
    one = torch.ones((), dtype=torch.int32, device=states_NH.device)
    # The schedule keeps the third result of every micro-batch, so states on the GPU would fill its memory.
    return states_NH.new_zeros(()), one, states_NH.cpu()
