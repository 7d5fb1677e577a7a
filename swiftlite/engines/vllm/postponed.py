"""Postpone the steps of heads that draft nothing, in vLLM's older model runner on a CPU.

With a draft schedule, vLLM 0.32 runs the head in every step, also where the schedule drafts nothing because there are
many requests: a later step that drafts attends to the head's keys of all tokens (`propose` in
v1/spec_decode/llm_base_proposer.py). On a CPU, where starting a step of the head costs more than its matmuls, this took
8 to 15 % of the time of SmolLM2-135M with 16 and 4 requests.

Here a step without drafts stores the inputs of the head instead. The head computes the keys of up to `MOST_STEPS` such
steps in one call: before the next step that drafts or has prompts in it, and when that many are stored. What drafts see
is the same as in vLLM:

    step                1    2    3   ...  15   16        17   18 (drafts)
    requests           16   16   16        16   16        16   1
    vLLM runs head on  16   16   16        16   16        16   1 token(s)
    here               -    -    -         -    16 x 16   -    1 + 1 token(s)

Keys of up to `MOST_STEPS` tokens stay missing if a request ends before they are computed, and a later prompt begins
with its answer, whose blocks vLLM finds in the prefix cache; and if vLLM does not schedule a request in the step in
which they are computed. This costs accepted drafts, but changes no answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch

from swiftlite.engines.vllm.replace import replace

MOST_STEPS = 16
"""Maximum number of stored steps. The cost of a call is shared by this many steps; more of them save little."""


@dataclass(frozen=True)
class Step:
    """The inputs of the head for one token of each request.

    Attributes:
        requests: ids of the requests, in the order of the rows.
        tokens: the trunk's input tokens, [requests].
        positions: their positions, [requests].
        states: the trunk's final states, [requests, hidden size].
        slots: places of the keys in the head's cache, [requests].
    """

    requests: Sequence[str]
    tokens: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor


@dataclass
class Postponed:
    """The stored steps of an engine.

    Attributes:
        requests: ids of the requests of the current step, in the order of its rows.
        steps: the stored steps, oldest first.
    """

    requests: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens of all requests."""
        return sum(len(step.requests) for step in self.steps)

    def rows(self) -> dict[str, list[int]]:
        """Return, by request, the rows of its tokens in the concatenated steps, in the order of their positions.

        Steps of the requests [a, b] and [b] have the rows {a: [0], b: [1, 2]}. Tokens before a gap are omitted: vLLM
        runs no head in a step in which another request has nearly reached the maximum length.
        """
        found: dict[str, list[int]] = {}
        last: dict[str, int] = {}
        row = 0
        for step in self.steps:
            for request, position in zip(step.requests, step.positions.tolist(), strict=True):
                # Attention takes a request's rows for its last positions, without a gap: of 7, 8 and 10, only 10 stays.
                if last.get(request) != position - 1:
                    found[request] = []
                found[request].append(row)
                last[request] = position
                row += 1
        return found

    def forget(self, requests: Sequence[str]) -> None:
        """Drop the stored tokens of requests whose cache was taken away; their tokens are computed again."""
        gone = set(requests)
        self.steps = [_without(step, gone) for step in self.steps]


def _without(step: Step, gone: set[str]) -> Step:
    """Return a step without the rows of some requests."""
    kept = [row for row, request in enumerate(step.requests) if request not in gone]
    if len(kept) == len(step.requests):
        return step
    requests = [step.requests[row] for row in kept]
    return Step(requests, step.tokens[kept], step.positions[kept], step.states[kept], step.slots[kept])


def can_postpone(proposer: Any, num_drafts: int, inputs: Mapping[str, Any]) -> bool:
    """Return whether the head's step can be computed later: it drafts nothing, and has one token of each request.

    Args:
        num_drafts: number of tokens that the step drafts.
        inputs: the other arguments of vLLM's `propose`.
    """
    metadata = inputs["common_attn_metadata"]
    parallel = proposer.vllm_config.parallel_config
    return (
        num_drafts == 0
        and proposer.device.type == "cpu"
        and parallel.data_parallel_size == 1  # ranks run the head in the same steps
        and metadata.max_query_len == 1  # the step also verifies no drafts
        and inputs["target_positions"].dim() == 1  # with images, positions have three rows
        and inputs.get("mm_embed_inputs") is None
        and not proposer.needs_extra_input_slots  # drafters whose inputs are not the trunk's tokens
    )


