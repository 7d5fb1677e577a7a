"""Compute log-probabilities of completions under the frozen models of `megatron grpo`: reference model and teacher.

With `--sync_ref_model`, the reference model is moved towards the policy between two steps, as TRL's
SyncRefModelCallback does; checkpoints contain its weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from swiftlite.args.commands import GrpoArgs
from swiftlite.base.errors import UserError
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.families.resolved import HfModel
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.lora import without_adapters
from swiftlite.model.ranks import broadcast_from_mesh
from swiftlite.plan.distillation import teacher_layout
from swiftlite.plan.policy import is_base_of_adapters, reference_layout
from swiftlite.plan.trainable import is_head_parameter
from swiftlite.rollouts.log_probabilities import token_log_probabilities
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.checkpoint.checkpointer import REFERENCE, load_checkpoint
from swiftlite.train.methods.frozen import batches_of, open_frozen
from swiftlite.train.phases import Run
from swiftlite.train.trainer import whole_parameters


@dataclass(frozen=True)
class FrozenPolicy:
    """A frozen model on ranks of the trained model.

    Attributes:
        name: the model as the options name it, which is stored with the log-probabilities.
        chunks: its stages on this rank.
        mesh: its ranks and layout.
        batches: divides rows over the ranks of `mesh`.
        opened: returns a context in which `chunks` are the frozen model.
    """

    name: str
    chunks: Sequence[GPTModel]
    mesh: Mesh
    batches: Batches
    opened: Callable[[], AbstractContextManager] = nullcontext

    @torch.no_grad()
    def mix(self, policy: Sequence[torch.nn.Module], alpha: float) -> None:
        """Set the weights to `alpha` times those of the policy plus 1 - `alpha` times the own ones.

        Args:
            policy: its chunks on this rank; their further parameters, such as heads, are ignored.
        """
        for chunk, theirs in zip(self.chunks, policy, strict=True):
            current = dict(theirs.named_parameters())
            for name, parameter in chunk.named_parameters():
                # By name, because the policy also has heads, which the reference model lacks.
                parameter.mul_(1 - alpha).add_(current[name], alpha=alpha)

    def log_probabilities(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the log-probabilities of all tokens of completions, one completion after another. Collective."""
        found = np.zeros(sum(int((sample.labels != IGNORED).sum()) for sample in samples), np.float32)
        # With a layout of its own, a frozen model can be on a part of the ranks; the others wait for its values.
        if self.mesh.is_here:
            with self.opened():
                found = np.concatenate(token_log_probabilities(self.chunks, self.mesh, self.batches, samples))
        if len(self.mesh.ranks) == dist.get_world_size():
            return found  # without copies to the device and back
        shared = torch.from_numpy(found).to(self.mesh.device.torch_device)
        return broadcast_from_mesh(shared, self.mesh).cpu().numpy()


def open_frozen_policies(run: Run, args: GrpoArgs) -> dict[str, FrozenPolicy]:
    """Load the frozen models that the loss needs, "reference" and "teacher". Collective.

    Raises:
        UserError: a model cannot be opened.
    """
    policies = {}
    if args.beta and is_base_of_adapters(args, run.plan.lora):
        # Without a second model in memory: the trunk is frozen under its adapters.
        policies["reference"] = base_of_adapters(run)
    elif args.beta:
        model, flag = run.ref_model or run.hf_model, "--ref_model" if run.ref_model else "--model"
        chunks, mesh = open_frozen(run, model, reference_layout(args), flag)
        reference = FrozenPolicy(args.ref_model or args.model, chunks, mesh, batches_of(run, mesh))
        if args.sync_ref_model:
            # Parameters are mixed by name: a missing one would fail only in the middle of training.
            _check_same_parameters(run, reference.chunks, model, flag)
            if run.checkpoint:
                load_checkpoint(run.checkpoint, reference.mesh, reference.chunks, is_verified=True, prefix=REFERENCE)
        policies["reference"] = reference
    if args.teacher_model:
        assert run.teacher_model is not None
        layout = teacher_layout(args, run.teacher_model.family.architecture(run.teacher_model.config))
        chunks, mesh = open_frozen(run, run.teacher_model, layout, "--teacher_model")
        policies["teacher"] = FrozenPolicy(args.teacher_model, chunks, mesh, batches_of(run, mesh))
    return policies


def base_of_adapters(run: Run) -> FrozenPolicy:
    """Return the trained model without its adapters, which are all that is trained of its trunk."""
    state = run.train_state

    @contextmanager
    def opened() -> Iterator[None]:
        with whole_parameters(state.wrapped), without_adapters(state.chunks):
            yield

    return FrozenPolicy(run.args.model, state.chunks, run.mesh, run.batches, opened)


def _check_same_parameters(run: Run, reference: Sequence[torch.nn.Module], model: HfModel, flag: str) -> None:
    """Check that the policy without its heads and the reference model have the same parameters.

    Args:
        reference: chunks of the reference model on this rank.
        model: the reference model as it was read.
        flag: the option that names it, for errors.

    Raises:
        UserError: the models differ.
    """
    # On a last pipeline stage, an output layer that shares the embedding has the name of one that does not.
    is_tied_alike = model.is_tied == run.hf_model.is_tied
    for chunk, theirs in zip(reference, run.train_state.chunks, strict=True):
        own, others = ({name: part.shape for name, part in each.named_parameters()} for each in (chunk, theirs))
        different = {name for name, _ in own.items() ^ others.items() if not is_head_parameter(name)}
        if different or not is_tied_alike:
            example = min(different, default="a tied output layer")
            problem = f"--sync_ref_model: {flag} has other parameters than --model, such as {example}"
            raise UserError(problem, "use a reference model of the same architecture and size")
