"""Adapt SGLang: run `sglang.Engine` with the checkpoint's MTP heads as its EAGLE drafter.

SGLang runs scheduler and workers in subprocesses; this process only exchanges token ids with them. `options.py` derives
SGLang's speculative options from the checkpoint, and `plugin.py` extends SGLang for swiftlite's checkpoints. Tested
with SGLang 0.5.23.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
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
from swiftlite.engines.plugin import require_plugin
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.sglang.options import (
    check_trunk,
    cpu_options,
    cpu_variables,
    is_on_cpu,
    speculative_options,
)
from swiftlite.families.drafters import BLOCKS


class SglangEngine:
    """The `Engine` that runs SGLang.

    Attributes:
        bucket_device: device of the tensors in a bucket of new weights.

    Raises:
        UserError: SGLang rejects the options or cannot start, or it would not draft with the checkpoint's heads.
    """

    bucket_device = torch.device("cpu")

    def __init__(self, config: EngineConfig):
        if config.weight_transport != "file":
            raise UserError(
                f"weight_transport {config.weight_transport} is not supported by SGLang", "use weight_transport file"
            )
        os.environ.update(cpu_variables())  # read when SGLang is imported
        import sglang

        require_plugin(SGLANG)
        # SGLang logs an error because a custom handler, `report_lost_process`, is used.
        logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)
        server_args = checked_options(engine_options(config))
        with outside_torchrun(), on_devices(config.devices):
            self._engine = sglang.Engine(server_args=server_args)
        self._kind = config.model.heads.kind
        self.num_speculative_tokens: int = server_args.speculative_num_steps or 0
        if self.num_speculative_tokens and self._kind in BLOCKS:
            self.num_speculative_tokens = server_args.speculative_num_draft_tokens - 1
        manager = self._engine.tokenizer_manager
        self._max_length: int = manager.context_len - manager.num_reserved_tokens  # drafts also need positions
        self._keep_sigterm()
        self._counts = DraftCounts(0, 0, (0,) * self.num_speculative_tokens)
        from swiftlite.engines.sglang.weight_channel import SglangChannel

        channel = SglangChannel(self._engine, server_args.tp_size)
        layout = unsupported_layout(server_args.pp_size, server_args.ep_size > 1)
        self._weights = WeightUpdate("SGLang", channel, config.model, self.num_speculative_tokens > 0, layout)

    def _keep_sigterm(self) -> None:
        """Restore this process's SIGTERM handler.

        At its first request, SGLang replaces the handler by one that drains requests and exits with code 0.
        """
        before = signal.getsignal(signal.SIGTERM)

        async def begin() -> None:
            self._engine.tokenizer_manager.auto_create_handle_loop()  # requires a running event loop

        self._engine.loop.run_until_complete(begin())
        # Removing asyncio's handler sets the default one of the process, so the earlier one is set after it.
        self._engine.loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies.

        Raises:
            UserError: a prompt leaves no room for an answer, or the installed SGLang ignores a sampling option when it
                verifies drafts.
        """
        self._weights.check_whole()
        check_prompts(prompts, self._max_length)
        if self.num_speculative_tokens:
            SGLANG.check_temperature(sampling.temperature)
        return self._engine.loop.run_until_complete(self._generate(prompts, sampling, on_answer))

    async def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None
    ) -> list[Completion]:
        """Send one request per prompt, so that each answer is available when it is finished."""

        async def answer(place: int, prompt: Sequence[int]) -> Completion:
            output: Any = await self._engine.async_generate(
                input_ids=list(prompt),
                sampling_params=sampling_params(sampling, place, self._max_length - len(prompt)),
                return_logprob=sampling.log_p,
            )
            # Counted before the answer is reported, so that a caller that stops at it finds complete counts.
            self._counts += draft_counts(output["meta_info"], self.num_speculative_tokens)
            reason = finish_reason(output["meta_info"]["finish_reason"]["type"])
            log_p = log_probabilities(output) if sampling.log_p else None
            completion = Completion(output["output_ids"], reason, log_p)
            if on_answer:
                on_answer(place, completion)
            return completion

        return list(await asyncio.gather(*(answer(place, prompt) for place, prompt in enumerate(prompts))))

    def update_weights(self, target: Iterable[Bucket] | None = None, draft: Iterable[Bucket] | None = None) -> None:
        """Send all HF tensors of trunk and heads to the running engine; None keeps the current weights
        (`WeightUpdate.run`).

        Raises:
            UserError: the weights are those of a drafter other than MTP heads, or SGLang does not take them.
        """
        if draft is not None and self._kind != MTP:
            raise UserError(
                f"SGLang cannot receive new weights of the drafter {self._kind!r}", "use --speculative none"
            )
        self._weights.run(target, draft)

    def draft_counts(self) -> DraftCounts:
        """Return the engine's counts of steps, drafted and accepted tokens since its start."""
        return self._counts

    def close(self) -> None:
        """Stop SGLang's processes and wait for them."""
        self._engine.shutdown()


