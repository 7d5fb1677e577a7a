"""Define the interface of engines. They receive and return token ids, and count drafts.

A class per engine implements the interface; the engine's `EngineInfo` (`info.py`) contains the name of this class. The
class and its dependencies are imported only when `start_engine` is called with the engine's name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal, Protocol, runtime_checkable

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.serving_fields import SamplingArgs, WeightTransport
from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.index import ENGINES
from swiftlite.engines.ngram import Ngrams
from swiftlite.engines.stop_strings import StopStrings
from swiftlite.families.resolved import HfModel

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings and stop conditions.

    Args:
        max_new_tokens: maximum length of a completion.
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens with this total probability.
        seed: seed of one `generate` call; ignored for greedy decoding.
        log_p: whether completions have log-probabilities, in engines with `EngineInfo.draws_rollouts`.
        draft_confidence: drafting stops after a draft token with a smaller probability, in engines with
            `EngineInfo.takes_draft_confidence`. With 0, the full number of tokens is always drafted.
        stop_token_ids: tokens that end a completion; the completion includes them.
        numbers: one number per prompt, which together with `seed` determines the prompt's random numbers. Default: 0,
            1, 2, ... If only a part of a list of prompts is completed, pass each prompt's index in the whole list, so
            that its answer stays the same.
        top_k: sample from this number of most likely tokens; 0: from all.
        min_p: sample from tokens with at least this share of the probability of the most likely one.
        repetition_penalty: makes tokens of the prompt and of the answer so far less likely, also in greedy decoding.
        stop_strings: texts that end a completion; the completion includes them.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42
    stop_token_ids: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    draft_confidence: float = 0.0
    log_p: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: StopStrings | None = None

    def seed_of(self, place: int) -> int:
        """Return the seed of the prompt with index `place` in the call. Equal prompts have different seeds."""
        number = place
        if self.numbers:
            number = self.numbers[place]
        return self.seed + number

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last of these tokens ends a completion."""
        if token_ids[-1] in self.stop_token_ids:
            return True
        stops = self.stop_strings
        return stops is not None and stops.end(token_ids, len(token_ids) - 1) is not None


def filters_of(args: SamplingArgs | Sampling) -> dict[str, Any]:
    """Return the settings that change the distribution of the next token, by name: those in `FILTERS`."""
    return {
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }


