"""Score the completions of `megatron grpo` with reward models on the ranks of the run, in a layout of their own.

The first rank draws and scores completions while the other ranks wait (`on_first_rank`). For the scores of these models
it sends the tokens of all conversations to the other ranks, and all of them compute.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from swiftlite.args.commands import GrpoArgs
from swiftlite.data.batch import Batch
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.families.resolved import resolve
from swiftlite.methods.reward_names import reward_names_of
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.ranks import broadcast_from_mesh
from swiftlite.plan.policy import reward_layout, reward_models_on_ranks
from swiftlite.rewards.classifier import load_tokenizer, tokenize
from swiftlite.rewards.models import identity_of
from swiftlite.rewards.process import RewardProcess, Scored
from swiftlite.rewards.settings import reward_settings_of
from swiftlite.rollouts.stored import ask_other_ranks
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.methods.frozen import batches_of, open_frozen
from swiftlite.train.methods.rm import LAST, last_token, rewards_of
from swiftlite.train.methods.separate import values_of
from swiftlite.train.phases import Run
from swiftlite.train.stopping import handled_later


@dataclass(frozen=True)
class RewardModel:
    """A frozen reward model on ranks of the trained model.

    Attributes:
        directory: its directory, as the options name it.
        tokenizer: its own tokenizer, with a pad token.
        chunks: its stages on this rank.
        mesh: its ranks and layout.
        batches: divides rows over the ranks of `mesh`.
    """

    directory: str
    tokenizer: PreTrainedTokenizerBase
    chunks: Sequence[GPTModel]
    mesh: Mesh
    batches: Batches

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of tokens. Collective over the run.

        Each row is a separate micro-batch, so that its score does not depend, bit for bit, on other rows.
        """
        # Also on ranks without the model, which receive the values into it.
        found = torch.zeros(len(rows), device=self.mesh.device.torch_device)
        if self.mesh.is_here:
            samples = [self._sample(row) for row in rows]
            found = values_of(self.chunks, self.mesh, self.batches, samples, [1] * len(rows), self._forward_step)
        return broadcast_from_mesh(found, self.mesh).tolist()

    def _sample(self, row: Sequence[int]) -> Sample:
        ids = np.array(row, np.int32)
        nothing = np.full_like(ids, IGNORED)
        last = last_token(ids, self.batches.pad_token_id)
        return Sample(ids, nothing, np.zeros(len(ids), np.float32), extras={LAST.name: last})

    def _forward_step(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
        batch = next(batches)

        def score(scores_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores_N = rewards_of(scores_BS, batch, self.mesh)
            return scores_N.sum(), torch.ones((), dtype=torch.int32, device=scores_N.device), scores_N

        return model(ModelInputs.of(batch)), score


def open_reward_models(run: Run, args: GrpoArgs) -> list[RewardModel]:
    """Load the reward models that have a layout, in the order of `--reward_model`. Collective.

    Raises:
        UserError: a model or its tokenizer cannot be opened, or a model is not the same on all ranks.
    """
    models = []
    for directory in reward_models_on_ranks(args):
        model = resolve(Path(directory).expanduser())
        layout = reward_layout(args, model.family.architecture(model.config))
        tokenizer = load_tokenizer(directory, trust_remote_code=args.trust_remote_code)
        chunks, mesh = open_frozen(run, model, layout, f"--reward_model {directory}")
        pad: Any = tokenizer.pad_token_id
        # The pad token is that of the reward model's own tokenizer, with which its rows are tokenized.
        batches = replace(batches_of(run, mesh), pad_token_id=pad, extras=(LAST,))
        models.append(RewardModel(directory, tokenizer, chunks, mesh, batches))
    return models


def all_scores(models: Sequence[RewardModel], rows: Sequence[Sequence[Sequence[int]]]) -> list[list[float]]:
    """Return the scores of each model for its rows. Collective over the run.

    Args:
        rows: for each model the tokens of all conversations.
    """
    return [model.scores(of_model) for model, of_model in zip(models, rows, strict=True)]


def reward_process(args: GrpoArgs) -> RewardProcess:
    """Return the process of the reward functions, which is not started. It has no reward models with a layout."""
    # Models with a layout are on the ranks of the run, and not in the process of the functions.
    if reward_models_on_ranks(args):
        args = replace(args, reward_model=[])
    return RewardProcess(reward_names_of(args), args.external_plugins, reward_settings_of(args))


@dataclass(frozen=True)
class RewardsWithModels:
    """Score completions with a process and with reward models on all ranks. The interface is that of `RewardProcess`.

    The first rank uses it, in functions that `on_first_rank` calls with `all_scores` as the answer.

    Attributes:
        process: reward functions and servers.
        models: the reward models.
        names: names of functions, then of models and of servers, in the order of the results.
        num_functions: number of reward functions.
    """

    process: RewardProcess
    models: Sequence[RewardModel]
    names: Sequence[str]
    num_functions: int

    @property
    def identity(self) -> dict[str, Any]:
        """Names, settings and digests that scores depend on, as for the same models in the process."""
        identity = self.process.identity
        models = [identity_of(model.directory) for model in self.models]
        return {**identity, "names": list(self.names), "models": [*models, *identity.get("models", ())]}

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        step: int,
        prompt_texts: Sequence[str] | None = None,
    ) -> Scored:
        """Call every function and every model. The arguments are those of `RewardProcess.score`.

        Raises:
            UserError: a function failed three times in a row.
        """
        scored = Scored([], [])
        if self.process.names:
            scored = self.process.score(prompts, completions, completion_ids, columns, step, prompt_texts)
        rows = [tokenize(model.tokenizer, prompts, completions) for model in self.models]
        # A signal between request and scores would end the first rank's part while the others are in the collective.
        with handled_later():
            ask_other_ranks(rows)
            found = all_scores(self.models, rows)
        # In the order of --reward_weights: functions, models, servers.
        rewards = [*scored.rewards[: self.num_functions], *found, *scored.rewards[self.num_functions :]]
        return replace(scored, rewards=rewards)
