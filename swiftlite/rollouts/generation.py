"""Define `Generation`: the completions of some prompts, with rewards and log-probabilities. Files are safetensors.

A generation is written before it is trained on. A run that resumes reads it again, so that the run does the same steps
whether or not the engine generates the same tokens twice.

Shapes: N completions, P tokens of all prompts, C tokens of all completions, F reward functions. Completions of one
prompt are adjacent. With tools or a rollout function, a completion has all tokens of the conversation after its prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.data.image_inputs import images_of, with_images_of
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.train.methods.policy import ADVANTAGE, ENGINE, OLD, REFERENCE, TEACHER

VERSION = 2
"""Version of files with `is_generated`, which earlier releases would ignore. Other files have version 1."""
_ARRAYS = {
    "prompt_ids": np.int32,
    "prompt_lengths": np.int32,
    "completion_ids": np.int32,
    "completion_lengths": np.int32,
    "is_truncated": np.bool_,
    "scores": np.float32,
    "advantages": np.float32,
    "engine_log_p": np.float32,
    "old_log_p": np.float32,
    "reference_log_p": np.float32,
    "teacher_log_p": np.float32,
    "draft_depths": np.int8,
    "is_generated": np.bool_,
}
_USUAL = {
    "engine_log_p": np.nan,
    "old_log_p": np.nan,
    "reference_log_p": np.nan,
    "teacher_log_p": np.nan,
    "draft_depths": -1,
    "is_generated": True,
}
"""Values of tokens without further information. A file does not contain an array with this value only."""
_PER_TOKEN = {"engine_log_p": ENGINE, "old_log_p": OLD, "reference_log_p": REFERENCE, "teacher_log_p": TEACHER}
"""Extras of samples."""


@dataclass(frozen=True)
class Generation:
    """The completions of one generation.

    Attributes:
        prompt_ids: int32 [P], the prompts of all completions, one after another.
        prompt_lengths: int32 [N].
        completion_ids: int32 [C].
        completion_lengths: int32 [N].
        is_truncated: bool [N]; whether the completion reached the maximum length.
        scores: float32 [N, F]; NaN where a function did not score a completion.
        advantages: float32 [N].
        engine_log_p: float32 [C], log-probabilities that the engine reported; NaN if unknown.
        old_log_p: float32 [C], log-probabilities under the policy that generated the completions, computed by the
            trainer; NaN if the generation is used for one step.
        reference_log_p: float32 [C], log-probabilities under the reference model; NaN without one.
        teacher_log_p: float32 [C], log-probabilities under the teacher; NaN without one.
        draft_depths: int8 [C], position of an accepted draft token in the drafts of its step, counted from 1; 0 for a
            token of the trunk, and -1 if the engine did not report which one it is.
        is_generated: bool [C]; False for tokens of tools and other messages between answers, which have no label, and
            for all tokens of a conversation that failed, which is neither scored nor trained on.
        figures: metrics of the generation by name.
        settings: settings that the completions depend on, by name.
        images: file and sha256 of each image of the prompt of each completion; empty if no prompt has images. Pixels
            are not stored.
    """

    prompt_ids: np.ndarray
    prompt_lengths: np.ndarray
    completion_ids: np.ndarray
    completion_lengths: np.ndarray
    is_truncated: np.ndarray
    scores: np.ndarray
    advantages: np.ndarray
    engine_log_p: np.ndarray
    old_log_p: np.ndarray
    reference_log_p: np.ndarray
    teacher_log_p: np.ndarray
    draft_depths: np.ndarray
    is_generated: np.ndarray
    figures: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Sequence[Sequence[str]]] = ()

    def __len__(self) -> int:
        return len(self.completion_lengths)

    def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompt of each completion."""
        return [self.prompt_ids[prompt].tolist() for prompt in _slices(self.prompt_lengths)]

    def completions(self) -> list[list[int]]:
        """Return the token ids of each completion."""
        return [self.completion_ids[completion].tolist() for completion in _slices(self.completion_lengths)]

    @property
    def generated_lengths(self) -> np.ndarray:
        """Number of generated tokens of each completion, int32 [N]."""
        return np.array([mask.sum() for mask in self.masks()], np.int32)

    def masks(self) -> list[np.ndarray]:
        """Return `is_generated` of each completion."""
        return [self.is_generated[completion] for completion in _slices(self.completion_lengths)]

    def generated(self) -> list[list[int]]:
        """Return the generated token ids of each completion; all ids of a conversation that failed."""
        parts = []
        for ids, mask in zip(self.completions(), self.masks(), strict=True):
            parts.append(np.array(ids)[mask].tolist() if mask.any() else ids)
        return parts

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Return values of the generated tokens, such as log-probabilities of labels, as float32 [C]; NaN elsewhere."""
        result = np.full(len(self.completion_ids), np.nan, np.float32)
        result[self.is_generated] = values
        return result

    def depths(self) -> list[list[int]]:
        """Return `draft_depths` of each completion."""
        return [self.draft_depths[completion].tolist() for completion in _slices(self.completion_lengths)]

    def samples(self, prompts: Sequence[Sample] = ()) -> list[Sample]:
        """Return one sample per completion: its prompt without labels, then its tokens with labels.

        Args:
            prompts: the prompt of each completion, whose images the samples have; default: without images.
        """
        places = _slices(self.prompt_lengths)
        completions = _slices(self.completion_lengths)
        samples = []
        for number, (place, completion) in enumerate(zip(places, completions, strict=True)):
            sample = self._sample(number, self.prompt_ids[place], completion)
            samples.append(with_images_of(sample, prompts[number]) if prompts else sample)
        return samples

    def without_truncated(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of the completions with the labels removed from truncated ones (--overlong_filter)."""
        trained = []
        for sample, is_truncated in zip(samples, self.is_truncated, strict=True):
            if is_truncated:
                # The sample stays, because means over completions count truncated ones, as TRL's
                # mask_truncated_completions does.
                nothing = np.full_like(sample.labels, IGNORED)
                sample = replace(sample, labels=nothing, loss_scale=np.zeros_like(sample.loss_scale))
            trained.append(sample)
        return trained

    def _sample(self, number: int, prompt_ids: np.ndarray, completion: slice) -> Sample:
        ids = np.concatenate([prompt_ids, self.completion_ids[completion]])
        # Tokens of tools are context, but no targets, neither of the policy nor of the heads.
        is_label = np.concatenate([np.zeros(len(prompt_ids), bool), self.is_generated[completion]])
        # One advantage for all generated tokens of a completion: the reward is that of the whole completion.
        extras = {ADVANTAGE.name: np.where(is_label, self.advantages[number], np.float32(0))}
        for name, extra in _PER_TOKEN.items():
            values = np.full(len(ids), extra.default, np.float32)
            values[len(prompt_ids) :] = getattr(self, name)[completion]
            extras[extra.name] = np.where(is_label, values, np.float32(extra.default))
        return Sample(
            ids,
            np.where(is_label, ids, np.int32(IGNORED)),
            is_label.astype(np.float32),
            source=f"completion {number}",
            extras=extras,
        )

    def save(self, path: Path) -> None:
        """Write a file that is complete or absent."""
        arrays = {}
        for name, dtype in _ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype)
            # Most runs have no teacher, reference or tools: four bytes less per token for each array of NaN.
            if name not in _USUAL or not np.array_equal(array, np.full_like(array, _USUAL[name]), equal_nan=True):
                arrays[name] = array
        header = {
            # The lowest version that can read the file, so that earlier releases read completions without tools.
            "version": VERSION if "is_generated" in arrays else 1,
            "figures": dict(self.figures),
            "settings": dict(self.settings),
            "images": self.images,
        }
        atomic_write(path, save(arrays, {"rollouts": json.dumps(header)}))

    @classmethod
    def load(cls, path: Path, hint: str = "") -> "Generation":
        """Read a file.

        Args:
            hint: what to do about a damaged file.

        Raises:
            UserError: the file cannot be read, or its arrays do not fit together.
        """
        try:
            with safe_open(path, "numpy") as file:
                header = json.loads(file.metadata()["rollouts"])
                if header["version"] not in (1, VERSION):
                    raise ValueError(f"version {header['version']} is not supported")
                names = set(file.keys())
                arrays = {name: file.get_tensor(name) for name in _ARRAYS if name in names or name not in _USUAL}
            for name in _USUAL.keys() - names:
                arrays[name] = np.full(len(arrays["completion_ids"]), _USUAL[name], _ARRAYS[name])
            images = _checked_files(header.get("images", ()))  # absent in files of earlier releases
            generation = cls(**arrays, figures=header["figures"], settings=header["settings"], images=images)
            # Files can come from another run. A wrong length would otherwise only show as tokens of other completions.
            problem = generation._problem()
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise UserError(f"{path} is damaged: {problem}", hint)
        return generation

    def _problem(self) -> str:
        """Return why the arrays do not fit together; "" if they do."""
        for name, dtype in _ARRAYS.items():
            if getattr(self, name).dtype != dtype:
                return f"{name} is {getattr(self, name).dtype}, not {np.dtype(dtype)}"
        number, num_tokens = len(self), len(self.completion_ids)
        sizes = dict.fromkeys(_USUAL, num_tokens)
        sizes |= {"prompt_lengths": number, "is_truncated": number, "advantages": number, "scores": number}
        for name, size in sizes.items():
            if len(getattr(self, name)) != size:
                return f"{name} has {len(getattr(self, name))} entries, not {size}"
        for name, lengths in (("prompt_ids", self.prompt_lengths), ("completion_ids", self.completion_lengths)):
            if number and (lengths.min() < 1 or lengths.sum() != len(getattr(self, name))):
                return f"{name} does not have the stored lengths"
        if self.images and len(self.images) != number:
            return f"images has {len(self.images)} entries, not {number}"
        if not np.isfinite(self.advantages).all():
            return "advantages are not finite"
        return ""


