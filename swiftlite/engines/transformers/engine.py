"""transformers as an engine: one prompt at a time, the trunk verifying what the MTP heads draft.

The verify loop is ours, because transformers chooses the drafter of `generate` in a private method and keeps no counts.
The drafter itself follows transformers' protocol and works in its loop as well
(tests/engines/transformers/test_mtp_heads.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.bridge.tensors import some
from swiftlite.engines.engine import Completion, EngineConfig, OnAnswer, Sampling, check_prompts
from swiftlite.engines.served_model import ServedModel, read_model, require_heads
from swiftlite.engines.transformers.mtp_heads import DraftOutput, MtpCandidateGenerator, load_heads
from swiftlite.engines.transformers.recurrent import RecurrentStates, crop_keys
from swiftlite.errors import UserError


class TransformersEngine:
    """See `Engine`. Runs on the GPU when there is one.

    Raises:
        UserError: no model there, or MTP heads that are not what its config promises.
    """

    def __init__(self, config: EngineConfig):
        model = read_model(config.model)
        num_tokens = model.heads.drafts if config.num_speculative_tokens is None else config.num_speculative_tokens
        if num_tokens or config.num_speculative_tokens is None:
            require_heads(model)
        self.num_speculative_tokens = num_tokens
        trunk: Any = load_trunk(model, config)
        self._decoder, self._output_layer = trunk.get_decoder(), trunk.get_output_embeddings()
        longest = trunk.config.max_position_embeddings
        self._max_length = min(config.max_model_len or longest, longest)
        self._drafting = model.family.mtp.drafting_for(model.heads.draft_for)
        self._drafter = None
        if num_tokens:
            heads = load_heads(model, self._decoder)
            drafted = model.heads.draft_vocab
            output: Any = DraftOutput(self._output_layer, drafted) if drafted else self._output_layer
            self._drafter = MtpCandidateGenerator(self._decoder, output, heads, num_tokens, self._drafting)
        self._counts = DraftCounts(0, 0, (0,) * num_tokens)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """See `Engine`."""
        check_prompts(prompts, self._max_length)
        generator = torch.Generator(self._decoder.device)
        completions = []
        for place, prompt in enumerate(prompts):
            generator.manual_seed(sampling.seed_of(place))
            completions.append(self._complete(prompt, sampling, generator))
            if on_answer:
                on_answer(place, completions[place])
        return completions

    def draft_counts(self) -> DraftCounts:
        """See `Engine`. A draft counts as accepted when it matched, also past a stop token or the last token wanted."""
        return self._counts

    def close(self) -> None:
        """Drop the weights."""
        del self._decoder, self._output_layer, self._drafter
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _complete(self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator) -> Completion:
        ids = torch.tensor([list(prompt)], device=self._decoder.device)
        limit = min(len(prompt) + sampling.max_new_tokens, self._max_length)
        cache = DynamicCache(config=self._decoder.config)
        fed = None  # the trunk's states of its last pass, as the heads take them
        while True:
            drafted_ids = self._draft(ids, fed)
            num_drafted = drafted_ids.shape[1] - ids.shape[1]
            begin = RecurrentStates(cache) if num_drafted else None
            new_ids = drafted_ids[:, cache.get_seq_length() :]
            before, after = self._states(new_ids, cache)
            logits = self._output_layer(after[0, -num_drafted - 1 :])
            chosen = _choose(logits, sampling, generator)
            num_accepted = int((chosen[:-1] == drafted_ids[0, ids.shape[1] :]).cumprod(0).sum())
            self._count(num_drafted, num_accepted)
            if num_drafted > num_accepted:
                assert begin is not None
                self._take_back(new_ids, num_drafted - num_accepted, cache, begin)
            fed = before if self._drafting.takes_before_norm else after
            for token in chosen[: num_accepted + 1].tolist():
                ids = torch.cat((ids, ids.new_tensor([[token]])), dim=1)
                if token in sampling.stop_token_ids:
                    return Completion(ids[0, len(prompt) :].tolist(), "stop")
                if ids.shape[1] >= limit:
                    return Completion(ids[0, len(prompt) :].tolist(), "length")

    def _draft(self, ids: torch.Tensor, fed: torch.Tensor | None) -> torch.Tensor:
        """The ids [1, S] with drafts behind them; `fed` None begins a sequence."""
        if self._drafter is None:
            return ids
        hidden_states: Any = (fed,)
        outputs = None if fed is None else BaseModelOutput(hidden_states=hidden_states)
        drafted_ids, _ = self._drafter.get_candidates(ids, model_outputs=outputs, is_first_iteration=fed is None)
        return drafted_ids

    def _states(self, ids: torch.Tensor, cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
        """The trunk's states [1, S, H] before and after its final norm; transformers returns the second alone."""
        before: list[torch.Tensor] = []
        with self._decoder.norm.register_forward_pre_hook(lambda norm, inputs: before.append(inputs[0])):
            after = self._decoder(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        return before[0], after

    def _take_back(self, ids: torch.Tensor, number: int, cache: DynamicCache, begin: RecurrentStates) -> None:
        """Let the cache forget the last `number` of the ids that it has just been given.

        Keys and values are cut off. A state is that of all tokens so far, so it becomes what it was before them, and
        those that stay are computed again.
        """
        if not begin.layers:
            cache.crop(-number)
            return
        crop_keys(cache, ids.shape[1])
        begin.put_back()
        self._states(ids[:, : ids.shape[1] - number], cache)

    def _count(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            accepted = tuple(int(position < num_accepted) for position in range(num_drafted))
            self._counts += DraftCounts(1, num_drafted, accepted)


def load_trunk(model: ServedModel, config: EngineConfig) -> PreTrainedModel:
    """The model without its MTP heads, on the GPU when there is one.

    Raises:
        UserError: a tensor of the trunk is missing; transformers would put random numbers in its place.
    """
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.torch_dtype),
        "output_loading_info": True,
        "experts_implementation": "eager",  # one expert after the other, in the order in which training sums them
    }
    model_class: Any = AutoModelForCausalLM
    if model.family.name == "mimo":
        # transformers has no MiMo class; the trunk is a Qwen2 whose config has another name.
        model_class = Qwen2ForCausalLM
        options["config"] = Qwen2Config(**{k: v for k, v in model.hf_config.items() if k != "model_type"})
    else:
        options["trust_remote_code"] = config.trust_remote_code
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every MTP tensor as unexpected
    try:
        trunk, loaded = model_class.from_pretrained(model.directory, **options)
    finally:
        logging.set_verbosity(verbosity)
    if loaded["missing_keys"]:
        raise UserError(
            f"{model.directory} lacks tensors of the model:\n  " + "\n  ".join(some(sorted(loaded["missing_keys"]))),
            "copy, download or export the model again",
        )
    return trunk.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """One token per row of logits [S, V]: the likeliest, or one drawn.

    A draft is accepted when it equals the token drawn here. That is speculative sampling with a drafter that is certain
    of its token: the result has the trunk's own distribution.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    probabilities = warpers(torch.empty(0, dtype=torch.long), logits.float()).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
