"""Draft tokens one after another, through the interface of transformers' assisted generation.

The states from which drafts follow are computed by the `DraftSteps` of the kind of drafter (`STEPS` in `drafters.py`).
`engine.py` verifies the drafts.

Shapes: S positions, H hidden size, V vocabulary; the batch size is always 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from swiftlite.base.drafting import Drafting
from swiftlite.engines.transformers.image_inputs import ImageInputs
from swiftlite.engines.transformers.verification import draw


class DraftSteps(ABC):
    """The part of drafting that depends on the kind of drafter, for one sequence.

    A round of drafts calls `begin`, then `logits` once per draft.

    Args:
        decoder: the trunk without its output layer, whose states are passed to `begin`.
        output_layer: output layer of the trunk, used by all drafters without one of their own, or a `DraftOutput` made
            from it.
        heads: the MTP heads or the drafter, loaded by `load_drafter`.
        num_tokens: number of tokens to draft per round.
        drafting: inputs of the heads, `MtpLayout.drafting` of the family.
        images: images of the prompt, whose features the heads read in place of placeholder tokens; None without images.
        embedding_multiplier: factor of the embeddings that heads read, if it is not in the embedding's module.
    """

    def __init__(
        self,
        decoder: Any,
        output_layer: nn.Module,
        heads: Iterable[nn.Module],
        num_tokens: int,
        drafting: Drafting,
        images: ImageInputs | None = None,
        embedding_multiplier: float = 1.0,
    ):
        self.num_tokens = num_tokens
        self._decoder = decoder
        self._output_layer = output_layer
        # Heads of later depths would compute keys that no draft reads.
        self._heads: list[Any] = list(heads)[:num_tokens]
        self._drafting = drafting
        self._images = images
        self._embedding_multiplier = embedding_multiplier
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._caches = [head.new_cache() for head in self._heads]

    @abstractmethod
    def begin(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Begin a round.

        Args:
            ids: the sequence, [1, S]. The trunk has processed all tokens but the last.
            states: states of the trunk's last pass, [1, positions of that pass, H]. Those after the first S - 1
                positions of the sequence belong to rejected drafts.
        """

    @abstractmethod
    def logits(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of a draft.

        Args:
            number: index of the draft in the round.
            ids: the sequence with all earlier drafts of the round.
        """

    def _embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.get_input_embeddings()(ids) * self._embedding_multiplier

    def _output(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of the last state of a head."""
        output_layer = head.output_layer or self._output_layer
        return output_layer(hidden[:, -1])


class DraftGenerator(CandidateGenerator):
    """Draft with MTP heads or another drafter.

    Args:
        steps: computes the logits of the drafts.
        logits_processor: applied to the logits; None drafts the most likely token.
        generator: random number generator; None is torch's default.
        confidence: drafting stops after a draft token with a smaller probability; this token is still proposed. With 0,
            all tokens of a round are always drafted.
        is_greedy: whether the most likely token is drafted also with a `logits_processor`.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    def __init__(
        self,
        steps: DraftSteps,
        logits_processor: LogitsProcessorList | None = None,
        generator: torch.Generator | None = None,
        confidence: float = 0.0,
        is_greedy: bool = False,
    ):
        self._steps = steps
        self._logits_processor = logits_processor
        self._is_greedy = is_greedy or logits_processor is None
        self._generator = generator
        self._confidence = confidence

    @torch.no_grad()
    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append the drafts to `input_ids` [1, S].

        Args:
            model_outputs: outputs of the trunk's last pass; `hidden_states[-1]` [1, positions of that pass, H] are the
                states that `Drafting` selects, or the result of the drafter's `fused`. Only the states of accepted
                tokens are used; the states after them belong to rejected drafts.
            is_first_iteration: whether the sequence is new to the trunk; then nothing is drafted.

        Returns:
            The ids with the drafts, and the logits [1, drafts, V] from which the drafts were sampled. The logits are
                None if the most likely tokens were drafted; verification then treats drafts as certain.
        """
        # There is no state of the trunk from which a head could draft.
        if is_first_iteration:
            self._steps.reset()
            return input_ids, None
        ids = input_ids
        drawn_from: list[torch.Tensor] = []
        self._steps.begin(ids, model_outputs.hidden_states[-1])
        # Every draft is processed with the text up to it: a repetition penalty depends on the drafts before it.
        for number in range(self._steps.num_tokens):
            logits = self._steps.logits(number, ids)
            if self._logits_processor is not None:
                # In float32, as for the trunk: both distributions are compared in the verification.
                logits = self._logits_processor(ids, logits.float())  # pyright: ignore[reportArgumentType]
            draft = self._draft(logits)
            ids = torch.cat((ids, draft[None]), dim=1)
            if not self._is_greedy:
                drawn_from.append(logits)
            # Without a threshold, this does not synchronize with a GPU.
            if self._confidence and logits[0].float().softmax(dim=-1)[draft] < self._confidence:
                break
        if not drawn_from:
            return ids, None
        return ids, torch.stack(drawn_from, dim=1)

    def _draft(self, logits: torch.Tensor) -> torch.Tensor:
        if self._is_greedy:
            return logits.argmax(dim=-1)
        return draw(logits[0].softmax(dim=-1), self._generator)
