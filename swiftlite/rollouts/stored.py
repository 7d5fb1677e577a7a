"""Read and write the generations of a run: files that are numbered in the order in which they are drawn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.answers import token_texts
from swiftlite.args.rl_fields import CompletionArgs
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.image_inputs import images_of
from swiftlite.data.sample import Sample
from swiftlite.families.index import image_sizes
from swiftlite.plan.facts import run_checkpoints
from swiftlite.report.run_files import NUM_ROLLOUTS
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.policy_identity import PolicyIdentity, is_drawn_by
from swiftlite.train.phases import Run
from swiftlite.train.stopping import Stopped

FOLDER = "rollouts"


@dataclass
class GenerationFiles:
    """The generations of a run, or of another run that it reads (`--rollouts_from`), by number.

    Only the first rank reads and writes them.

    Attributes:
        names: options that must be those of the run that drew the completions.
        steps: number of steps for which each generation is used.
        lag: number of generations between the one that is trained on and the one that is drawn (--async_rollouts).
    """

    run: Run
    args: CompletionArgs
    names: Sequence[str]
    steps: int = 1
    lag: int = 0

    @property
    def directory(self) -> Path:
        """The directory of the generations: that of the run, or of another one (--rollouts_from)."""
        if self.args.rollouts_from:
            return Path(self.args.rollouts_from)
        return self.run.output_dir / FOLDER

    @property
    def reads_only(self) -> bool:
        """Whether the generations are those of another run."""
        return bool(self.args.rollouts_from)

    @property
    def settings(self) -> dict[str, Any]:
        """The options in `names`, which each generation stores."""
        return {name: getattr(self.args, name) for name in self.names}

    def file(self, number: int) -> Path:
        """Return the file of a generation."""
        return self.directory / f"{number:06d}.safetensors"

    def load_if_whole(self, number: int) -> Generation | None:
        """Return a generation; None if it is missing or damaged."""
        path = self.file(number)
        try:
            return Generation.load(path) if path.exists() else None
        except UserError:
            return None

    @cached_property
    def _identity(self) -> PolicyIdentity:
        return PolicyIdentity(self.run)

    def policy_after(self, previous: Generation | None) -> dict[str, str]:
        """Return the identity of the policy that draws the generation after `previous`."""
        return self._identity.before(previous)

    def read(self, number: int, policy: Callable[[], dict[str, str]] | None) -> Generation | None:
        """Return a stored generation; None if it must be drawn.

        Args:
            policy: returns the identity of the policy that would draw it; a generation of this run that another policy
                drew is not used. None: any policy of this run can have drawn it.

        Raises:
            UserError: the file is damaged.
        """
        path = self.file(number)
        # A missing generation of another run is an error, which `load` raises.
        if not self.reads_only and not path.exists():
            return None
        generation = Generation.load(path, self._hint)
        if policy is None or self.reads_only or is_drawn_by(generation, policy(), path):
            return generation
        return None

    def write_drawn(self, number: int, generation: Generation) -> None:
        """Write a new generation and, with `--rollouts_total_limit`, delete old ones."""
        args = self.args
        self.write(number, generation)
        if args.rollouts_total_limit:
            self._remove_old(args.rollouts_total_limit)

    def write(self, number: int, generation: Generation) -> None:
        """Write a generation."""
        sizes = image_sizes(self.run.hf_model.config)
        write_generation(self.file(number), generation, self.run.tokenizer, sizes and sizes.image_token_id)

    def _remove_old(self, limit: int) -> None:
        """Delete the oldest stored generations.

        A run that resumes from its newest checkpoint needs the generation of its next step, all later ones, and the one
        before it, from which the identity of its policy follows. With --async_rollouts, the identity follows from the
        one before that.

        Example: with checkpoint-10 and 4 steps per generation, step 11 trains on generation 2, counted from 0.

        Args:
            limit: how many of the newest generations to keep.
        """
        done = 0
        if checkpoints := run_checkpoints(self.run.output_dir):
            done = int(checkpoints[-1].name.removeprefix("checkpoint-"))
        numbers = sorted(int(path.stem) for path in self.directory.glob("*.safetensors") if path.stem.isdigit())
        # Without a checkpoint `done` is 0, and every generation is needed.
        num_unneeded = sum(number < done // self.steps for number in numbers) - 1 - self.lag
        for number in numbers[: max(min(num_unneeded, len(numbers) - limit), 0)]:
            path = self.file(number)
            # The file that marks a generation as complete is deleted last.
            path.with_suffix(".jsonl").unlink(missing_ok=True)
            path.unlink()

    @property
    def _hint(self) -> str:
        """Hint of the error that a file is damaged."""
        return "copy the directory again" if self.reads_only else "delete it and the files after it, and use --resume"

    def check(self, number: int, generation: Generation, prompts: Sequence[Sample]) -> None:
        """Check that a stored generation belongs to this run.

        Args:
            prompts: the prompt of each completion.

        Raises:
            UserError: it belongs to other prompts or options.
        """
        path, vocab_size = self.file(number), self.run.hf_model.config["vocab_size"]
        if len(generation) != len(prompts):
            flags = "--global_batch_size"
            if "num_generations" in self.names:
                flags += " and --steps_per_generation"
            problem = f"{path} has {len(generation)} completions, not {len(prompts)}"
            raise UserError(problem, f"use the {flags} of its run")
        expected = np.concatenate([prompt.input_ids for prompt in prompts])
        if not np.array_equal(generation.prompt_ids, expected):
            raise UserError(f"{path} has completions of other prompts", "use the --dataset and --seed of its run")
        # Digests instead of paths, so that a moved dataset is accepted and a changed image is not.
        stored = generation.images or [()] * len(generation)
        for found, prompt in zip(stored, prompts, strict=True):
            images = images_of(prompt)
            if [digest for _, digest in found] != [image.sha256 for image in images]:
                problem = f"{path} has completions of a prompt with other images, {prompt.source}"
                raise UserError(problem, "restore them")
        for name, value in self.settings.items():
            if generation.settings.get(name) != value:
                problem = f"{path} was drawn with --{name} {generation.settings.get(name)}, not {value}"
                raise UserError(problem, "use the options of its run")
        if generation.completion_lengths.max() > self.args.max_completion_length:
            raise UserError(f"{path} has completions longer than --max_completion_length", self._hint)
        if generation.completion_ids.min() < 0 or generation.completion_ids.max() >= vocab_size:
            raise UserError(f"{path} has tokens outside of the vocabulary", "use the --model of its run")
        logger.info("read %s: %d completions", path, len(generation))


def write_generation(
    path: Path, generation: Generation, tokenizer: PreTrainedTokenizerBase, image_token_id: int | None = None
) -> None:
    """Write the generation: first a file for readers, then the file that marks it as complete.

    Args:
        image_token_id: the placeholder token of images, if the model supports images.
    """
    path.parent.mkdir(exist_ok=True)
    atomic_write(path.with_suffix(".jsonl"), _readable(generation, tokenizer, image_token_id).encode())
    generation.save(path)


def _readable(generation: Generation, tokenizer: PreTrainedTokenizerBase, image_token_id: int | None) -> str:
    """Return one JSON line per completion.

    Completions that are shown on the page of a run also have their tokens, and which of them are accepted drafts, if
    the engine reported it.
    """
    lines = []
    completions = generation.completions()
    depths, masks = generation.depths(), generation.masks()
    for number, sample in enumerate(generation.samples()):
        prompt_ids = sample.input_ids[: generation.prompt_lengths[number]]
        # An image has a placeholder for each output of the tower. One of them is kept.
        is_repeated = (prompt_ids == image_token_id) & (np.roll(prompt_ids, 1) == image_token_id)
        scores = generation.scores[number].tolist()
        line = {
            "prompt": tokenizer.decode(prompt_ids[~is_repeated]),
            "completion": tokenizer.decode(completions[number]),
            "scores": [None if np.isnan(score) else score for score in scores],
            "advantage": float(generation.advantages[number]),
            "is_truncated": bool(generation.is_truncated[number]),
        }
        if generation.images:
            line["images"] = [name for name, _ in generation.images[number]]
        mask = masks[number]
        if number < NUM_ROLLOUTS and (np.array(depths[number])[mask] >= 0).all():
            texts = token_texts(tokenizer, completions[number])
            triples = zip(texts, depths[number], mask, strict=True)
            line["tokens"] = [{"text": text, "depth": depth if ours else -1} for text, depth, ours in triples]
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def check_stored(files: GenerationFiles, number: int) -> None:
    """Check that the generations of --rollouts_from suffice.

    Args:
        number: number of required generations.

    Raises:
        UserError: a generation is missing.
    """
    missing = [index for index in range(number) if not files.file(index).exists()]
    if not missing:
        return
    problem = f"--rollouts_from {files.directory} has {missing[0]} of {number} generations"
    inner = files.directory / FOLDER
    if not missing[0] and inner.is_dir():
        raise UserError(problem, f"use --rollouts_from {inner}")
    hint = f"use --train_iters {missing[0] * files.steps}" if missing[0] else "use those of another run"
    raise UserError(problem, hint)


def on_first_rank(function: Callable[[], Any], answer: Callable[[Any], Any] | None = None) -> Any:
    """Call a function on the first rank, and return its result on every rank. Collective.

    Args:
        answer: what the other ranks call with each request of the function (`ask_other_ranks`).

    Raises:
        UserError: the function raised a UserError, or another error on the first rank; raised on every rank.
        Stopped: the function was stopped; raised on every rank.
    """
    result, told, failure = None, None, None
    if dist.get_rank() == 0:
        try:
            result = function()
        except (UserError, Stopped) as error:
            told = error
        except Exception as error:  # the other ranks must not wait for this one
            failure = error
            told = UserError(f"{type(error).__name__} on the first rank: {error}")
    # The other ranks wait here, and answer in the loop what `function` asks them on the first rank.
    outcome = [None, result, told]
    dist.broadcast_object_list(outcome)
    while outcome[0] is not None:
        assert answer is not None
        answer(outcome[0])
        dist.broadcast_object_list(outcome)
    _, result, told = outcome
    # The first rank raises the error itself, with its traceback.
    raise_if(failure or told)
    return result


def ask_other_ranks(request: Any) -> None:
    """Let the other ranks answer a request, from a function that is called by `on_first_rank`."""
    dist.broadcast_object_list([request, None, None])


def raise_if(error: BaseException | None) -> None:
    """Raise an error if there is one."""
    if error is not None:
        raise error
