"""What every engine is to its caller: token ids in, token ids out, and counts of what its drafts were worth.

An adapter is a class with these methods, named in its engine's record (`info.py`). No adapter, and nothing that it
needs, is imported before `start_engine` is called with the engine's name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal, Protocol

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.fields import WeightTransport
from swiftlite.engines.index import ENGINES
from swiftlite.errors import UserError
from swiftlite.families.resolved import HfModel


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens, and when to stop.

    Args:
        max_new_tokens: longest completion.
        temperature: 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this.
        seed: of the random numbers of one `generate` call; not used when greedy.
        draft_confidence: nothing is drafted behind a draft that its head gives a smaller probability, by engines whose
            record says `takes_draft_confidence`; 0 drafts as many as the engine was started for.
        stop_token_ids: tokens that end a completion; the one that did stays in it.
        numbers: one for each prompt of the call, which with `seed` says what is drawn for it; unset: 0, 1, 2 and so on.
            With its number from a longer list, a prompt is answered as it would be among all of them.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42
    stop_token_ids: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    draft_confidence: float = 0.0

    def seed_of(self, place: int) -> int:
        """The seed of the prompt at a place in the call; one for all would answer a repeated prompt alike."""
        return self.seed + (self.numbers[place] if self.numbers else place)


@dataclass(frozen=True)
class Completion:
    """What followed one prompt.

    Attributes:
        token_ids: the stop token included.
        finish_reason: stop, or length when it was cut at max_new_tokens or at the longest sequence.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with.

    Args:
        model: see `resolve_served`.
        torch_dtype: bfloat16 or float32.
        trust_remote_code: whether Python files of the model may run.
        num_speculative_tokens: tokens to draft per step; 0 drafts nothing, None as many as the engine has heads for.
        max_model_len: longest prompt plus completion; None is the model's own limit.
        max_batch_size: prompts served at once, where the engine can.
        in_this_process: vLLM on a CPU computes in this process and starts no other, in a third of the time; it leaves
            its thread settings and process groups behind, so nothing else should compute here.
        engine_kwargs: the engine's own keyword arguments, over all others; a value of None removes the key.
        speculative_config: the engine's own drafting options, instead of what is derived from the checkpoint.
        devices: GPUs of this machine that the engine computes on, such as those that no training process has; empty:
            the first ones.
        weight_transport: how new weights reach the engine while it runs, where it can take them in more than one way.
            file: through the temporary directory. nccl: from GPU to GPU. ipc: on the GPU that both share.
        draws_drafts: whether drafts for answers at a temperature above 0 are drawn from the heads, where the engine has
            to be told so at its start; of itself it drafts the likeliest token. Greedy answers are drafted as ever.
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
    weight_transport: WeightTransport = "file"
    draws_drafts: bool = False


OnAnswer = Callable[[int, Completion], None]
"""Called as soon as an answer is finished, with the place of its prompt; in any order."""


class Engine(Protocol):
    """A started engine; `close` gives its memory and processes back."""

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens drafted per step; 0 without speculation."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt; the completions are in order. All prompts are with the engine from the beginning, so
        it is busy until the last one.

        Args:
            on_answer: what it raises ends the call, after which the engine can only be closed.

        Raises:
            UserError: a prompt that leaves no room for an answer.
        """
        ...

    def draft_counts(self) -> DraftCounts:
        """Steps, drafted and accepted tokens since the engine was started, as the engine itself counts them."""
        ...

    def close(self) -> None: ...


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Make sure that every prompt leaves room for an answer.

    Args:
        max_length: tokens of the longest prompt and its answer.

    Raises:
        UserError: a prompt that is empty, or so long that no token fits behind it.
    """
    for prompt in prompts:
        if not 0 < len(prompt) < max_length:
            raise UserError(
                f"a prompt has {len(prompt)} tokens; with its answer it can have {max_length}",
                "shorten it, or raise --max_model_len if the model has the positions",
            )


def start_engine(name: str, config: EngineConfig) -> Engine:
    """Import and start an engine by the name that --infer_backend takes.

    Raises:
        UserError: the engine is not installed, or the checkpoint is not what it can serve.
    """
    info = ENGINES[name]
    try:
        start: Callable[[EngineConfig], Engine] = resolve_name(info.adapter)
        return start(config)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != info.package:
            raise  # the engine is there, something inside it is not: its own traceback says more
        raise UserError(f"--infer_backend {name}: {info.package} is not installed", info.install) from None