@dataclass(frozen=True)
class Completion:
    """The completion of one prompt.

    Attributes:
        token_ids: token ids, including the stop token.
        finish_reason: "length" if the completion was truncated at max_new_tokens or the maximum sequence length, else
            "stop".
        log_p: log-probability of each token under the distribution that it was sampled from (with temperature and
            filters), if `Sampling.log_p` requested it; else None.
        draft_depths: for each token, its position in the drafts of its step, counted from 1, if it is an accepted
            draft, and 0 if the trunk generated it. None if the engine does not report this.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    log_p: list[float] | None = None
    # Not compared: answers with the same tokens are equal.
    draft_depths: list[int] | None = field(default=None, compare=False)

    def until(self, end: int) -> "Completion":
        """Return the first `end` tokens, as a completion that has stopped."""
        log_p = None if self.log_p is None else self.log_p[:end]
        depths = None if self.draft_depths is None else self.draft_depths[:end]
        return Completion(self.token_ids[:end], "stop", log_p, depths)


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an engine.

    Args:
        model: the model to load, result of `resolve_served`.
        torch_dtype: bfloat16 or float32.
        trust_remote_code: whether Python files of the model may run.
        num_speculative_tokens: number of draft tokens per step. 0 disables drafts; None drafts one token per head.
        max_model_len: maximum length of prompt and completion; None is the model's limit.
        max_batch_size: maximum number of prompts processed at once, if the engine supports batches.
        in_this_process: whether vLLM on a CPU runs in this process instead of a subprocess. vLLM then starts in a third
            of the time, but permanently changes thread settings and process groups of this process.
        engine_kwargs: the engine's own keyword arguments, which override all others; None removes a key.
        speculative_config: the engine's own speculative options, instead of those derived from the checkpoint.
        devices: indices of GPUs for the engine, such as those without a training process; empty: the first GPUs.
        sleeps: whether the engine frees the memory of the GPU in `rest`, in engines with `EngineInfo.can_sleep`.
        weight_transport: transport of new weights to a running engine, if the engine supports several. "file": through
            files in the temporary directory. "nccl": from GPU to GPU. "ipc": within a GPU that both processes use.
        max_images: maximum number of images of a prompt (`prompts.ImagePrompt`), if the engine supports images. With 0,
            the image tower is not loaded.
        draws_drafts: whether drafts are sampled if the temperature is above 0; otherwise the most likely token is
            drafted. Only for engines that need this setting at start. Greedy requests are not affected.
        ngrams: drafts from the text, which replace those of the heads where the text matches; in engines with
            `EngineInfo.joins_ngrams`. None: only the heads draft.
        heads_draft: whether the heads draft. False, with `ngrams`: only the text does, in engines with
            `EngineInfo.drafts_without_heads`.
        draft_schedule: the number of draft tokens by the number of prompts in progress, at most
            `num_speculative_tokens`, in engines with `EngineInfo.takes_draft_schedule`.
    """

    model: HfModel
    torch_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    trust_remote_code: bool = False
    num_speculative_tokens: int | None = 0
    max_model_len: int | None = None
    max_batch_size: int = 32
    in_this_process: bool = False
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    speculative_config: dict[str, Any] | None = None
    devices: tuple[int, ...] = ()
    sleeps: bool = False
    weight_transport: WeightTransport = "file"
    max_images: int = 0
    draws_drafts: bool = False
    draft_schedule: DraftSchedule | None = None
    ngrams: Ngrams | None = None
    heads_draft: bool = True


OnAnswer = Callable[[int, Completion], None]
"""A function that is called with the index of a prompt and its completion, as soon as the completion is finished.
Completions finish in any order."""


class Engine(Protocol):
    """A started engine; `close` releases its memory and processes."""

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of tokens drafted per step; 0 without speculation."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt, and return the completions in the order of the prompts. All prompts are submitted at
        once.

        Args:
            prompts: tokens of each prompt, or an `ImagePrompt`.
            on_answer: called with each finished completion. An exception in this function ends the call; afterwards the
                engine can only be closed.

        Raises:
            UserError: a prompt leaves no room for an answer.
        """
        ...

    def draft_counts(self) -> DraftCounts:
        """Return the engine's counts of steps, drafted and accepted tokens since its start."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class RestingEngine(Protocol):
    """An engine with `EngineInfo.can_sleep`."""

    def rest(self) -> None:
        """Free the memory of the GPU until the next call, if `EngineConfig.sleeps`."""
        ...


def finish_reason(reason: str | None) -> FinishReason:
    """Convert an engine's finish reason to the `finish_reason` of a `Completion`."""
    if reason == "stop":
        return "stop"
    return "length"


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Check that every prompt leaves room for an answer.

    Args:
        max_length: maximum length of prompt and answer in tokens.

    Raises:
        UserError: a prompt is empty, or leaves no room for a token.
    """
    for prompt in prompts:
        if not 0 < len(prompt) < max_length:
            raise UserError(
                f"a prompt has {len(prompt)} tokens, but prompt and answer together can have {max_length}",
                "shorten it, or increase --max_model_len up to max_position_embeddings",
            )


def start_engine(name: str, config: EngineConfig) -> Engine:
    """Import and start an engine by its name in --infer_backend.

    Raises:
        UserError: the engine is not installed, or does not support the checkpoint.
    """
    info = ENGINES[name]
    try:
        start: Callable[[EngineConfig], Engine] = resolve_name(info.adapter)
        return start(config)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != info.package:
            raise  # the engine is installed, but one of its dependencies is not
        raise UserError(f"--infer_backend {name}: {info.package} is not installed", info.install) from None
