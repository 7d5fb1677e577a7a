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
    """The text of README.md.

    Args:
        heads: those of the model.
        measured: directory of the run that trained these very heads, with acceptance.json if it has measured any; None
            where they are another's, or draft other tokens than they did there.
    """
    sections = [
        _front_matter(provenance, heads),
        f"# {repository}\n",
        f"{_what_it_is(provenance, heads)}\n",
        *(_acceptance(measured) if measured else ()),
        *_serving(repository, heads),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _front_matter(provenance: Provenance, heads: Heads) -> str:
    """Metadata for the hub's pages and search."""
    fields: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if isinstance(provenance.model, HubName):
        fields["base_model"] = provenance.model.repository
    datasets = [name.repository for name in provenance.datasets if isinstance(name, HubName)]
    if datasets:
        fields["datasets"] = sorted(set(datasets))
    fields["tags"] = ["swiftlite", "multi-token-prediction", "speculative-decoding"] if heads.layers else ["swiftlite"]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _what_it_is(provenance: Provenance, heads: Heads) -> str:
    """Model, data and heads, a line each."""
    lines = [f"- Base model: {_shown(provenance.model, provenance.commits)}"]
    data = ", ".join(_shown(name, provenance.commits) for name in provenance.datasets)
    lines.append(f"- Data: {data or 'random tokens'}")
    trained = ", of the heads alone: the trunk is unchanged" if provenance.heads_only else ""
    lines.append(f"- Steps: {provenance.steps}{trained}")
    if heads.layers:
        drafts = f"{heads.drafts} token{'s' if heads.drafts > 1 else ''}"
        lines.append(f"- Multi-Token Prediction heads: depth {heads.layers}, which draft {drafts} a step")
    else:
        lines.append("- Multi-Token Prediction heads: none")
    return "\n".join(lines)


def _shown(name: HubName | str, commits: Mapping[str, str]) -> str:
    if isinstance(name, str):
        return f"`{clip(Path(split_sample(name)[0]).name, 100)}`"
    folder = "datasets/" if name.kind == "dataset" else ""
    commit = commits.get(name.key)
    at = f" at commit `{commit}`" if commit else ""
    return f"[{name}](https://huggingface.co/{folder}{name.repository}){at}"


def _acceptance(run: Path) -> list[str]:
    """The tables of acceptance.json: by the run itself, before and after, and by the engines that served it."""
    path = run / ACCEPTANCE_FILE
    if not path.is_file():
        return []
    content = read_acceptance(path)
    measured = {when: content[when]["generated"] for when in ("before", "after") if when in content}
    named = {"before": "before training", "after": "after training"}
    rows = [(named[when], counts) for when, counts in measured.items() if counts["drafted"]]
    rows += [(f"after training, by {engine}", counts) for engine, counts in content.get("engines", {}).items()]
    if not rows:
        return []
    lines = ["## Acceptance", "", "Drafts accepted on held-out prompts, greedy:", ""]
    lines += ["| | prompts | accepted of drafted | tokens a step |", "|---|---|---|---|"]
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
        "Drafts change no answer: the trunk verifies each of them. Where the family is published without heads, the "
        "engine needs swiftlite installed beside it, whose plugin brings the class that drafts.",
        "",
        "    # vLLM",
        f"    vllm serve {repository} --speculative-config '{config}'",
        "    # SGLang",
        f"    python -m sglang.launch_server --model-path {repository} --speculative-algorithm NEXTN \\",
        f"        --speculative-eagle-topk 1 {steps}",
        "    # either, with the flags that the checkpoint asks for",
        f"    swiftlite deploy --model {repository} --infer_backend vllm",
        "    # transformers, which drafts through swiftlite and loads the trunk alone by itself",
        f"    swiftlite infer --model {repository} --infer_backend transformers --speculative mtp",
    ]
