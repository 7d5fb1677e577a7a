"""Rules of vLLM's own options."""

from collections.abc import Iterator
from typing import Any

from swiftlite.args.config import Problem


def speculative_tokens_are_given_once(args: Any) -> Iterator[Problem]:
    if args.num_speculative_tokens is not None and args.vllm_speculative_config is not None:
        yield (
            "--num_speculative_tokens and --vllm_speculative_config both say how many tokens to draft",
            'leave the first out, and write {"num_speculative_tokens": ...} in the second',
        )


RULES = (speculative_tokens_are_given_once,)
