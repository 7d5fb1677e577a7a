"""Join drafts from the text (`engines/ngram.py`) with those of the heads, in vLLM's older model runner.

vLLM 0.32 has one drafter per engine: heads draft a tensor of a fixed width, n-grams a list of any length for each
request. With `additional_config={"swiftlite_ngrams": {...}}`,

- the heads draft at most `head_tokens` tokens, although `num_speculative_tokens`, for which vLLM reserves space, is the
  largest number of drafts from the text;
- before the drafts are handed to the scheduler, those of a request whose text matches are replaced. The scheduler
  accepts lists of different lengths, as it does from vLLM's own n-gram drafter. The next step of the heads computes the
  keys of all accepted tokens, so it does not matter who drafted them;
- where drafts are verified with the probabilities that they were sampled from, a draft from the text has probability 1;
- accepted drafts from the text are counted, because vLLM's metrics do not state who drafted. The counts are the result
  of the workers' method `swiftlite_ngram_counts`.

A step of the older runner (v1/worker/gpu_model_runner.py) calls the replaced methods in this order: verify the last
drafts (`_get_spec_decode_draft_probs`), draft with the heads (`propose`), store the tokens (`_bookkeeping_sync`), hand
the drafts to the scheduler (`take_draft_token_ids`). The text ends with the tokens of the step only in the last call.
With asynchronous scheduling, vLLM counted 422 drafts in a run where the transformers engine made 214, so
`engines/vllm/options.py` disables it. Without the replacements, tests/e2e/test_ngrams.py fails.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from typing import Any

import torch

from swiftlite.acceptance.counts import SourceCounts
from swiftlite.engines.ngram import Ngrams
from swiftlite.engines.vllm.replace import replace

NAME = "swiftlite_ngrams"
"""Key of the settings in vLLM's `additional_config`."""
_HEAD_TOKENS = "head_tokens"


def settings_of(ngrams: Ngrams, head_tokens: int) -> dict[str, Any]:
    """Return the value of `additional_config`.

    Args:
        head_tokens: number of tokens that the heads draft.
    """
    return {NAME: asdict(ngrams) | {_HEAD_TOKENS: head_tokens}}


def _given(vllm_config: Any) -> dict[str, Any] | None:
    """Return a copy of the settings of an engine; None if only the heads draft."""
    found = vllm_config.additional_config
    if isinstance(found, Mapping) and NAME in found:
        return dict(found[NAME])
    return None


def head_tokens(vllm_config: Any) -> int:
    """Return the number of tokens that the heads draft."""
    number = vllm_config.speculative_config.num_speculative_tokens
    settings = _given(vllm_config)
    return number if settings is None else min(number, settings[_HEAD_TOKENS])


def with_head_tokens(
    propose: Callable[..., torch.Tensor], proposer: Any, *others: Any, num_speculative_tokens: int, **named: Any
) -> torch.Tensor:
    """Draft with the heads as vLLM does, but only their own number of tokens; return drafts, [requests, tokens]."""
    # A draft schedule can ask for fewer tokens than the heads draft, or for none.
    number = min(num_speculative_tokens, head_tokens(proposer.vllm_config))
    return propose(proposer, *others, num_speculative_tokens=number, **named)


def with_ngrams(take_draft_token_ids: Callable[..., Any], runner: Any) -> Any:
    """Return the `DraftTokenIds` of all requests for the scheduler, with drafts from the text where it matches."""
    found = take_draft_token_ids(runner)
    settings = _given(runner.vllm_config)
    # Of this step only: the next verification treats drafts of other requests as sampled by the heads.
    runner.swiftlite_ngram_requests = set()
    if found is None or settings is None:
        return found
    del settings[_HEAD_TOKENS]
    ngrams = Ngrams(**settings)
    batch = runner.input_batch
    for place, request in enumerate(found.req_ids):
        index = batch.req_id_to_index.get(request)
        if index is None or not found.draft_token_ids[place]:  # the heads do not draft at this load
            continue
        # `num_tokens_no_spec` is the length without drafts, which vLLM stores behind the text in the same row.
        text = batch.token_ids_cpu[index, : batch.num_tokens_no_spec[index]]
        is_drawn = bool(batch.temperature_cpu[index] > 0)
        if drafts := ngrams.propose(text, is_drawn=is_drawn):
            found.draft_token_ids[place] = drafts
            runner.swiftlite_ngram_requests.add(request)
    return found


def draft_probabilities(runner: Any, metadata: Any) -> torch.Tensor | None:
    """Return the probabilities [drafts of all requests, vocabulary] that drafts are verified with.

    This is vLLM's `_get_spec_decode_draft_probs` for requests of which some have drafts from the text.

    Returns:
        None if all drafts are certain.
    """
    known, requests = runner._draft_probs, runner._draft_prob_req_ids
    if known is None or requests is None:
        return None
    # The heads drafted in the order of the last step; requests may have changed their rows since.
    places = {request: place for place, request in enumerate(requests)}
    parts, first = [], 0
    for request, number in zip(runner.input_batch.req_ids, metadata.num_draft_tokens, strict=True):
        if not number:
            continue
        drafts = metadata.draft_token_ids[first : first + number].long()
        first += number
        if request in _ngram_requests(runner):
            parts.append(torch.nn.functional.one_hot(drafts, known.size(-1)).to(known.dtype))
        else:
            parts.append(known[places[request], :number])
    return torch.cat(parts).contiguous() if parts else None


def with_certain_drafts(stock: Callable[..., torch.Tensor | None], runner: Any, metadata: Any) -> torch.Tensor | None:
    """Return vLLM's probabilities of drafts for engines without n-grams, otherwise `draft_probabilities`."""
    if _given(runner.vllm_config) is None:
        return stock(runner, metadata)
    return draft_probabilities(runner, metadata)


def with_counts(bookkeeping_sync: Callable[..., Any], runner: Any, scheduler_output: Any, *others: Any) -> Any:
    """Store the tokens of a step as vLLM does, and count accepted drafts from the text.

    vLLM's result contains the tokens of each request: accepted drafts and one more.
    """
    found = bookkeeping_sync(runner, scheduler_output, *others)
    if _given(runner.vllm_config) is None:
        return found
    tokens_of_requests, requests = found[3], found[5]  # valid_sampled_token_ids, req_ids_output_copy of 0.32
    for request, tokens in zip(requests, tokens_of_requests, strict=True):
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(request)
        # A request has no tokens while its prompt is processed in parts.
        if drafts and tokens and request in _ngram_requests(runner):
            counted = SourceCounts(1, len(drafts), len(tokens) - 1)
            runner.swiftlite_ngram_counts = ngram_counts(runner) + counted
    return found


def ngram_counts(runner: Any) -> SourceCounts:
    """Return the counts of drafts from the text since the start."""
    return getattr(runner, "swiftlite_ngram_counts", SourceCounts())


def _ngram_requests(runner: Any) -> set[str]:
    """Return the requests whose last drafts came from the text."""
    return getattr(runner, "swiftlite_ngram_requests", set())


def install() -> None:
    """Replace vLLM's methods; repeated calls have no effect."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    replace(SpecDecodeBaseProposer, "propose", with_head_tokens)
    replace(GPUModelRunner, "take_draft_token_ids", with_ngrams)
    replace(GPUModelRunner, "_get_spec_decode_draft_probs", with_certain_drafts)
    replace(GPUModelRunner, "_bookkeeping_sync", with_counts)
    Worker.swiftlite_ngram_counts = lambda worker: astuple(ngram_counts(worker.model_runner))  # type: ignore[attr-defined]
