"""Implement `megatron pt`: the next-token loss over plain text."""

from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import Prompt
from swiftlite.args.commands import PtArgs
from swiftlite.data.encoder import DocumentEncoder, Encoder
from swiftlite.data.sample import Sample
from swiftlite.families.resolved import HfModel
from swiftlite.train.methods.next_token import next_token_objective
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run

PROMPT_TOKENS = 64
"""Maximum number of tokens at the beginning of a held-out document that are used as a prompt for acceptance.json."""


def make_document_encoder(args: PtArgs, tokenizer: PreTrainedTokenizerBase, hf_model: HfModel) -> Encoder:
    """Return the encoder of rows with plain text."""
    vocab_size = hf_model.config["vocab_size"]
    return DocumentEncoder(tokenizer, vocab_size, args.max_length, args.truncation_strategy, args.append_eos)


def document_prompts(run: Run) -> tuple[Sequence[Prompt], Collection[int | None]]:
    """Return the beginnings of the first held-out documents, and the token that ends a document."""
    firsts = first_pieces(run.data.val)[: run.args.acceptance_samples]
    prompts = []
    for sample in firsts:
        # At most half of the document, so that something follows that can be predicted.
        token_ids = sample.input_ids[: min(PROMPT_TOKENS, len(sample) // 2)].tolist()
        prompts.append(Prompt(token_ids, str(run.tokenizer.decode(token_ids)), sample.channel or ""))
    eos: Any = run.tokenizer.eos_token_id
    return prompts, (eos,)


def first_pieces(samples: Sequence[Sample]) -> list[Sample]:
    """Return the first sample of each document. A long document consists of several samples."""
    by_source: dict[str, Sample] = {}
    for sample in samples:
        by_source.setdefault(sample.source, sample)
    return list(by_source.values())


PT = Training(
    make_encoder=make_document_encoder,
    make_objective=next_token_objective,
    held_out_prompts=document_prompts,
)
