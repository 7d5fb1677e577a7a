"""Write the README.md of a model that is pushed to the hub: base model, data, acceptance, and serving instructions.

Local files are listed by their names only, because their paths are private.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from swiftlite.acceptance.report import ACCEPTANCE_FILE, read_acceptance
from swiftlite.args.data_file import split_sample
from swiftlite.errors import clip
from swiftlite.export.provenance import Provenance
from swiftlite.heads import Heads
from swiftlite.hub.name import HubName


def model_card(repository: str, provenance: Provenance, heads: Heads, measured: Path | None) -> str:
    """Return the text of README.md.

    Args:
        heads: heads of the model.
        measured: directory of the run whose acceptance.json, if it exists, describes the exported heads. None if the
            export differs from the end of the run: an earlier checkpoint, heads grafted from another model, or another
            draft vocabulary.
    """
    sections = [_front_matter(provenance, heads), f"# {repository}\n", f"{_what_it_is(provenance, heads)}\n"]
    if measured:
        sections += _acceptance(measured)
    sections += _serving(repository, heads)
    return "\n".join(sections).rstrip() + "\n"


def _front_matter(provenance: Provenance, heads: Heads) -> str:
    """Return the metadata of README.md that the hub uses for its pages and search."""
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if isinstance(provenance.model, HubName):
        fields["base_model"] = provenance.model.repository
    datasets = [name.repository for name in provenance.datasets if isinstance(name, HubName)]
    if datasets:
        fields["datasets"] = sorted(set(datasets))
    fields["tags"] = ["swiftlite"]
    if heads.layers:
        fields["tags"] += ["multi-token-prediction", "speculative-decoding"]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _what_it_is(provenance: Provenance, heads: Heads) -> str:
    """Return lines about the model, the data, the steps and the heads, one for each."""
    lines = [f"- Base model: {_shown(provenance.model, provenance.commits)}"]
    data = ", ".join(_shown(name, provenance.commits) for name in provenance.datasets)
    lines.append(f"- Data: {data or 'random tokens'}")
    steps = f"- Steps: {provenance.steps}"
    if provenance.heads_only:
        steps += ", only the heads; the trunk is unchanged"
    lines.append(steps)
    if heads.layers:
        lines.append(f"- Multi-Token Prediction heads: depth {heads.layers}, draft tokens per step: {heads.drafts}")
    else:
        lines.append("- Multi-Token Prediction heads: none")
    return "\n".join(lines)


def _shown(name: HubName | str, commits: Mapping[str, str]) -> str:
    if isinstance(name, str):
        return f"`{clip(Path(split_sample(name)[0]).name, 100)}`"
    path = name.repository
    if name.kind == "dataset":
        path = f"datasets/{path}"
    link = f"[{name}](https://huggingface.co/{path})"
    if commit := commits.get(name.key):
        link += f" at commit `{commit}`"
    return link


def _acceptance(run: Path) -> list[str]:
    """Return the Markdown lines of the acceptance table: before and after training, and for each engine."""
    path = run / ACCEPTANCE_FILE
    if not path.is_file():
        return []
    content = read_acceptance(path)
    measured = {when: content[when]["generated"] for when in ("before", "after") if when in content}
    named = {"before": "before training", "after": "after training"}
    rows = [(named[when], counts) for when, counts in measured.items() if counts["drafted"]]
    rows += [(f"after training, {engine}", counts) for engine, counts in content.get("engines", {}).items()]
    if not rows:
        return []
    lines = ["## Acceptance", "", "Accepted drafts on held-out prompts, greedy decoding:", ""]
    lines += ["| | prompts | accepted of drafted | tokens per step |", "|---|---|---|---|"]
    for name, counts in rows:
        share = f"{counts['accepted']} of {counts['drafted']} ({counts['acceptance_rate']:.1%})"
        lines.append(f"| {name} | {counts['prompts']} | {share} | {counts['mean_accepted_length']:.2f} |")
    return [*lines, ""]


def _serving(repository: str, heads: Heads) -> list[str]:
    if not heads.layers:
        return ["## Serving", "", f"    vllm serve {repository}"]
    config = json.dumps({"method": "mtp", "num_speculative_tokens": heads.drafts})
    steps = f"--speculative-num-steps {heads.drafts} --speculative-num-draft-tokens {heads.drafts + 1}"
    return [
        "## Serving",
        "",
        "Drafts do not change answers, because the trunk verifies them. If the family is published without heads, the "
        "engine requires swiftlite in its environment, whose plugin contains the draft class.",
        "",
        "    # vLLM",
        f"    vllm serve {repository} --speculative-config '{config}'",
        "    # SGLang",
        f"    python -m sglang.launch_server --model-path {repository} --speculative-algorithm NEXTN \\",
        f"        --speculative-eagle-topk 1 {steps}",
        "    # either of them, with flags derived from the checkpoint",
        f"    swiftlite deploy --model {repository} --infer_backend vllm",
        "    # transformers, with drafts by swiftlite (transformers itself loads only the trunk)",
        f"    swiftlite infer --model {repository} --infer_backend transformers --speculative mtp",
    ]
