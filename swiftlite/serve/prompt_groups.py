"""Report acceptance by category and by length of prompts, with the names of `vllm bench serve`."""

import math
from collections.abc import Mapping
from typing import Any

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.report.page import Table

Groups = dict[str, tuple[int, DraftCounts]]
"""Number of prompts and draft counts by group."""
_LARGEST = 5  # 2^5 thousand tokens, the longest prompts of SPEED-Bench


def length_group(num_tokens: int) -> str:
    """Return the power of two that is nearest to a prompt's length in units of 1024 tokens, such as "8k"; "short" below
    0.7k.
    """
    power = round(math.log2(max(num_tokens, 1) / 1024))
    if power < 0:
        return "short"
    return f"{2 ** min(power, _LARGEST)}k"


def by_length(group: str) -> int:
    """Return a key that sorts the results of `length_group`."""
    return 0 if group == "short" else int(group.removesuffix("k"))


def add_to(groups: Groups, name: str, num_prompts: int, counts: DraftCounts) -> None:
    """Add prompts and their draft counts to a group."""
    number, before = groups.get(name, (0, DraftCounts(0, 0, ())))
    groups[name] = (number + num_prompts, before + counts)


def groups_to_json(groups: Groups) -> dict[str, Any]:
    """Return the metrics of each group; rates are in percent, as in `vllm bench serve`."""
    found = {}
    for name, (num_prompts, counts) in groups.items():
        found[name] = {
            "num_prompts": num_prompts,
            "spec_decode_acceptance_rate": 100 * counts.accepted / max(counts.drafted, 1),
            "spec_decode_acceptance_length": 1 + counts.accepted / max(counts.drafts, 1),
            "spec_decode_num_drafts": counts.drafts,
            "spec_decode_draft_tokens": counts.drafted,
            "spec_decode_accepted_tokens": counts.accepted,
            "spec_decode_per_position_acceptance_rates": [
                accepted / max(counts.drafts, 1) for accepted in counts.accepted_per_position
            ],
        }
    return found


def group_table(title: str, kind: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the result of `groups_to_json`.

    Args:
        kind: what groups are, such as "category".
    """
    depth = max(len(each["spec_decode_per_position_acceptance_rates"]) for each in found.values())
    positions = [f"position {place}" for place in range(1, depth + 1)]
    columns = [kind, "prompts", "drafts", "acceptance length", "acceptance rate", *positions]
    rows = []
    for name, each in found.items():
        rates = [f"{rate:.1%}" for rate in each["spec_decode_per_position_acceptance_rates"]]
        length, rate = each["spec_decode_acceptance_length"], each["spec_decode_acceptance_rate"]
        drafts = str(each["spec_decode_num_drafts"])
        rows.append([name, str(each["num_prompts"]), drafts, f"{length:.2f}", f"{rate:.1f}%", *rates])
    return Table(title, columns, rows)
