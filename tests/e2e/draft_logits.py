"""Compare the draft logits of an engine with those of a reference."""

import torch

from tests.engines.reference import Reference

LOGIT_TOLERANCE = 2e-4
"""Maximum difference of logits, because sums have another order. The largest measured difference is 4e-5."""


def compare_draft_logits(
    reference: Reference, prompt: list[int], row: list[int], found: torch.Tensor, tolerance: float = LOGIT_TOLERANCE
) -> None:
    """Compare the draft logits of each step, in the order of vLLM's steps.

    Args:
        row: greedy continuation of the prompt.
        found: vLLM's logits, [steps, drafts, vocabulary].
    """
    done, steps = 1, 0
    while done < len(row):
        logits = reference.draft_logits(prompt + row[:done], found.size(1))
        torch.testing.assert_close(found[steps], logits, rtol=0, atol=tolerance)
        hits = [draft == token for draft, token in zip(logits.argmax(-1).tolist(), row[done:], strict=False)]
        done += 1 + (*hits, False).index(False)
        steps += 1
    assert len(found) - steps in (0, 1)  # vLLM may draft behind the last token too