def selected(parts: Sequence[Generation], numbers: Sequence[int] | np.ndarray) -> Generation:
    """Return some completions of several generations, with the figures and settings of the first.

    Args:
        numbers: numbers of completions, which are counted through all parts.
    """
    arrays = {}
    for name in _ARRAYS:
        values = np.concatenate([getattr(part, name) for part in parts])
        lengths = _lengths_of(name)
        if lengths is None:
            arrays[name] = values[numbers]
        else:
            places = _slices(np.concatenate([getattr(part, lengths) for part in parts]))
            arrays[name] = np.concatenate([values[places[number]] for number in numbers])
    images: Sequence[Any] = ()
    if any(part.images for part in parts):
        of_all = list(chain.from_iterable(part.images or [()] * len(part) for part in parts))
        images = [of_all[number] for number in numbers]
    return replace(parts[0], **arrays, images=images)


def _checked_files(images: Sequence[Sequence[Sequence[str]]]) -> list[list[list[str]]]:
    """Return the images of a file.

    Raises:
        TypeError, ValueError: an image is not a name and a digest.
    """
    checked = []
    for of_prompt in images:
        for name, digest in of_prompt:
            bytes.fromhex(digest)
            Path(name)
        checked.append(list(map(list, of_prompt)))
    return checked


def image_files(prompts: Sequence[Sample]) -> list[list[list[str]]]:
    """Return the `Generation.images` of prompts. An image that is part of its row has no file, and the name ""."""
    files = []
    for prompt in prompts:
        images = images_of(prompt)
        files.append([[image.source if isinstance(image.source, str) else "", image.sha256] for image in images])
    return files if any(files) else []


def _lengths_of(name: str) -> str | None:
    """Return the name of the array with the number of entries of each completion; None if it has one entry."""
    if name == "prompt_ids":
        return "prompt_lengths"
    if name == "completion_ids" or name in _USUAL:
        return "completion_lengths"
    return None


def _slices(lengths: np.ndarray) -> list[slice]:
    """Return the place of each part of concatenated parts."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]
