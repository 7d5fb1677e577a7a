"""Compute log-probabilities of completions under the reference model of `megatron grpo --beta`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from swiftlite.data.sample import Sample
from swiftlite.heads import Heads
from swiftlite.model.gpt import GPTModel
from swiftlite.model.open import open_model
from swiftlite.rollouts.log_probabilities import token_log_probabilities
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.phases import Run


@dataclass(frozen=True)
class ReferencePolicy:
    """The frozen reference model, in the layout of the trained model."""

    chunks: Sequence[GPTModel]
    mesh: Mesh
    batches: Batches

    @classmethod
    def open(cls, run: Run) -> "ReferencePolicy":
        """Load --ref_model, by default --model. Collective.

        Raises:
            UserError: the model cannot be opened.
        """
        dtype = torch.bfloat16 if run.args.torch_dtype == "bfloat16" else torch.float32
        batches = replace(run.batches, plan=replace(run.plan, heads=Heads()))
        chunks, _ = open_model(
            run.ref_model or run.hf_model,
            run.mesh,
            dtype=dtype,
            heads=Heads(),
            temperature=run.plan.temperature,
            kernels=run.plan.kernels,
        )
        return cls(chunks, run.mesh, batches)

    def log_probabilities(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the log-probabilities of all tokens of completions, one completion after another. Collective."""
        return np.concatenate(token_log_probabilities(self.chunks, self.mesh, self.batches, samples))
