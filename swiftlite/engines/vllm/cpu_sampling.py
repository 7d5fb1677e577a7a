"""Fix the verification of drafts at temperatures above 0 in vLLM without Triton (vllm-project/vllm#55005).

On a CPU there is no Triton. vLLM 0.32 repeats each request's temperature, top-k and top-p for the request's draft
tokens with a Triton kernel (v1/sample/rejection_sampler.py:612). The fallback without Triton writes into a copy and
leaves the result uninitialized, so drafts are verified with arbitrary values. Without the replacement,
tests/e2e/test_cpu_sampling.py fails.
"""

import torch


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


def install() -> None:
    """Replace vLLM's function; repeated calls have no effect."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens  # type: ignore[assignment]
