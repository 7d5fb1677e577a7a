"""Implement `megatron gkd`: the divergence from a teacher, on answers of the rows and on completions of the model.

Each step trains either on the answers of its rows, or on completions that the model generates for their prompts. These
completions are stored like those of `megatron grpo`, in a file with the number of the step.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from swiftlite.args.commands import GkdArgs
from swiftlite.args.data_fields import TruncationStrategy
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import Data
from swiftlite.data.encoder import ConversationEncoder, Encoded, Encoder, PromptEncoder, encode_prompt
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.rows.conversation import Conversation, RowError, parse_row
from swiftlite.data.rows.prompt import parse_prompt
from swiftlite.data.rows.sources import RowParser
from swiftlite.data.sample import Sample, make_sample
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.engine import Engine, Sampling
from swiftlite.families.resolved import HfModel
from swiftlite.plan.distillation import is_on_policy, on_policy_steps, teacher_layout
from swiftlite.rollouts.draw import draw
from swiftlite.rollouts.engine import check_servers, drafts, rest, sampling_of, send_weights, start_rollout_engine
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.policy_identity import NAME
from swiftlite.rollouts.rollouts import RolloutBatches
from swiftlite.rollouts.stored import FOLDER, GenerationFiles, on_first_rank
from swiftlite.rollouts.training import load_prompts
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.methods.conversations import load_data
from swiftlite.train.methods.distant_teacher import DistantTeacher
from swiftlite.train.methods.distillation import DistillationObjective
from swiftlite.train.methods.teacher import Teacher, check_tokenizer
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run, live_weights
from swiftlite.train.stopping import EarlyStop

PROMPT = "prompt"
"""Name of the extra with the tokens of a row's prompt, a tuple."""


def parse_answered(row: object, *, system: str | None = None, source: str = "") -> Conversation:
    """Return the conversation of a row with an answer.

    Raises:
        RowError: a field is invalid. If only the answer is missing, the hint names `--lmbda 1`.
    """
    try:
        return parse_row(row, system=system, source=source)
    except RowError as error:
        try:
            parse_prompt(row, system=system, source=source)
        except RowError:
            raise error from None
        field, _, problem = error.problem.partition(": ")
        raise RowError(field, problem, "add the answer, or use --lmbda 1, which does not require answers") from None


@dataclass(frozen=True)
class AnsweredPromptEncoder:
    """An `Encoder` of rows with answers, whose prompts leave room for a completion.

    Attributes:
        answers: encodes a row with its answer.
        max_completion_length: length that is reserved for a completion; 0 if no completions are generated.
    """

    answers: ConversationEncoder
    max_completion_length: int
    parse: RowParser = parse_answered

    @property
    def max_length(self) -> int:
        return self.answers.max_length

    @property
    def truncation_strategy(self) -> TruncationStrategy:
        return self.answers.truncation_strategy

    def __call__(self, row: Conversation) -> Encoded:
        encoded = self.answers(row)
        if not encoded.samples:
            return encoded
        # Rendered without the answer: the template can write other tokens before an answer than before a generation.
        prompt = encode_prompt(self.answers.template, row.prompt()).input_ids
        # The row counts with the longer of its answer and a completion, so that batches of both kinds fit into memory.
        length = max(encoded.length, len(prompt) + self.max_completion_length)
        encoded = replace(encoded, length=length, reserved=length - encoded.length)
        if length > self.max_length:
            return replace(encoded, samples=())
        (sample,) = encoded.samples
        return replace(encoded, samples=(sample.with_extras(**{PROMPT: tuple(prompt.tolist())}),))


def make_encoder(args: GkdArgs, tokenizer: PreTrainedTokenizerBase, hf_model: HfModel) -> Encoder:
    """Return the encoder of rows. If every step trains on completions, rows need no answers."""
    template = ChatTemplate(tokenizer, args.loss_scale, hf_model.config["vocab_size"])
    if args.lmbda == 1:
        return PromptEncoder(template, args.max_length, args.truncation_strategy, args.max_completion_length)
    answers = ConversationEncoder(template, args.max_length, args.truncation_strategy)
    return AnsweredPromptEncoder(answers, args.max_completion_length if args.lmbda else 0)


def load_rows(args: GkdArgs, encoder: Encoder, vocab_size: int) -> Data:
    """Load the rows. Held-out rows have a loss, unless every step trains on completions."""
    if args.lmbda:
        check_servers(args)
    if isinstance(encoder, PromptEncoder):
        return load_prompts(args, encoder, vocab_size)
    return load_data(args, encoder, vocab_size, vars(args).keys() - {"truncation_strategy"})


