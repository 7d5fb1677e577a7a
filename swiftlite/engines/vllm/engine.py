"""Adapt vLLM: run `vllm.LLM` with `{"method": "mtp"}` and options that `options.py` derives from the checkpoint.

vLLM has its own worker processes; this process only exchanges token ids with them. `plugin.py` extends vLLM for
swiftlite's checkpoints. Tested with vLLM 0.32.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from swiftlite.acceptance.counts import DraftCounts, SourceCounts
from swiftlite.base.errors import UserError
from swiftlite.engines.devices import on_devices, outside_torchrun
from swiftlite.engines.engine import (
    Completion,
    EngineConfig,
    OnAnswer,
    Sampling,
    check_prompts,
    filters_of,
    finish_reason,
)
from swiftlite.engines.loading.weight_update import Bucket, WeightUpdate, unsupported_layout
from swiftlite.engines.plugin import plugin_problem
from swiftlite.engines.vllm.image_inputs import check_same_length, image_options, vllm_prompt
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.live.weight_channel import LlmClient, VllmChannel
from swiftlite.engines.vllm.live.weight_transport import BACKENDS, check_gpus, make_transport
from swiftlite.engines.vllm.options import (
    attention_options,
    check_heads_can_be_updated,
    is_on_cpu,
    loading_options,
    require_plugin_for,
    speculative_config,
    variables_on_cpu,
    with_backend_of_trunk,
    with_ngrams,
)


class VllmEngine:
    """The `Engine` that runs vLLM.

    Attributes:
        is_asleep: whether the engine has freed its memory (`rest`), until it is called again.

    Raises:
        UserError: vLLM rejects the options or cannot start, or it would not draft with the checkpoint's heads.
    """

    def __init__(self, config: EngineConfig):
        require_plugin_for(config)
        # vLLM's start logs about 100 lines at INFO and 30 at WARNING, from four processes.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
        # vLLM logs about Triton before it reads its own level.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
        from vllm import LLM

        # Before the engine starts: its processes inherit the environment.
        os.environ.update(variables_on_cpu())
        if config.in_this_process and is_on_cpu():
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        num_devices = config.engine_kwargs.get("tensor_parallel_size", 1)
        check_gpus(config.weight_transport, config.devices or range(num_devices))
        options = engine_options(config)
        try:
            with outside_torchrun(), on_devices(config.devices):
                self._llm = LLM(**options)
        except (TypeError, ValueError) as error:  # pydantic raises ValueErrors
            raise UserError(f"vLLM rejected its options: {error}", "see --vllm_engine_kwargs") from error
        except RuntimeError as error:
            if "initialization failed" not in str(error):
                raise
            raise UserError("vLLM could not start", "see its log above for the cause") from error
        vllm_config = self._llm.llm_engine.vllm_config
        self.num_speculative_tokens: int = vllm_config.num_speculative_tokens
        self._model = config.model
        self._joins_ngrams = config.ngrams is not None
        self._max_length: int = vllm_config.model_config.max_model_len
        method = vllm_config.speculative_config and vllm_config.speculative_config.method
        client = LlmClient(self._llm)
        parallel = vllm_config.parallel_config
        num_workers = parallel.world_size_across_dp
        self._transport = make_transport(config.weight_transport, client, num_workers)
        channel = VllmChannel(client, self._transport)
        layout = unsupported_layout(parallel.pipeline_parallel_size, parallel.enable_expert_parallel)
        self._sleeps = config.sleeps and bool(config.engine_kwargs.get("enable_sleep_mode", True))
        self.is_asleep = False
        self._weights = WeightUpdate("vLLM", channel, config.model, method == "mtp", layout)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies.

        Raises:
            UserError: a prompt leaves no room for an answer, or the installed vLLM verifies drafts incorrectly with
                these sampling options.
        """
        from vllm import SamplingParams

        self._weights.check_whole()
        self._wake_up()
        check_prompts(prompts, self._max_length)
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                **filters_of(sampling),
                max_tokens=sampling.max_new_tokens,
                seed=sampling.seed_of(place),
                stop_token_ids=list(sampling.stop_token_ids),
                detokenize=False,
                logprobs=0 if sampling.log_p else None,  # of the sampled token alone
            )
            for place in range(len(prompts))
        ]
        # Like `LLM.generate`, but with a callback for each finished answer.
        asked: list[Any] = [vllm_prompt(prompt) for prompt in prompts]
        request_ids = self._llm.enqueue(asked, parameters, use_tqdm=False)
        if self.num_speculative_tokens or sampling.stop_strings:
            self._report_each_step(request_ids)
        lengths: list[list[int]] = [[] for _ in prompts]  # of each answer, after each of its steps
        completions: dict[int, Completion] = {}
        while self._llm.llm_engine.has_unfinished_requests():
            for output in cast(Sequence[Any], self._llm.llm_engine.step()):
                # vLLM numbers requests: the request "7-f3a92b1c" is returned as "7".
                place = int(output.request_id) - int(request_ids[0].partition("-")[0])
                # A stop text can end only in the tokens of this step; earlier ones were searched when they arrived.
                known = lengths[place][-1] if lengths[place] else 0
                lengths[place].append(len(output.outputs[0].token_ids))
                end = sampling.stop_strings and sampling.stop_strings.end(output.outputs[0].token_ids, known)
                # vLLM does not know the texts, because it gets and returns only tokens (detokenize is False).
                if end and not output.finished:
                    self._llm.llm_engine.abort_request([output.request_id])
                if end or output.finished:
                    check_same_length(prompts[place], len(output.prompt_token_ids or ()))
                    completion = _completion(output, lengths[place] if self.num_speculative_tokens else None)
                    completions[place] = completion.until(end) if end else completion
                    if on_answer:
                        on_answer(place, completions[place])
        return [completions[place] for place in range(len(prompts))]

    def _report_each_step(self, request_ids: Sequence[str]) -> None:
        """Let `step` return the tokens of a request after each of its steps. `enqueue` requests only finished
        answers."""
        from vllm.sampling_params import RequestOutputKind

        # `generate` reads from the lengths after each step how many drafts the step accepted.
        requests = self._llm.llm_engine.output_processor.request_states
        for request_id in request_ids:
            requests[request_id].output_kind = RequestOutputKind.CUMULATIVE
            requests[request_id].stream_interval = 1

    @property
    def bucket_device(self) -> torch.device:
        """Device of the tensors in a bucket of new weights."""
        return self._transport.device

    def update_weights(self, target: Iterable[Bucket] | None = None, draft: Iterable[Bucket] | None = None) -> None:
        """Send all HF tensors of trunk and heads to the running engine; None keeps the current weights
        (`WeightUpdate.run`).

        Raises:
            UserError: vLLM drafts from a folder (`stock_draft.py`), and its class would not read the heads.
        """
        if draft is not None:
            check_heads_can_be_updated(self._model)
        self._weights.check_layout()
        self._wake_up()
        # A sleeping engine has no memory for weights, so it is awake when the workers connect.
        self._transport.connect()
        self._weights.run(target, draft)

    def rest(self) -> None:
        """Move the weights to the host, and discard the KV cache, until the next call, if `EngineConfig.sleeps`.

        vLLM could also discard the weights (level 2), but would then have to prepare new ones for its kernels again.
        """
        if self._sleeps and not self.is_asleep:
            self._llm.sleep(level=1)  # on a CPU, vLLM only clears the prefix cache
            self.is_asleep = True

    def _wake_up(self) -> None:
        if self.is_asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # of this process, whose activations used the memory in the meantime
            self._llm.wake_up()
            self.is_asleep = False

    def draft_counts(self) -> DraftCounts:
        """Return the engine's counts of steps, drafted and accepted tokens since its start."""
        from vllm.v1.metrics.reader import Counter, Vector

        counted = {"num_drafts": 0, "num_draft_tokens": 0}
        per_position = (0,) * self.num_speculative_tokens
        for metric in self._llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if isinstance(metric, Counter) and name in counted:
                counted[name] = int(metric.value)
            elif isinstance(metric, Vector) and name == "num_accepted_tokens_per_pos":
                per_position = tuple(int(value) for value in metric.values)
        ngram = SourceCounts()
        if self._joins_ngrams:
            ngram = SourceCounts(*self._llm.collective_rpc("swiftlite_ngram_counts")[0])
        return DraftCounts(counted["num_drafts"], counted["num_draft_tokens"], per_position, ngram)

    def close(self) -> None:
        """Stop vLLM's processes, if there are any, and wait for them."""
        self._transport.close()
        # By default vLLM waits 5 s for the engine, which waits 5 s for its workers, and then kills them.
        self._llm.llm_engine.engine_core.shutdown(timeout=30)


