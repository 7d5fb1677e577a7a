"""`swiftlite megatron pt`: a run as in `sft.py`, over plain text."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import HeldOut, Prompt
from swiftlite.args.commands import PtArgs
from swiftlite.data.encoder import DocumentEncoder, Encoder
from swiftlite.data.sample import Sample
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases, sft

PROMPT_TOKENS = 64
"""Most tokens of a held-out document that are given, to be continued for acceptance.json."""


def run(args: PtArgs, after_step: phases.AfterStep | None = None) -> int:
    """Learn from documents; returns 0, or 128 plus the number of the signal that stopped the run (a checkpoint was
    saved).

    Args:
        after_step: as for `sft.run`.
    """
    with phases.open_session(args) as mesh, phases.claim_output_dir(args):
        prepared = prepare(args, mesh)
        state = phases.restore(prepared)
        trainer = sft.make_trainer(prepared, state, after_step)
        outcome = phases.fit(prepared, trainer, state["step"], make_held_out(prepared))
        return phases.finish(prepared, outcome)


def prepare(args: PtArgs, mesh: Mesh) -> phases.Run:
    """As `sft.prepare`."""
    return sft.prepare(args, mesh, make_document_encoder)


def make_document_encoder(args: PtArgs, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Encoder:
    """The encoder of rows with plain text."""
    return DocumentEncoder(tokenizer, vocab_size, args.max_length, args.truncation_strategy, args.append_eos)


def make_held_out(run: phases.Run) -> HeldOut:
    """The beginnings of the first held-out documents, for acceptance.json."""
    firsts = first_pieces(run.data.val)[: run.args.acceptance_samples]
    prompts = []
    for sample in firsts:
        token_ids = sample.input_ids[: min(PROMPT_TOKENS, len(sample) // 2)].tolist()
        prompts.append(Prompt(token_ids, str(run.tokenizer.decode(token_ids)), sample.channel or ""))
    eos: Any = run.tokenizer.eos_token_id
    return sft.held_out(run, prompts, (eos,))


def first_pieces(samples: Sequence[Sample]) -> list[Sample]:
    """Of each document the first sample; its others follow it."""
    by_source: dict[str, Sample] = {}
    for sample in samples:
        by_source.setdefault(sample.source, sample)
    return list(by_source.values())
