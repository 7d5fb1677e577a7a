"""Fix the sampling of vLLM's older model runner on a CPU without Triton (vllm-project/vllm#55005).

- Verification of drafts: vLLM 0.32 repeats each request's temperature, top-k and top-p for the request's draft tokens
  with a Triton kernel (v1/sample/rejection_sampler.py:612). The fallback without Triton writes into a copy and leaves
  the result uninitialized, so drafts are verified with arbitrary values.
- Top-k: in a step in which no request has draft tokens, such as the first step of a request, vLLM computes the largest
  top-k of no tokens (v1/sample/ops/topk_topp_sampler.py:529), which raises an error that ends the server.
- Seeds: vLLM samples drafts without the generators of the requests (v1/spec_decode/llm_base_proposer.py:1852). It also
  moves the generator of a request whose prompt is not yet processed back (v1/worker/gpu_model_runner.py:3502), which
  generators of a CPU do not support; the error ends the server.
- `logprob_token_ids`: vLLM does not support this option when it verifies drafts (v1/sample/rejection_sampler.py:230),
  and ends with an error if another request of the same step has `logprobs`. The plugin refuses the option, as vLLM
  refuses `min_p`.

Without the replacements, tests/e2e/test_cpu_sampling.py and tests/e2e/test_sampling_options.py fail.
"""

from collections.abc import Callable
from typing import Any

import torch

from swiftlite.engines.vllm.replace import replace

_LOWEST_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy sampling, as in vLLM."""


class StepGenerator(torch.Generator):
    """The random numbers of one request for one step.

    They depend only on the request's seed and on its number of tokens, so nothing needs to be moved back if the step
    was a part of the prompt: the next step has the same number of tokens, and therefore the same random numbers.
    """

    def get_offset(self) -> int:
        """Return 0; vLLM computes the offset to move to from it."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Do nothing."""


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    For example, x = [0.7, 0, 1] with cu_num_tokens = [2, 2, 5] becomes [0.7, 0.7, 1, 1, 1]: the second request has no
    draft tokens.

    Args:
        x: [requests].
        cu_num_tokens: [requests], the end of each request's draft tokens.
        num_tokens: number of draft tokens of all requests.
        replace_from: value of x that is replaced by `replace_to`, such as the temperature 0 of greedy requests.

    Returns:
        [num_tokens], in the dtype of x.
    """
    first = cu_num_tokens.new_zeros(1)
    expanded = x.repeat_interleave(cu_num_tokens.diff(prepend=first).long(), output_size=num_tokens)
    return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)


def unless_empty(apply_top_k_top_p: Callable[..., torch.Tensor], logits: torch.Tensor, *others: Any) -> torch.Tensor:
    """Mask logits by top-k and top-p as vLLM does, for any number of rows; return [rows, vocabulary]."""
    if logits.size(0) == 0:
        return logits
    return apply_top_k_top_p(logits, *others)


def sample_drafts(
    logits: torch.Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one draft for each request, with the request's generator if it has a seed.

    Args:
        logits: [requests, vocabulary]; changed in place.
        sampling_metadata: temperature and generators of the requests.

    Returns:
        The drafts, [requests], and the distributions that they were sampled from, [requests, vocabulary].
    """
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    # One batch can have greedy and sampled requests; division by 0 would make NaN of the former.
    is_greedy = sampling_metadata.temperature < _LOWEST_TEMPERATURE
    temperature = torch.where(is_greedy, 1.0, sampling_metadata.temperature)
    probabilities = logits.div_(temperature.unsqueeze(1)).softmax(dim=-1, dtype=torch.float32)
    # A copy, because vLLM divides in place and drafts are verified with the probabilities.
    drawn = random_sample(probabilities.clone(), sampling_metadata.generators, use_fp64_gumbel)
    return torch.where(is_greedy, probabilities.argmax(dim=-1), drawn), probabilities


def with_step_generators(sample: Callable[..., Any], runner: Any, *arguments: Any) -> Any:
    """Sample the tokens of a step with a new generator for each request with a seed, which its drafts use too."""
    batch = runner.input_batch
    for index in batch.generators:
        seed = runner.requests[batch.req_ids[index]].sampling_params.seed
        generator = StepGenerator()
        # Python's hash of numbers, unlike that of strings, is the same in every process.
        generator.manual_seed(hash((seed, int(batch.num_tokens_no_spec[index]))))
        batch.generators[index] = generator
    return sample(runner, *arguments)


def refusing_token_ids(validate: Callable[..., None], params: Any, speculative_config: Any) -> None:
    """Check a request for an engine with drafts as vLLM does, and refuse `logprob_token_ids`.

    The server answers VLLMValidationError with status 400.
    """
    from vllm.exceptions import VLLMValidationError

    validate(params, speculative_config)
    if speculative_config is not None and params.logprob_token_ids:
        raise VLLMValidationError("logprob_token_ids is not supported with speculative decoding on a CPU")


def install() -> None:
    """Replace vLLM's functions; repeated calls have no effect."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens  # type: ignore[assignment]
    llm_base_proposer.compute_probs_and_sample_next_token = sample_drafts
    replace(rejection_sampler, "apply_top_k_top_p", unless_empty)
    replace(GPUModelRunner, "_sample", with_step_generators)
    replace(SamplingParams, "_validate_spec_decode", refusing_token_ids)
