"""Compute log-probabilities under the reference model once, before the first step, and store them on disk.

A frozen model gives the same log-probabilities for a pair in every epoch. Therefore the reference model is opened
before training, on a mesh with its own parallel layout, scores the pairs of all training steps, and is closed. Each
pair gets two log-probabilities, one per answer. They are stored on disk under the sha256 of the pair's tokens and
images, so that resumed runs and other runs read exactly the same values.

Pairs are scored in slices. After each slice, all ranks synchronize and the scores are written to disk. Ranks outside
the reference model's mesh therefore wait for at most one slice at a time, and a killed run loses at most one slice.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.log import logger
from swiftlite.bridge.tensors import describe
from swiftlite.data.batch import Batch
from swiftlite.data.changed_samples import ChangedSamples
from swiftlite.data.image_inputs import IMAGE_EXTRAS
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample, digest
from swiftlite.families.resolved import HfModel
from swiftlite.model.forward import forward_step_of
from swiftlite.model.gpt import GPTModel, Losses
from swiftlite.model.open import open_model
from swiftlite.model.ranks import broadcast_from_mesh
from swiftlite.plan.preference import reference_layout
from swiftlite.runtime import agreement
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from swiftlite.train.methods.frozen import batches_of, mesh_of, with_same_images
from swiftlite.train.methods.preference import log_probabilities_of
from swiftlite.train.methods.separate import values_of
from swiftlite.train.phases import Run

FLAG = "--ref_logprobs_cache"
FILE = "reference.safetensors"
SLICES = "reference-*.safetensors"
"""Names of the files of a run that has not scored all its pairs yet, one per slice."""
SLICE_PAIRS, SLICE_TOKENS = 1000, 1_000_000
"""Maximum number of pairs and approximate maximum number of tokens of a slice. Even at 2,000 tokens/s a slice takes
less than ten minutes.
"""
Answers = dict[str, tuple[float, float]]
"""The log-probabilities of the preferred and the rejected answer of pairs, by the digest of the pair."""


@dataclass(frozen=True)
class Reference:
    """A reference model, which is opened when it is needed.

    Attributes:
        mesh: the ranks on which the model is opened.
        batches: splits rows over the ranks of `mesh`.
        directory: directory of the stored log-probabilities.
    """

    model: HfModel
    torch_dtype: str
    mesh: Mesh
    batches: Batches
    directory: Path

    def score(self, num_pairs: int, pair_at: Callable[[int], Sample]) -> np.ndarray:
        """Return the log-probabilities of both sequences of each pair, float64 [num_pairs, 2].

        Collective; each rank passes all pairs.

        Args:
            pair_at: returns a pair by its number. It is called again when the pair is needed again, so that not all
                pairs are in memory.

        Raises:
            UserError: the stored log-probabilities belong to another model, are damaged or cannot be written, or the
                model cannot be opened.
        """
        self._check_agreement()  # before ranks share the computation of the digest
        if dist.get_rank() == 0:
            self._check_directory()
        manifest = self._manifest()
        kept: list[Answers] = [{}]
        if dist.get_rank() == 0:
            kept = [self._read(manifest)]
        dist.broadcast_object_list(kept)
        answers = kept[0]
        keys = [digest([pair_at(number)]) for number in range(num_pairs)]
        # By digest, so that pairs that occur several times are scored once.
        missing = {key: number for number, key in enumerate(keys) if key not in answers}
        if missing:
            answers |= self._score(pair_at, missing, manifest)
            if dist.get_rank() == 0:
                self._write_all(answers, manifest)
        return np.array([answers[key] for key in keys], np.float64).reshape(num_pairs, 2)

    def _score(
        self, pair_at: Callable[[int], Sample], missing: Mapping[str, int], manifest: Mapping[str, str]
    ) -> Answers:
        """Return the log-probabilities of some pairs, by digest. Collective over all ranks.

        The pairs are scored in slices.

        Args:
            missing: the numbers of these pairs, by digest.
        """
        logger.info("the reference model %s scores %d samples", self.model.name, len(missing))
        chunks = self.open()
        answers: Answers = {}
        for keys, pairs in slices(pair_at, missing):
            # On ranks outside of the mesh, memory for the broadcast.
            numbers = torch.zeros(len(keys), 2, device=self.mesh.device.torch_device)
            if self.mesh.is_here:
                numbers = log_probabilities(chunks, self.mesh, self.batches, pairs)
            found = broadcast_from_mesh(numbers, self.mesh).tolist()
            scored = {key: (chosen, rejected) for key, (chosen, rejected) in zip(keys, found, strict=True)}
            answers |= scored
            if dist.get_rank() == 0:
                self._write(self._next_slice(), scored, manifest)
            logger.info("the reference model has scored %d of %d samples", len(answers), len(missing))
        return answers

    def _check_agreement(self) -> None:
        """Check that all ranks have the same reference model; collective over all ranks.

        Raises:
            UserError: the models differ.
        """
        tensors = agreement.digest(describe(self.model.directory))
        agreement.check_agreement({"tensors of --ref_model": tensors, "commit of --ref_model": self.model.identity})

    def open(self) -> list[GPTModel]:
        """Return the reference model's stages on this rank, empty outside of `mesh`; collective over the ranks of
        `mesh`.

        Raises:
            UserError: the model cannot be opened.
        """
        if not self.mesh.is_here:
            return []
        dtype = getattr(torch, self.torch_dtype)
        with self.mesh.active():
            kernels = self.batches.plan.kernels
            chunks, _ = open_model(self.model, self.mesh, dtype=dtype, heads=Heads(), kernels=kernels)
        return chunks

    def _manifest(self) -> dict[str, str]:
        """Return everything that the log-probabilities depend on except the pairs, by name. Collective."""
        return {"model": shared_digest_of(self.model.directory), "torch_dtype": self.torch_dtype}

    def _check_directory(self) -> None:
        """Create the directory if it does not exist, and check its content.

        Raises:
            UserError: the directory contains other files, or cannot be written.
        """
        check_writable(FLAG, self.directory)
        if any(self.directory.iterdir()) and not self._files():
            raise UserError(f"{FLAG} {self.directory} is not empty, and has no {FILE}", _ANOTHER)

    def _files(self) -> list[Path]:
        """Return the files that contain stored log-probabilities."""
        files = sorted(self.directory.glob(SLICES))
        whole = self.directory / FILE
        if whole.exists():
            files.insert(0, whole)
        return files

    def _read(self, manifest: Mapping[str, str]) -> Answers:
        """Return the stored log-probabilities.

        Raises:
            UserError: the stored log-probabilities belong to another model or are damaged.
        """
        answers: Answers = {}
        for path in self._files():
            try:
                with safe_open(path, "pt") as file:
                    found = json.loads(file.metadata()["manifest"])
                    digests, numbers = file.get_tensor("digests"), file.get_tensor("log_probabilities")
                keys = [row.tobytes().hex() for row in digests.numpy()]
                answers |= {
                    key: (chosen, rejected) for key, (chosen, rejected) in zip(keys, numbers.tolist(), strict=True)
                }
                differing = [name for name, value in manifest.items() if found.get(name) != value]
            except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError):
                raise UserError(f"{path} is damaged", "delete it; its log-probabilities are computed again") from None
            if differing:
                raise UserError(f"{FLAG} {self.directory} was written with another {', '.join(differing)}", _ANOTHER)
        return answers

    def _next_slice(self) -> Path:
        # A killed run leaves slices, which must not be overwritten.
        names = {path.name for path in self.directory.glob(SLICES)}
        numbers = (SLICES.replace("*", f"{number:06d}") for number in itertools.count())
        return self.directory / next(name for name in numbers if name not in names)

    def _write(self, path: Path, answers: Mapping[str, tuple[float, float]], manifest: Mapping[str, str]) -> None:
        # Digests are not stored as metadata: 1.4 million of them exceed the maximum header.
        digests = np.frombuffer(bytes.fromhex("".join(answers)), np.uint8).reshape(len(answers), -1)
        tensors = {
            # Copied, because `frombuffer` returns read-only memory, which torch does not support.
            "digests": torch.from_numpy(digests.copy()),
            "log_probabilities": torch.tensor(list(answers.values()), dtype=torch.float32),
        }
        atomic_write(path, save(tensors, {"manifest": json.dumps(dict(manifest))}))

    def _write_all(self, answers: Mapping[str, tuple[float, float]], manifest: Mapping[str, str]) -> None:
        """Write all log-probabilities into one file, and delete the files of slices."""
        slices = sorted(self.directory.glob(SLICES))
        # Before the slices are deleted: a run that is killed in between finds every score at least once.
        self._write(self.directory / FILE, answers, manifest)
        for path in slices:
            path.unlink()


_ANOTHER = "use another directory; or delete this one, if nothing else needs it"


def slices(
    pair_at: Callable[[int], Sample], numbers: Mapping[str, int]
) -> Iterator[tuple[Sequence[str], Sequence[Sample]]]:
    """Divide pairs into slices of at most `SLICE_PAIRS` pairs and about `SLICE_TOKENS` tokens; yield the digests and
    the pairs of each slice.

    Args:
        pair_at: returns a pair by its number.
        numbers: the numbers of the pairs, by digest.
    """
    keys: list[str] = []
    pairs: list[Sample] = []
    num_tokens = 0
    for key, number in numbers.items():
        keys.append(key)
        pairs.append(pair_at(number))
        num_tokens += sum(map(len, pairs[-1].sequences))
        if len(keys) == SLICE_PAIRS or num_tokens >= SLICE_TOKENS:
            yield keys, pairs
            keys, pairs, num_tokens = [], [], 0
    if keys:
        yield keys, pairs


def log_probabilities(
    chunks: Sequence[GPTModel], mesh: Mesh, batches: Batches, pairs: Sequence[Sample]
) -> torch.Tensor:
    """Return log-probabilities [len(pairs), 2] of the answers on all ranks of the mesh; collective over the mesh.

    Each pair is a separate micro-batch, so that its scores do not depend, bit for bit, on other pairs. A resumed run
    with another number of steps scores other pairs, and must get the same values.

    Args:
        chunks: the model's stages on this rank.
        batches: splits rows over the ranks of `mesh`.
    """

    def score(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_p_N, _ = log_probabilities_of(losses.main.loss_BS, batch, mesh)
        return log_p_N.sum(), torch.ones((), dtype=torch.int32, device=log_p_N.device), log_p_N

    return values_of(chunks, mesh, batches, pairs, [2] * len(pairs), forward_step_of(score)).view(-1, 2)


def score_with_reference(
    run: Run, pair_of: Callable[[Sample], Sample], scored: Callable[[Sample, float, float], Sample]
) -> Run:
    """Score the run's samples with the reference model, and return the run with these scores in its samples.

    Collective.

    Args:
        pair_of: returns, for a sample, one sample that consists of the two sequences to score.
        scored: returns the given sample with the log-probabilities of its two sequences added.

    Raises:
        UserError: the reference model or its cache cannot be used.
    """
    train, val = run.data.train, run.data.val
    used = samples_of_steps(run)

    def pair_at(number: int) -> Sample:
        sample = train[used[number]] if number < len(used) else val[number - len(used)]
        pair = pair_of(sample)
        # Without values of the method: the key of a pair is the digest of its tokens and images.
        kept = {name: value for name, value in pair.extras.items() if name in IMAGE_EXTRAS}
        return replace(pair, extras=kept)

    scores = open_reference(run).score(len(used) + len(val), pair_at)
    of_train = np.full((len(train), 2), np.nan)  # samples that are not used are not read
    of_train[used] = scores[: len(used)]
    data = replace(
        run.data,
        train=_with_scores(train, of_train, scored),
        val=_with_scores(val, scores[len(used) :], scored),
    )
    return replace(run, data=data, rows=run.batches.rows(data.train))


def _with_scores(
    samples: Sequence[Sample], scores: np.ndarray, scored: Callable[[Sample, float, float], Sample]
) -> ChangedSamples:
    """Return the samples with their log-probabilities [len(samples), 2], which `scored` adds when a sample is read."""
    return ChangedSamples(samples, lambda number, sample: scored(sample, *scores[number].tolist()))


def samples_of_steps(run: Run) -> np.ndarray:
    """Return the indices of the training samples that the steps of the run use, int64."""
    num_rows, batch_size = len(run.rows), run.plan.global_batch_size
    # A whole epoch uses all samples.
    if run.schedule.steps * batch_size >= num_rows:
        return np.arange(len(run.data.train))
    sampler = Sampler(num_rows, batch_size, run.args.seed, run.args.dataset_shuffle)
    rows = np.concatenate([sampler.global_batch(step) for step in range(run.schedule.steps)])
    indices = np.concatenate([run.rows.rows[row] for row in rows])
    return np.sort(indices)


def _reference_model(run: Run) -> HfModel:
    """Return the reference model of a run, with a vision tower if the rows of the run have images.

    Raises:
        UserError: the reference model does not divide images as --model does.
    """
    if run.ref_model is None:
        return run.hf_model
    if not run.hf_model.computes_images:
        return run.ref_model
    return with_same_images(run.ref_model, run.hf_model, "--ref_model")


def open_reference(run: Run) -> Reference:
    """Return the reference model, with a mesh for its layout. The mesh can exclude the last ranks. Collective.

    Raises:
        UserError: the reference model does not support the images of the run.
    """
    args: Any = run.args
    model = _reference_model(run)
    mesh = mesh_of(run, model, reference_layout(args))
    return Reference(
        model=model,
        torch_dtype=args.torch_dtype,
        mesh=mesh,
        batches=batches_of(run, mesh),
        directory=Path(args.ref_logprobs_cache or run.output_dir / "reference"),
    )