def postponing(
    propose: Callable[..., torch.Tensor], proposer: Any, *, num_speculative_tokens: int, **inputs: Any
) -> torch.Tensor:
    """Draft with the heads as vLLM does, but postpone steps without drafts; return drafts, [requests, tokens]."""
    postponed: Postponed | None = getattr(proposer, "swiftlite_postponed", None)
    if postponed is None:  # a step that vLLM makes before the first request
        return propose(proposer, num_speculative_tokens=num_speculative_tokens, **inputs)
    # Before this step, whose drafts attend to the keys of all earlier tokens.
    if not can_postpone(proposer, num_speculative_tokens, inputs):
        _compute(proposer, propose, postponed, inputs, _first_tokens(inputs))
        return propose(proposer, num_speculative_tokens=num_speculative_tokens, **inputs)
    # One token of each request (`can_postpone`), so rows are requests.
    number = len(postponed.requests)
    if postponed.num_tokens + number > proposer.hidden_states.shape[0]:  # the space of one call
        _compute(proposer, propose, postponed, inputs, _first_tokens(inputs))
    postponed.steps.append(
        Step(
            list(postponed.requests),
            inputs["target_token_ids"].clone(),  # vLLM writes the next step into the same memory
            inputs["target_positions"].clone(),
            inputs["target_hidden_states"].clone(),
            inputs["common_attn_metadata"].slot_mapping[:number].clone(),
        )
    )
    # The stored tokens include those of this step, so they are followed by the tokens that it has just sampled.
    if len(postponed.steps) >= MOST_STEPS:
        _compute(proposer, propose, postponed, inputs, inputs["next_token_ids"])
    # As the replaced method does; the runner would take probabilities of earlier drafts for those of this step.
    proposer.num_speculative_tokens, proposer._last_draft_probs = 0, None
    return torch.empty(number, 0, dtype=torch.int64)


def _first_tokens(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the first input token of each request in the current step, which follows its stored tokens."""
    # The head reads the next token at each position (llm_base_proposer.py: set_inputs_first_pass rotates the ids):
    # after the last stored one, this is the token that this step starts with.
    firsts = inputs["common_attn_metadata"].query_start_loc_cpu[:-1].long()
    return inputs["target_token_ids"][firsts]


def _compute(
    proposer: Any,
    propose: Callable[..., torch.Tensor],
    postponed: Postponed,
    inputs: Mapping[str, Any],
    following: torch.Tensor,
) -> None:
    """Let the head compute the stored tokens of the requests in the current step, and forget all stored tokens.

    Args:
        following: the token after the stored ones, for each request of the current step, [requests].
    """
    rows_of = postponed.rows()
    places = [place for place, request in enumerate(postponed.requests) if request in rows_of]
    # Also drops the tokens of requests that are not in this step: their blocks may belong to other requests by now.
    steps, postponed.steps = postponed.steps, []
    if not places:
        return
    rows_by_place = [rows_of[postponed.requests[place]] for place in places]
    rows = torch.tensor(list(chain.from_iterable(rows_by_place)))
    begins = torch.tensor([0, *accumulate(map(len, rows_by_place))], dtype=torch.int32)
    positions = torch.cat([step.positions for step in steps])[rows]
    metadata = _metadata(inputs["common_attn_metadata"], places, begins, positions)
    metadata.slot_mapping = torch.cat([step.slots for step in steps])[rows]
    # With 0 tokens, vLLM runs the head, which writes its keys, and returns before it samples.
    propose(
        proposer,
        num_speculative_tokens=0,
        target_token_ids=torch.cat([step.tokens for step in steps])[rows],
        target_positions=positions,
        target_hidden_states=torch.cat([step.states for step in steps])[rows],
        next_token_ids=following[places],
        token_indices_to_sample=None,
        common_attn_metadata=metadata,
        sampling_metadata=inputs["sampling_metadata"],
    )


def _metadata(current: Any, places: list[int], begins: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return vLLM's metadata of the stored tokens.

    Args:
        current: metadata of the current step.
        places: the requests of the current step that have stored tokens.
        begins: begin of each request in the stored tokens, and the end, [requests + 1].
        positions: positions of the stored tokens, [tokens].
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    # Of the last stored token of each request, which must not attend to later slots of its blocks.
    seq_lens = (positions[begins[1:].long() - 1] + 1).to(current.seq_lens.dtype)
    return CommonAttentionMetadata(
        query_start_loc=begins,
        query_start_loc_cpu=begins,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(places),
        num_actual_tokens=len(positions),
        max_query_len=int(begins.diff().max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=current.block_table_tensor[places],
        slot_mapping=current.slot_mapping,
        causal=True,
    )


def naming_requests(
    propose_draft_token_ids: Callable[..., Any], runner: Any, scheduler_output: Any, *others: Any
) -> Any:
    """Tell the drafter the ids of the requests before the model runner drafts; return the drafts of all requests."""
    # Here and not in `propose`, which gets no ids of requests, only rows.
    postponed = getattr(runner.drafter, "swiftlite_postponed", None)
    if postponed is None:
        postponed = runner.drafter.swiftlite_postponed = Postponed()
    postponed.forget(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
    postponed.requests = runner.input_batch.req_ids.copy()
    return propose_draft_token_ids(runner, scheduler_output, *others)


def install() -> None:
    """Replace vLLM's methods; repeated calls have no effect."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(SpecDecodeBaseProposer, "propose", postponing)
    replace(GPUModelRunner, "propose_draft_token_ids", naming_requests)
