"""Adapt transformers: complete one prompt at a time; MTP heads draft and the trunk verifies.

swiftlite implements the generation loop, because transformers selects the drafter of `generate` in a private method and
does not count drafts. swiftlite's drafter has the interface that transformers defines, and also works in transformers'
loop (tests/engines/transformers/test_mtp_heads.py).
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from swiftlite.acceptance.counts import DraftCounts, SourceCounts
from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.expert_stack import stack, stack_as_in_files, stack_name
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.tensors import Checkpoint, some
from swiftlite.engines.engine import Completion, EngineConfig, OnAnswer, Sampling, check_prompts
from swiftlite.engines.loading.weight_update import Bucket
from swiftlite.engines.prompts import ImagePrompt
from swiftlite.engines.served_model import require_heads
from swiftlite.engines.transformers.draft_generator import DraftGenerator
from swiftlite.engines.transformers.drafters import STEPS, load_drafter
from swiftlite.engines.transformers.image_inputs import ImageInputs
from swiftlite.engines.transformers.mtp_heads import DraftOutput, MtpSteps, ScaledOutput, final_norm
from swiftlite.engines.transformers.recurrent import RecurrentStates, crop_keys, whole_cache
from swiftlite.engines.transformers.verification import processed, verify, verify_greedily, warpers
from swiftlite.families.drafters import SERVED
from swiftlite.families.resolved import HfModel
from swiftlite.families.wrapped import is_wrapped, text_name


class TransformersEngine:
    """The `Engine` that runs transformers, on the GPU if there is one.

    Raises:
        UserError: the model is missing, or its MTP heads do not match its config.json.
    """

    def __init__(self, config: EngineConfig):
        if config.devices:
            raise UserError(
                "devices are not supported by transformers, which uses this process's GPU", "remove devices"
            )
        model = config.model
        self._config = config
        num_tokens = config.num_speculative_tokens
        if num_tokens is None:
            num_tokens = model.heads.drafts
        # Without a number, drafts are wanted: `require_heads` then reports a model without heads.
        if num_tokens or config.num_speculative_tokens is None:
            require_heads(model, SERVED)
        self._num_head_tokens = num_tokens
        self._ngrams = config.ngrams
        self.num_speculative_tokens = max(num_tokens, config.ngrams.max_tokens) if config.ngrams else num_tokens
        self._load_trunk(model)
        longest = self._decoder.config.get_text_config().max_position_embeddings
        self.max_length = min(config.max_model_len or longest, longest)
        self._drafting = model.family.drafting_of(model.config, model.heads)
        self._features, self._reads_state = model.heads.features, model.heads.reads_state
        self._steps = STEPS.get(model.heads.kind, MtpSteps)
        self._heads = None
        if num_tokens:
            self._heads = load_drafter(model, self._decoder)
        self._counts = DraftCounts(0, 0, (0,) * self.num_speculative_tokens)

    def _load_trunk(self, model: HfModel) -> None:
        trunk: Any = load_trunk(replace(self._config, model=model))
        outside = model.family.outside(model.config)
        self._embedding_multiplier = 1.0 if outside.multiplies_in_embedding else outside.embedding_multiplier
        # Separately, so that logits are computed only at the positions that verify drafts or choose a token.
        self._decoder, self._output_layer = trunk.get_decoder(), trunk.get_output_embeddings()
        if outside.logits_divisor != 1 or outside.logits_cap is not None:
            self._output_layer = ScaledOutput(self._output_layer, outside)
        self._vision_model: Any = None
        if self._config.max_images:
            self._vision_model = trunk.base_model
        self._draft_output: Any = self._output_layer
        if model.heads.draft_vocab:
            self._draft_output = DraftOutput(self._output_layer, model.heads.draft_vocab, outside)

    @property
    def bucket_device(self) -> torch.device:
        """Device of the tensors in a bucket of new weights."""
        return torch.device("cpu")

    def update_weights(self, target: Iterable[Bucket] | None = None, draft: Iterable[Bucket] | None = None) -> None:
        """Load all HF tensors of trunk and heads; None keeps the current weights.

        The tensors are written to a temporary directory and loaded like a model, with the same checks.

        Raises:
            UserError: a tensor is missing or unexpected.
        """
        if target is not None:
            with model_files(self._config.model, target) as model:
                self._load_trunk(model)
        if draft is not None:
            with model_files(self._config.model, draft) as model:
                require_heads(model, SERVED)
                self._heads = load_drafter(model, self._decoder)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies."""
        check_prompts(prompts, self.max_length)
        generator = torch.Generator(self._decoder.device)
        completions = []
        for place, prompt in enumerate(prompts):
            # Per prompt, so that an answer does not depend on the length of the answers before it.
            generator.manual_seed(sampling.seed_of(place))
            completions.append(self._complete(prompt, sampling, generator))
            if on_answer:
                on_answer(place, completions[place])
        return completions

    @torch.inference_mode()
    def prompt_log_p(self, prompt: Sequence[int]) -> tuple[list[int], list[float], list[float]]:
        """Return, for each token of a prompt after the first, the most likely token in its place, the log-probability
        of that token, and its own log-probability.
        """
        # No token follows, so a prompt can have the maximum length.
        check_prompts([prompt], self.max_length + 1)
        ids = torch.tensor([list(prompt)], device=self._decoder.device)
        _, after, _ = self._states(ids, whole_cache(self._decoder.config), None)
        log_p = self._output_layer(after[0, :-1]).float().log_softmax(dim=-1)
        largest = log_p.max(dim=-1)
        own = log_p.gather(1, ids[0, 1:, None])[:, 0]
        return largest.indices.tolist(), largest.values.tolist(), own.tolist()

    def draft_counts(self) -> DraftCounts:
        """Return the draft counts since the start.

        Drafts after a stop token or the maximum length also count as accepted.
        """
        return self._counts

    def close(self) -> None:
        """Release the weights."""
        del self._vision_model, self._decoder, self._output_layer, self._draft_output, self._heads
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _complete(self, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator) -> Completion:
        ids = torch.tensor([list(prompt)], device=self._decoder.device)
        limit = min(len(prompt) + sampling.max_new_tokens, self.max_length)
        cache = whole_cache(self._decoder.config)
        processor, is_drawn = warpers(sampling), sampling.temperature > 0
        images = None
        if isinstance(prompt, ImagePrompt):
            images = ImageInputs(prompt, self._vision_model)
        drafter = self._make_drafter(processor, generator, sampling, images)
        answer: list[int] = []
        log_p: list[float] = []
        draft_depths: list[int] = []
        fed = None  # trunk states of the last pass that heads read
        while True:
            drafted_ids, drawn_from = _draft(drafter, ids, fed)
            drafted_ids, is_ngram = self._with_ngrams(drafted_ids, ids, fed, is_drawn=is_drawn)
            drafts = drafted_ids[0, ids.shape[1] :]
            num_drafted = len(drafts)
            begin = None
            if num_drafted:
                # Copied only if a draft can be rejected: these states are as large as the keys of many tokens.
                begin = RecurrentStates(cache)
            # The cache lacks the newest token, which the trunk has not read, and in the first pass the whole prompt.
            new_ids = drafted_ids[:, cache.get_seq_length() :]
            before, after, features = self._states(new_ids, cache, images)
            # One row more than drafts: row i verifies draft i, and the last one chooses the token after all drafts.
            logits = processed(processor, drafted_ids, self._output_layer(after[0, -num_drafted - 1 :]))
            if not is_drawn:
                tokens = verify_greedily(drafts, logits)
            else:
                p = logits.softmax(dim=-1)
                q = p[:0]
                if is_ngram:  # certain drafts
                    q = torch.nn.functional.one_hot(drafts, p.shape[1]).to(p.dtype)
                elif drawn_from is not None:
                    q = drawn_from[0].softmax(dim=-1)
                tokens = verify(drafts, q, p, generator)
            num_accepted = len(tokens) - 1
            draft_depths += [*range(1, num_accepted + 1), 0]
            if sampling.log_p:
                log_p += _log_probabilities(logits, tokens)
            self._count(num_drafted, num_accepted, is_ngram)
            if num_drafted > num_accepted:
                assert begin is not None
                self._roll_back(new_ids, num_drafted - num_accepted, cache, begin, images)
            # States behind rejected drafts are still in it; `DraftSteps.begin` cuts them off.
            fed = after
            if self._drafting.takes_before_norm:
                fed = before
            if self._heads is not None and features:
                layer: Any = self._heads[0]
                fed = layer.fused([fed, *features] if self._reads_state else features)
            # Token by token, because a stop token or text can end inside of the accepted drafts.
            for token in tokens.tolist():
                ids = torch.cat((ids, ids.new_tensor([[token]])), dim=1)
                answer.append(token)
                is_stop = sampling.ends(answer)
                if is_stop or ids.shape[1] >= limit:
                    of_tokens = log_p[: len(answer)] if sampling.log_p else None
                    reason = "stop" if is_stop else "length"
                    return Completion(answer, reason, of_tokens, draft_depths[: len(answer)])

    def _make_drafter(
        self,
        processor: LogitsProcessorList | None,
        generator: torch.Generator,
        sampling: Sampling,
        images: ImageInputs | None,
    ) -> DraftGenerator | None:
        """Return the drafter for one prompt; None without speculation."""
        if self._heads is None:
            return None
        steps = self._steps(
            self._decoder,
            self._draft_output,
            self._heads,
            self._num_head_tokens,
            self._drafting,
            images,
            self._embedding_multiplier,
        )
        is_greedy = sampling.temperature == 0
        return DraftGenerator(steps, processor, generator, sampling.draft_confidence, is_greedy=is_greedy)

    def _states(
        self, ids: torch.Tensor, cache: DynamicCache, images: ImageInputs | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the trunk's states [1, S, H] before and after its final norm, and the inputs of the layers in
        `Heads.features`.

        transformers returns only the states after the norm.
        """
        model = self._decoder
        inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
        if images is not None:
            model = self._vision_model
            start = cache.get_seq_length()
            inputs["position_ids"] = images.positions(start, ids.shape[1])
            if start == 0:  # later passes contain only generated tokens
                inputs["mm_encoder_outputs"] = images.outputs
        # Hooks are called in the order of the layers, and the norm's comes last.
        seen: list[torch.Tensor] = []
        modules = [*(self._decoder.layers[layer] for layer in self._features), final_norm(self._decoder)]
        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])))
            after = model(**inputs).last_hidden_state
        *features, before = seen
        return before, after, features

    def _roll_back(
        self, ids: torch.Tensor, number: int, cache: DynamicCache, begin: RecurrentStates, images: ImageInputs | None
    ) -> None:
        """Remove the last `number` ids of the previous pass from the cache.

        Keys and values of the tokens are removed. A recurrent state (linear attention) covers all previous tokens and
        cannot be truncated. It is restored to the state before the pass, and the remaining tokens are processed
        again."""
        if not begin.layers:
            cache.crop(-number)
            return
        # All tokens of the pass, because `_states` below appends the accepted ones again.
        crop_keys(cache, ids.shape[1])
        begin.restore()
        self._states(ids[:, : ids.shape[1] - number], cache, images)

    def _with_ngrams(
        self, drafted_ids: torch.Tensor, ids: torch.Tensor, fed: torch.Tensor | None, *, is_drawn: bool
    ) -> tuple[torch.Tensor, bool]:
        """Return the ids [1, S] with drafts from the text instead of those of the heads where the text matches, and
        whether it does.

        The heads have drafted all the same, so that their caches contain every accepted token.
        """
        if self._ngrams is None or fed is None:  # as for heads, the first token of an answer follows from the prompt
            return drafted_ids, False
        drafts = self._ngrams.propose(ids[0].cpu().numpy(), is_drawn=is_drawn)
        if not drafts:
            return drafted_ids, False
        return torch.cat((ids, ids.new_tensor([drafts])), dim=1), True

    def _count(self, num_drafted: int, num_accepted: int, is_ngram: bool) -> None:
        if num_drafted:
            accepted = tuple(int(position < num_accepted) for position in range(self.num_speculative_tokens))
            ngram = SourceCounts(1, num_drafted, num_accepted) if is_ngram else SourceCounts()
            self._counts += DraftCounts(1, num_drafted, accepted, ngram)


def load_trunk(config: EngineConfig) -> PreTrainedModel:
    """Load the model without its MTP heads, on the GPU if there is one. The vision tower is loaded for images only.

    Raises:
        UserError: a tensor of the trunk is missing; transformers would initialize it randomly.
    """
    model = config.model
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.torch_dtype),
        "output_loading_info": True,
        "experts_implementation": "eager",  # one expert after another, with the order of summation of training
    }
    model_class: Any = AutoModelForCausalLM
    if config.max_images or _has_vision_class_only(model):
        model_class = AutoModelForImageTextToText
    source: Path | None = model.directory
    if model.family.serving.transformers:
        model_class, options["config"] = resolve_name(model.family.serving.transformers)(model)
    else:
        options["trust_remote_code"] = config.trust_remote_code
    # Tensors are then read here: decoded as in training, with the names of the language model without its wrapper.
    if format_of(model.config) or is_wrapped(model.family):
        model_class, options["config"] = _unquantized_class(model_class, model, options)
        options["state_dict"] = _trunk_tensors(model, options["dtype"])
        source = None
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # transformers lists every MTP tensor as unexpected
    logging.disable_progress_bar()
    try:
        trunk, loaded = model_class.from_pretrained(source, **options)
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()
    # transformers only logs missing tensors, and this log is off above.
    if loaded["missing_keys"]:
        raise UserError(
            f"{model.directory}: missing tensors:\n  " + "\n  ".join(some(sorted(loaded["missing_keys"]))),
            "copy, download or export the model again",
        )
    if torch.cuda.is_available():
        trunk = trunk.to("cuda")
    return trunk.eval()


def _has_vision_class_only(model: HfModel) -> bool:
    """Return whether transformers has a class for the whole vision-language model, but none for its language model."""
    model_type = model.config["model_type"]
    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and (
        model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def _unquantized_class(model_class: Any, model: HfModel, options: dict[str, Any]) -> tuple[Any, PreTrainedConfig]:
    """Return the class for a trunk whose tensors are read here, and the model's config without the quantization."""
    config = options.pop("config", None)
    trust_remote_code = options.pop("trust_remote_code", False)
    if config is None:
        config = AutoConfig.from_pretrained(model.directory, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            # transformers would otherwise build quantized modules, into which decoded tensors do not fit.
            delattr(part, "quantization_config")
    if model_class not in (AutoModelForCausalLM, AutoModelForImageTextToText):
        return model_class, config
    with torch.device("meta"):
        # Only for its class: modules on the meta device take no memory.
        trunk = model_class.from_config(config, trust_remote_code=trust_remote_code)
    return type(trunk), trunk.config


def _trunk_tensors(model: HfModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the trunk's tensors, decoded as in training, with the names of a language model without a wrapper.

    transformers 5.19 applies wrong FP8 scales or raises an error if the size of a matrix is not a multiple of the block
    size, such as DeepSeek-V3's `kv_a_proj_with_mqa` with 576 rows (integrations/finegrained_fp8.py).
    """
    family, hf_config = model.family, model.config
    tensors, parts = {}, {}
    with Checkpoint(model.directory, format_of(hf_config)) as checkpoint:
        for key, entry in checkpoint.entries.items():
            if family.is_mtp(hf_config, key) or family.is_carried(hf_config, key) or family.is_derived(key):
                continue
            name = text_name(key) if is_wrapped(family) else key
            tensor = torch.empty(entry.shape, dtype=checkpoint.dtype_of(key, dtype))
            checkpoint.read_into(tensor, key, (slice(None),) * len(entry.shape))
            # Only experts that the files have in a stack: transformers converts names of single experts itself.
            is_part = stack_name(key) in checkpoint.stored and key not in checkpoint.stored
            (parts if is_part else tensors)[name] = tensor
    return stack_as_in_files(tensors) | stack(parts)


def _log_probabilities(logits_KV: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Return the log-probabilities of tokens, each under the logits of its place."""
    log_p_KV = logits_KV[: len(tokens)].float().log_softmax(dim=-1)
    return log_p_KV.gather(1, tokens[:, None])[:, 0].tolist()


@contextmanager
def model_files(model: HfModel, buckets: Iterable[Bucket]) -> Iterator[HfModel]:
    """Write tensors to a temporary directory with the config of a model, and yield a model with these tensors."""
    with tempfile.TemporaryDirectory(prefix="swiftlite-weights-") as name:
        directory = Path(name)
        for path in model.directory.glob("*.json"):
            # The index of the source names files that are not copied.
            if not path.name.endswith(".index.json"):
                shutil.copy(path, directory)
        weight_map: dict[str, str] = {}
        for number, bucket in enumerate(buckets):
            file = f"model-{number:05d}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in bucket.items()}, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(bucket, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        yield replace(model, name=name, directory=directory)


def _draft(
    drafter: DraftGenerator | None, ids: torch.Tensor, fed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the ids [1, S] with the drafts appended, and the logits of the drafts.

    Args:
        fed: the trunk's states of the last pass, which the heads read; None before the first pass of a sequence.
    """
    if drafter is None or fed is None:
        return ids, None
    hidden_states: Any = (fed,)
    return drafter.get_candidates(ids, model_outputs=BaseModelOutput(hidden_states=hidden_states))
