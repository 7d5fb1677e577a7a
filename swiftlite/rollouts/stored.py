"""Read and write the generations of a run: files that are numbered in the order in which they are drawn."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.answers import token_texts
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.image_inputs import images_of
from swiftlite.data.sample import Sample
from swiftlite.plan.facts import run_checkpoints
from swiftlite.report.run_files import NUM_ROLLOUTS
from swiftlite.rollouts.generation import Generation
from swiftlite.train.stopping import Stopped

FOLDER = "rollouts"


def load_if_whole(path: Path) -> Generation | None:
    """Return a stored generation; None if it is missing or damaged."""
    try:
        return Generation.load(path) if path.exists() else None
    except UserError:
        return None


def first_needed(output_dir: Path, steps: int) -> int:
    """Return the number of the first generation that a run trains on if it resumes from its newest checkpoint.

    Example: with checkpoint-10 and 4 steps per generation, step 11 trains on generation 2, counted from 0.

    Args:
        steps: number of steps for which each generation is used.
    """
    done = 0
    if checkpoints := run_checkpoints(output_dir):
        done = int(checkpoints[-1].name.removeprefix("checkpoint-"))
    return done // steps


def remove_old(directory: Path, limit: int, needed: int) -> None:
    """Delete the oldest stored generations.

    Args:
        limit: how many of the newest generations to keep.
        needed: number of a generation that is kept with all later ones, and with the one before it, from which the
            identity of its policy follows.
    """
    numbers = sorted(int(path.stem) for path in directory.glob("*.safetensors") if path.stem.isdigit())
    num_unneeded = sum(number < needed for number in numbers) - 1
    for number in numbers[: max(min(num_unneeded, len(numbers) - limit), 0)]:
        path = file_of(directory, number)
        path.with_suffix(".jsonl").unlink(missing_ok=True)
        path.unlink()


def hint_for(reads_only: bool) -> str:
    """Return what to do about a damaged file, of this run or of another one."""
    return "copy the directory again" if reads_only else "delete it and the files after it, and use --resume"


def check_generation(
    path: Path,
    generation: Generation,
    prompts: Sequence[Sample],
    settings: Mapping[str, Any],
    vocab_size: int,
    *,
    reads_only: bool,
) -> None:
    """Check that a stored generation belongs to this run.

    Args:
        prompts: the prompt of each completion.
        settings: the options that must be those of the run that drew the completions, by name.
        vocab_size: number of tokens of the model.
        reads_only: whether the file belongs to another run.

    Raises:
        UserError: it belongs to other prompts or options.
    """
    if len(generation) != len(prompts):
        flags = "--global_batch_size"
        if "num_generations" in settings:
            flags += " and --steps_per_generation"
        problem = f"{path} has {len(generation)} completions, not {len(prompts)}"
        raise UserError(problem, f"use the {flags} of its run")
    expected = np.concatenate([prompt.input_ids for prompt in prompts])
    if not np.array_equal(generation.prompt_ids, expected):
        raise UserError(f"{path} has completions of other prompts", "use the --dataset and --seed of its run")
    stored = generation.images or [()] * len(generation)
    for found, prompt in zip(stored, prompts, strict=True):
        images = images_of(prompt)
        if [digest for _, digest in found] != [image.sha256 for image in images]:
            raise UserError(f"{path} has completions of a prompt with other images, {prompt.source}", "restore them")
    for name, value in settings.items():
        if generation.settings.get(name) != value:
            problem = f"{path} was drawn with --{name} {generation.settings.get(name)}, not {value}"
            raise UserError(problem, "use the options of its run")
    if generation.completion_lengths.max() > settings["max_completion_length"]:
        raise UserError(f"{path} has completions longer than --max_completion_length", hint_for(reads_only))
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
    depths = generation.depths()
    for number, sample in enumerate(generation.samples()):
        is_completion = sample.loss_scale > 0
        prompt_ids = sample.input_ids[~is_completion]
        # An image has a placeholder for each output of the tower. One of them is kept.
        is_repeated = (prompt_ids == image_token_id) & (np.roll(prompt_ids, 1) == image_token_id)
        scores = generation.scores[number].tolist()
        line = {
            "prompt": tokenizer.decode(prompt_ids[~is_repeated]),
            "completion": tokenizer.decode(sample.input_ids[is_completion]),
            "scores": [None if np.isnan(score) else score for score in scores],
            "advantage": float(generation.advantages[number]),
            "is_truncated": bool(generation.is_truncated[number]),
        }
        if generation.images:
            line["images"] = [name for name, _ in generation.images[number]]
        if number < NUM_ROLLOUTS and min(depths[number]) >= 0:
            texts = token_texts(tokenizer, completions[number])
            pairs = zip(texts, depths[number], strict=True)
            line["tokens"] = [{"text": text, "depth": depth} for text, depth in pairs]
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def check_stored(directory: Path, number: int, steps: int) -> None:
    """Check that the generations of --rollouts_from suffice.

    Args:
        number: number of required generations.
        steps: number of steps for which each generation is used.

    Raises:
        UserError: a generation is missing.
    """
    missing = [index for index in range(number) if not file_of(directory, index).exists()]
    if not missing:
        return
    problem = f"--rollouts_from {directory} has {missing[0]} of {number} generations"
    inner = directory / FOLDER
    if not missing[0] and inner.is_dir():
        raise UserError(problem, f"use --rollouts_from {inner}")
    raise UserError(problem, f"use --train_iters {missing[0] * steps}" if missing[0] else "use those of another run")


def file_of(directory: Path, number: int) -> Path:
    """Return the file of a generation."""
    return directory / f"{number:06d}.safetensors"


def on_first_rank(function: Callable[[], Any]) -> Any:
    """Call a function on the first rank, and return its result on every rank. Collective.

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
    outcome = [result, told]
    dist.broadcast_object_list(outcome)
    result, told = outcome
    raise_if(failure or told)
    return result


def raise_if(error: BaseException | None) -> None:
    """Raise an error if there is one."""
    if error is not None:
        raise error
