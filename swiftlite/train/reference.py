"""What a reference model says of the pairs of `megatron dpo`: computed once, before the first step, and kept on disk.

A frozen model says the same of a pair in every epoch. So the reference model is opened before training on a mesh with
a layout of its own, asked, and closed; what is left of it is two numbers for each pair, which go with the samples. The
numbers are kept under the sha256 of the pair's tokens, so a run that goes on, or another one, reads the same bits.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from swiftlite.bridge.adapter_files import digest_of
from swiftlite.bridge.tensors import describe
from swiftlite.data.batch import Batch
from swiftlite.data.sample import Sample, digest
from swiftlite.durable import check_writable, write_durably
from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.hub.model import identity_of
from swiftlite.log import logger
from swiftlite.model.forward import forward
from swiftlite.model.gpt import GPTModel, Losses
from swiftlite.model.open import open_model, read_hf_model
from swiftlite.model.pipeline import run_pipeline
from swiftlite.model.ranks import from_last_stage, to_all_ranks
from swiftlite.runtime import agreement
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches import Batches, on_this_rank
from swiftlite.train.preference import score

FLAG = "--ref_logprobs_cache"
FILE = "reference.safetensors"
Answers = dict[str, tuple[float, float]]
"""By the digest of a pair, the log-probabilities of its preferred and its rejected answer."""


@dataclass(frozen=True)
class Reference:
    """A reference model that is not open yet.

    Attributes:
        model: a Hugging Face model, as `read_hf_model` takes it.
        mesh: the ranks that it is opened on.
        batches: cuts rows for them.
        directory: where the numbers are kept.
    """

    model: str
    torch_dtype: str
    mesh: Mesh
    batches: Batches
    directory: Path

    def of(self, pairs: Sequence[Sample]) -> list[Sample]:
        """These pairs with what the reference model says of them; collective over all ranks, each with all pairs.

        Raises:
            UserError: the numbers that are kept are another model's or damaged, or cannot be written; the model cannot
                be opened.
        """
        kept: list[Answers] = [self._read() if dist.get_rank() == 0 else {}]
        dist.broadcast_object_list(kept)
        keys = [digest([pair]) for pair in pairs]
        missing = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in kept[0]}
        if missing:
            logger.info("the reference model %s scores %d pairs", self.model, len(missing))
            chunks = self.open()
            numbers = torch.zeros(len(missing), 2, device=self.mesh.device.torch_device)
            if self.mesh.is_here:
                numbers = log_probabilities(chunks, self.mesh, self.batches, list(missing.values()))
            found = to_all_ranks(numbers, self.mesh).tolist()
            kept[0] |= {key: (chosen, rejected) for key, (chosen, rejected) in zip(missing, found, strict=True)}
            if dist.get_rank() == 0:
                self._write(kept[0])
        return [replace(pair, reference=kept[0][key]) for key, pair in zip(keys, pairs, strict=True)]

    def open(self) -> list[GPTModel]:
        """The model's stages on this rank, none outside its mesh; collective over all ranks of the job.

        Raises:
            UserError: it cannot be opened, or the ranks have different ones.
        """
        hf_model = read_hf_model(self.model)
        tensors = agreement.digest(describe(hf_model.directory))
        commit = identity_of(self.model)
        agreement.check_agreement({"tensors of --ref_model": tensors, "commit of --ref_model": commit})
        if not self.mesh.is_here:
            return []
        dtype = torch.bfloat16 if self.torch_dtype == "bfloat16" else torch.float32
        with self.mesh.active():
            kernels = self.batches.plan.kernels
            chunks, _ = open_model(hf_model, self.mesh, dtype=dtype, heads=Heads(), kernels=kernels)
        return chunks

    def _manifest(self) -> dict[str, str]:
        """What the numbers depend on beside the pairs, by the words in which a difference is reported."""
        return {"model": digest_of(read_hf_model(self.model).directory), "torch_dtype": self.torch_dtype}

    def _read(self) -> Answers:
        """The numbers that are kept; none in a directory that is new, which is made.

        Raises:
            UserError: the directory holds something else or another model's numbers, or cannot be written.
        """
        check_writable(FLAG, self.directory)
        path = self.directory / FILE
        hint = "name another directory; or delete this one, if nothing else needs it"
        if not path.exists():
            if any(self.directory.iterdir()):
                raise UserError(f"{FLAG} {self.directory} is not empty, and has no {FILE}", hint)
            return {}
        try:
            with safe_open(path, "pt") as file:
                found, keys = json.loads(file.metadata()["manifest"]), json.loads(file.metadata()["pairs"])
                numbers = file.get_tensor("log_probabilities").tolist()
            answers = {key: (chosen, rejected) for key, (chosen, rejected) in zip(keys, numbers, strict=True)}
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            raise UserError(f"{path} is damaged", "delete it: its numbers are computed again") from None
        differing = [name for name, value in self._manifest().items() if found.get(name) != value]
        if differing:
            raise UserError(f"{FLAG} {self.directory} was written with another {', '.join(differing)}", hint)
        return answers

    def _write(self, answers: Mapping[str, tuple[float, float]]) -> None:
        numbers = torch.tensor(list(answers.values()), dtype=torch.float32)
        metadata = {"manifest": json.dumps(self._manifest()), "pairs": json.dumps(list(answers))}
        write_durably(self.directory / FILE, save({"log_probabilities": numbers}, metadata))


@torch.no_grad()
def log_probabilities(
    chunks: Sequence[GPTModel], mesh: Mesh, batches: Batches, pairs: Sequence[Sample]
) -> torch.Tensor:
    """Log-probabilities [len(pairs), 2] of both answers of each pair, on every rank of the mesh; collective over these.

    Each pair is a micro-batch of its own, so that its bits do not depend on the pairs beside it: a run that goes on
    with other steps has scored others.

    Args:
        chunks: the model's stages on this rank.
        batches: cuts rows for this mesh.
    """
    firsts = range(0, len(pairs), mesh.dp.size())
    mine = [first + mesh.dp.rank() for first in firsts]  # the last one may be past the end: it is computed as padding
    micro_batches = [batches.collate(pairs[index : index + 1]) for index in mine]
    for chunk in chunks:
        chunk.eval()
    with mesh.active():
        parts = run_pipeline(
            chunks,
            mesh,
            _scoring(mesh),
            [on_this_rank(micro_batches, mesh) for _ in chunks],
            shapes=[batch.position_ids_BS.shape for batch in micro_batches],
            forward_only=True,
        )
    found = torch.zeros(len(pairs), 2, device=mesh.device.torch_device)
    for index, log_p_P2 in zip(mine, parts, strict=False):  # no parts before the last stage
        found[index : index + 1] = log_p_P2
    dist.all_reduce(found, group=mesh.dp)  # each pair has one rank's number, and zeros
    return from_last_stage(found, mesh)


def _scoring(mesh: Mesh) -> Callable:
    """A forward step that gives the log-probabilities [P, 2] of a micro-batch."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
        batch = next(batches)

        def loss_func(losses: Losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            log_p_P2 = score(losses.main.loss_BS, batch, mesh).log_p_P2
            return log_p_P2.sum(), torch.ones((), dtype=torch.int32, device=log_p_P2.device), log_p_P2

        return forward(model, batch), loss_func

    return forward_step