@dataclass
class Distillation:
    """The micro-batches of a run.

    Attributes:
        weights: the current weights of the run.
        engine: generates completions on the first rank; None on other ranks, and if all completions are read.
        sampling: sampling settings without `numbers`.
        files: the stored completions.
    """

    run: Run
    args: GkdArgs
    weights: LiveWeights
    engine: Engine | None
    sampling: Sampling
    files: GenerationFiles
    resources: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def sampler(self) -> Sampler:
        """Selects the rows of each step."""
        return Sampler(len(self.run.rows), self.args.global_batch_size, self.args.seed, self.args.dataset_shuffle)

    def train(self, step: int) -> RolloutBatches:
        """Return this rank's micro-batches of a step (counted from 0). Collective.

        Raises:
            UserError: the engine fails, or stored completions cannot be used; raised on every rank.
        """
        rows, indices = self.run.rows, self.sampler.global_batch(step)
        figures: Mapping[str, float] = {"on_policy": 0.0}
        if is_on_policy(self.args, step):
            generation = self._open(step, [prompt_of(self.run.data.train[index]) for index in indices])
            rows, figures = self.run.batches.rows(generation.samples()), {"on_policy": 1.0, **generation.figures}
            indices = np.arange(len(rows))
        batches = self.run.batches.global_batch(rows, indices)
        return RolloutBatches(batches.batches, batches.companions, figures)

    def sources_of(self, step: int) -> list[str]:
        """Return the rows of a step (counted from 0)."""
        return self.run.rows.sources(self.sampler.global_batch(step))

    def _policy(self, step: int) -> dict[str, str]:
        """Return the identity of the policy that generates the completions of a step."""
        # Steps on answers have no file: their effect on the weights follows from the rows and the options.
        before = next((each for each in reversed(range(step)) if is_on_policy(self.args, each)), -1)
        return self.files.policy_after(self.files.load_if_whole(before))

    def _read(self, step: int, prompts: Sequence[Sample]) -> Generation | None:
        """Return the stored completions of a step; None if they must be generated.

        Raises:
            UserError: the file is damaged, or belongs to other prompts or options.
        """
        generation = self.files.read(step, partial(self._policy, step))
        if generation is not None:
            self.files.check(step, generation, prompts)
        return generation

    def _open(self, step: int, prompts: Sequence[Sample]) -> Generation:
        """Return the completions of a step; the weights are those before it. Collective."""
        # Read on one rank and sent, because machines of other ranks may not have the directory.
        if stored := on_first_rank(lambda: self._read(step, prompts)):
            return stored

        with EarlyStop() as stop:
            send_weights(self.weights, self.engine, stop, draft=drafts(self.run, self.args))

            def draw_and_write() -> Generation:
                assert self.engine is not None
                described = {**self.files.settings, NAME: self._policy(step)}
                with stop.raising():
                    generation = draw(self.engine, self.sampling, prompts, step * len(prompts), described)
                    rest(self.engine)
                self.files.write_drawn(step, generation)
                return generation

            return on_first_rank(draw_and_write)


def prompt_of(sample: Sample) -> Sample:
    """Return the prompt of a row as a sample without labels.

    With `--lmbda 1`, samples are prompts; otherwise, they have answers, and their prompts are extras.
    """
    ids = np.array(sample.extras.get(PROMPT, sample.input_ids), np.int32)
    return make_sample(ids, np.zeros(len(ids)), sample.source)


def check_stored(files: GenerationFiles, args: GkdArgs, num_steps: int) -> None:
    """Check that the completions of --rollouts_from suffice.

    Raises:
        UserError: the completions of a step are missing.
    """
    for step in on_policy_steps(args, num_steps):
        if files.file(step).exists():
            continue
        problem = f"--rollouts_from {files.directory} has no completions of step {step + 1} of {num_steps}"
        inner = files.directory / FOLDER
        if inner.is_dir():
            raise UserError(problem, f"use --rollouts_from {inner}")
        raise UserError(problem, "use the --lmbda and --seed of its run, and at most as many --train_iters")


def open_distillation(run: Run) -> TrainBatches:
    """Start the engine on the first rank, if completions are generated. Collective.

    Raises:
        UserError: the engine or the stored completions cannot be used.
    """
    args: Any = run.args
    assert isinstance(args, GkdArgs)
    files = GenerationFiles(run, args, ("temperature", "max_completion_length"))
    with ExitStack() as stack:
        # A list instead of a result, because results of `on_first_rank` are sent to all ranks.
        engines: list[Engine] = []

        def start() -> None:
            if files.reads_only:
                check_stored(files, args, run.schedule.steps)
            elif on_policy_steps(args, run.schedule.steps):
                engines.append(start_rollout_engine(run, args))
                stack.callback(engines[0].close)

        on_first_rank(start)
        steps = Distillation(
            run=run,
            args=args,
            weights=live_weights(run),
            engine=engines[0] if engines else None,
            sampling=sampling_of(run, args),
            files=files,
            resources=stack.pop_all(),
        )
    return TrainBatches(steps.train, sources_of=steps.sources_of, release=steps.resources.close)


def distillation_objective(run: Run) -> DistillationObjective:
    """Return the objective of a run, with its teacher. Collective.

    Raises:
        UserError: the teacher cannot be opened.
    """
    args: Any = run.args
    assert isinstance(args, GkdArgs)
    model = run.teacher_model
    assert model is not None
    layout = teacher_layout(args, model.family.architecture(model.config))
    sizes = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    # In the layout of the trained model, both predictions are on the same ranks.
    is_distant = sizes != (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    teacher = (DistantTeacher if is_distant else Teacher).open(run, model, layout)
    return DistillationObjective(run.plan.heads, args.mtp_loss_scaling_factor, teacher=teacher, beta=args.beta)


GKD = Training(
    make_encoder=make_encoder,
    load=load_rows,
    prepare=check_tokenizer,
    make_objective=distillation_objective,
    open_batches=open_distillation,
)