def _completion(output: Any, lengths: Sequence[int] | None) -> Completion:
    """Convert a RequestOutput of vLLM to a `Completion`.

    Args:
        lengths: number of tokens of the answer after each of its steps; None if vLLM does not draft.
    """
    answer = output.outputs[0]
    log_p = None
    if answer.logprobs is not None:
        log_p = [of_place[token].logprob for token, of_place in zip(answer.token_ids, answer.logprobs, strict=True)]
    depths = None
    if lengths is not None and not output.finished:
        depths = draft_depths(lengths, None)
    elif lengths is not None and answer.spec_decode_metrics is not None:
        depths = draft_depths(lengths, answer.spec_decode_metrics.histogram)
    return Completion(list(answer.token_ids), finish_reason(answer.finish_reason), log_p, depths)


def draft_depths(lengths: Sequence[int], steps_by_accepted: Sequence[int] | None) -> list[int]:
    """Return for each token of an answer its position in the drafts of its step, counted from 1; 0 for a token of the
    trunk.

    A step appends its accepted drafts and one token of the trunk. The last step can be truncated after any of them, so
    its number of accepted drafts follows from those of all steps. Example: lengths 1, 4, 5, 7 and numbers [1, 0, 2]
    mean 4 accepted drafts, of which the second and third step have 2. The last step therefore has 2 as well, and its
    third token, that of the trunk, was truncated. The result is 0, 1, 2, 0, 0, 1, 2.

    Args:
        lengths: number of tokens after each step.
        steps_by_accepted: number of drafting steps with 0, 1, 2, ... accepted drafts. None: no step is truncated.
    """
    begins = [0, *lengths[:-1]]
    accepted = [end - begin - 1 for begin, end in pairwise([0, *lengths])]
    if steps_by_accepted is not None:
        # vLLM counts accepted drafts before it truncates the answer, so the sums include those that it cut off.
        accepted[-1] = sum(number * steps for number, steps in enumerate(steps_by_accepted)) - sum(accepted[:-1])
    depths = []
    for begin, end, number in zip(begins, lengths, accepted, strict=True):
        of_step = [*range(1, number + 1), 0]
        depths += of_step[: end - begin]
    return depths


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """Return the keyword arguments for `vllm.LLM`.

    Raises:
        UserError: the heads are incomplete, or vLLM would run another head than the one trained for a draft step.
    """
    attention = attention_options(config.model, config.torch_dtype)
    drafting = with_backend_of_trunk(speculative_config(config), attention)
    options = {
        "model": str(config.model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_batch_size,
        "use_tqdm_on_load": False,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # ignore the sampling settings in the model's directory
        "logprobs_mode": "processed_logprobs",  # after the temperature; only requests with `logprobs` are affected
        "disable_log_stats": False,  # the statistics include draft counts
        "enable_sleep_mode": (config.sleeps and not is_on_cpu()) or None,
        "enforce_eager": is_on_cpu(),  # compilation takes minutes and saves little on a CPU
        **attention,
        **loading_options(config.model, config.engine_kwargs),
        **with_ngrams(config, drafting),
        # The number of accepted drafts of each request. vLLM rejects the option if it does not draft.
        "per_request_spec_decode_metrics": "summary" if drafting else None,
    }
    # The backends are the plugin's. Without them the engine serves, but takes no new weights.
    if plugin_problem(VLLM) is None:
        options["weight_transfer_config"] = {"backend": BACKENDS[config.weight_transport]}
    # The limits of images come last: they contain the user's limits, checked against the prompts.
    options |= config.engine_kwargs | image_options(config)
    return {name: value for name, value in options.items() if value is not None}