def sampling_params(sampling: Sampling, place: int, room: int) -> dict[str, Any]:
    """Return the sampling parameters of a request.

    Args:
        place: number of the prompt.
        room: maximum number of tokens; SGLang rejects a request whose prompt and answer might not fit.
    """
    return {
        "temperature": sampling.temperature,
        **filters_of(sampling),
        # SGLang's number for all tokens.
        "top_k": sampling.top_k or -1,
        "max_new_tokens": min(sampling.max_new_tokens, room),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # also disables stop_token_ids
        "sampling_seed": sampling.seed_of(place),
    }


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """Return the keyword arguments for `sglang.Engine`.

    Args:
        config: configuration; its speculative_config contains the user's values of SGLang's four speculative options.

    Raises:
        UserError: the heads are incomplete, or SGLang would not draft with them.
    """
    check_trunk(config.model)
    options: dict[str, Any] = {
        "model_path": str(config.model.directory),
        "dtype": config.torch_dtype,
        "trust_remote_code": config.trust_remote_code,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_batch_size,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "sampling_defaults": "openai",  # ignore the sampling settings in the model's directory
        "log_level": "error",
    }
    drafts = config.num_speculative_tokens != 0
    if drafts:
        options |= speculative_options(config.model, config.num_speculative_tokens, config.speculative_config)
        # Block drafters draw without this option, and SGLang rejects it for them.
        is_chain = options["speculative_eagle_topk"] == 1 and config.model.heads.kind not in BLOCKS
        if config.draws_drafts and is_chain and not is_on_cpu():
            options["speculative_use_rejection_sampling"] = True
    options |= cpu_options(config.model.family, drafts) | config.engine_kwargs
    return {name: value for name, value in options.items() if value is not None}


def checked_options(options: Mapping[str, Any]) -> Any:  # returns a ServerArgs
    """Let SGLang resolve the options and return the result, so that its errors appear before any process is started.

    Raises:
        UserError: SGLang rejects an option.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    logging.getLogger("sglang").setLevel(logging.ERROR)  # hides ten lines about the choice of a backend
    load_plugins()
    try:
        server_args = ServerArgs(**{**options, "custom_sigquit_handler": report_lost_process})
        server_args.resolve_once()
        server_args.check_server_args()
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: no NVIDIA driver
        raise UserError(f"SGLang rejected its options: {error}", "see --sglang_engine_kwargs") from error
    return server_args


def report_lost_process(signum: int, frame: object) -> None:
    """Raise an error if a process of SGLang fails.

    This handler replaces SGLang's handler, which would kill this process.
    """
    raise UserError("a process of SGLang failed", "see its log above for the cause")


def log_probabilities(output: Mapping[str, Any]) -> list[float]:
    """Return the log-probability of each token of an answer, after the temperature.

    SGLang computes those of drafted tokens from the logits with which it verifies them (`compute_spec_logprobs` in
    layers/logprob_processor.py of 0.5.23). Its list also has tokens behind a stop token that were accepted in the same
    step.
    """
    entries = output["meta_info"]["output_token_logprobs"][: len(output["output_ids"])]
    assert [token for _, token, *_ in entries] == output["output_ids"]
    return [log_p for log_p, *_ in entries]


def draft_counts(meta_info: Mapping[str, Any], num_tokens: int) -> DraftCounts:
    """Return the counts of one answer.

    SGLang returns the number of steps with 0, 1, 2, ... correct drafts; these numbers are missing for an answer of one
    token. With 2 draft tokens, [2, 1, 3] means 2 steps without a correct draft, 1 step in which only the first draft
    was correct, and 3 steps in which both were. In these 6 steps, the first draft was correct 4 times and the second 3
    times.

    Args:
        meta_info: `meta_info` of an output of `Engine.generate`.
        num_tokens: number of draft tokens per step.
    """
    steps_by_hits = meta_info.get("spec_correct_drafts_histogram", [])
    steps_by_hits = [*steps_by_hits, *(0,) * (num_tokens + 1 - len(steps_by_hits))]
    # A draft at position k was correct in every step with k or more correct drafts.
    at_least = tuple(accumulate(reversed(steps_by_hits)))[::-1]
    return DraftCounts(at_least[0], meta_info.get("spec_num_proposed_drafts", 0), at_least[1:])
