"""Write the README.md of a model that is pushed to the hub: base model, data, acceptance, and serving instructions.

Local files are listed by their names only, because their paths are private.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from swiftlite.acceptance.report import ACCEPTANCE_FILE, describe, read_acceptance
from swiftlite.args.data_file import split_sample
from swiftlite.base.errors import clip
from swiftlite.base.heads import MTP, Heads
from swiftlite.bridge.hf_config import DRAFT_FOLDER
from swiftlite.engines.index import ENGINES
from swiftlite.engines.quantization import quantization_of, quantization_words
from swiftlite.export.provenance import Provenance
from swiftlite.families import dflash
from swiftlite.families.drafters import DRAFTERS
from swiftlite.families.resolved import HfModel
from swiftlite.gguf.drafters import DRAFT_ARCHITECTURES
from swiftlite.gguf.write import draft_file_of
from swiftlite.hub.name import HubName


def model_card(
    repository: str,
    provenance: Provenance,
    heads: Heads,
    measured: Path | None,
    quality: Mapping[str, Any] | None = None,
    gguf_file: str = "",
    *,
    drafting_engines: Sequence[str] = (),
    has_draft_folder: bool = False,
) -> str:
    """Return the text of README.md.

    Args:
        drafting_engines: from `engines_that_draft`.
        has_draft_folder: whether vLLM drafts from a folder.
        gguf_file: name of the GGUF file that the repository contains instead of safetensors; "" otherwise.
        heads: heads of the model.
        measured: directory of the run whose acceptance.json, if it exists, describes the exported heads. None if the
            export differs from the end of the run: an earlier checkpoint, heads grafted from another model, or another
            draft vocabulary.
        quality: from `read_quality`; None or empty for a plain model.
    """
    sections = [_front_matter(provenance, heads, gguf_file), f"# {repository}\n", f"{_what_it_is(provenance, heads)}\n"]
    if quality:
        sections += _quantization(quality)
    if measured:
        sections += _acceptance(measured, is_before="method" in (quality or {}).get("quantization", {}))
    if gguf_file:
        sections += _serving_gguf(repository, gguf_file, heads)
    elif has_draft_folder:
        sections += _serving_from_folder(repository, heads, drafting_engines)
    else:
        sections += _serving(repository, heads)
    return "\n".join(sections).rstrip() + "\n"


def read_quality(model: HfModel, quant_method: str | None) -> dict[str, Any]:
    """Return the acceptance.json of a quantized export, or without measurements only its `quantization`; empty for a
    plain model.

    Args:
        quant_method: the method, if the export has quantized the model.
    """
    path = model.directory / ACCEPTANCE_FILE
    if path.is_file():
        return read_acceptance(path)
    described = quantization_of(model)
    if not described:
        return {}
    if quant_method:
        described = {"method": quant_method, **described}
    return {"quantization": described}


def engines_that_draft(model: HfModel) -> list[str]:
    """Return the names of the engines that draft with the drafter of a model; empty for MTP heads."""
    family, kind = model.family, model.heads.kind
    if kind == MTP:
        return []
    able = [info for info in ENGINES.values() if info.drafts_for(family.name, kind)]
    return [info.name for info in able if not info.why_no_drafts(family, model.config)]


def _front_matter(provenance: Provenance, heads: Heads, gguf_file: str) -> str:
    """Return the metadata of README.md that the hub uses for its pages and search."""
    library = "gguf" if gguf_file else "transformers"
    fields: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if isinstance(provenance.model, HubName):
        fields["base_model"] = provenance.model.repository
    datasets = [name.repository for name in provenance.datasets if isinstance(name, HubName)]
    if datasets:
        fields["datasets"] = sorted(set(datasets))
    fields["tags"] = ["swiftlite"]
    if heads.layers and heads.kind == MTP:
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
    if heads.layers and heads.kind != MTP:
        lines.append(f"- Drafter: {heads.kind}, draft tokens per step: {heads.drafts}")
    elif heads.layers:
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


def _quantization(quality: Mapping[str, Any]) -> list[str]:
    """Return the Markdown lines about the quantization, and the table that compares the model with the unquantized one
    if both were measured."""
    described = quality["quantization"]
    lines = ["## Quantization", "", f"Format: {quantization_words(described)}.", ""]
    before = quality.get("baseline")
    if not before:
        return lines
    lines += ["Measured on held-out rows:", "", "| | baseline | quantized |", "|---|---|---|"]
    losses = [f"{each['trunk']['loss']:.4f}" for each in (before, quality)]
    agreement = f"{quality['trunk']['top1_agreement']:.1%}"
    lines += [_row("loss of the trunk, nats per token", *losses)]
    lines += [_row("trunk predicts the same token as the baseline's", "", agreement)]
    pairs = zip(*(each["teacher_forced"]["acceptance_per_depth"] for each in (before, quality)), strict=False)
    for depth, shares in enumerate(pairs, start=1):
        lines.append(_row(f"head {depth} predicts the same token as its trunk", *(f"{share:.1%}" for share in shares)))
    counts = {"simulated decoding": [each["replayed"] for each in (before, quality)]}
    for engine, own in quality.get("engines", {}).items():
        counts[describe(engine)] = [before.get("engines", {}).get(engine, {}), own]
    for name, both in counts.items():
        if any(each.get("drafted") for each in both):
            lines.append(_row(f"accepted drafts, {name}", *map(_accepted, both)))
    if "activation_bits" in described:
        bits = described["activation_bits"]
        lines += ["", f"Engines also round activations to {bits} bits, which only the counts of an engine include."]
    return [*lines, ""]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _accepted(counts: Mapping[str, Any]) -> str:
    """Return the accepted drafts of draft counts as text; empty without drafts."""
    if not counts.get("drafted"):
        return ""
    return f"{counts['accepted']} of {counts['drafted']} ({counts['acceptance_rate']:.1%})"


def _acceptance(run: Path, is_before: bool) -> list[str]:
    """Return the Markdown lines of the acceptance table: before and after training, and for each engine.

    Args:
        is_before: whether the run's model was quantized after the measurement.
    """
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
    which = ""
    if is_before:
        which = " before the quantization"
    lines = ["## Acceptance", "", f"Accepted drafts on held-out prompts{which}, greedy decoding:", ""]
    lines += ["| | prompts | accepted of drafted | tokens per step |", "|---|---|---|---|"]
    for name, counts in rows:
        length = f"{counts['mean_accepted_length']:.2f}"
        lines.append(_row(name, str(counts["prompts"]), _accepted(counts), length))
    return [*lines, ""]


def _serving(repository: str, heads: Heads) -> list[str]:
    if not heads.layers or heads.kind != MTP:
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


def _serving_from_folder(repository: str, heads: Heads, engines: Sequence[str]) -> list[str]:
    drafter = DRAFTERS[heads.kind]
    speculative: dict[str, Any] = {"method": drafter.vllm_method or heads.kind, "model": f"model/{DRAFT_FOLDER}"}
    speculative["num_speculative_tokens"] = heads.drafts
    needed = "vLLM has the draft class; swiftlite does not have to be installed."
    if drafter.needs_plugin:
        needed = "vLLM requires swiftlite in its environment, whose plugin contains the draft class."
    elif heads.kind == dflash.DSPARK:
        needed += " On a CPU it does: its plugin runs DSpark in vLLM's older model runner."
    lines = [
        "## Serving",
        "",
        f"Drafts do not change answers, because the trunk verifies them. {needed}",
        "",
        f"    hf download {repository} --local-dir model",
        f"    vllm serve model --speculative-config '{json.dumps(speculative)}'",
    ]
    if engines:
        lines += ["", "With swiftlite, these engines draft with it:", ""]
    return lines + [f"    swiftlite deploy --model model --infer_backend {name}" for name in engines]


def _serving_gguf(repository: str, file: str, heads: Heads) -> list[str]:
    lines = ["## Serving", "", f"    hf download {repository} {file} --local-dir ."]
    if not heads.layers:
        return [*lines, f"    llama-server -m {file}"]
    if heads.kind != MTP:
        draft, method = draft_file_of(Path(file)).name, DRAFT_ARCHITECTURES[heads.kind].method
        return [
            lines[0],
            "",
            f"    hf download {repository} {file} {draft} --local-dir .",
            f"    llama-server -m {file} --model-draft {draft} --spec-type draft-{method} "
            f"--spec-draft-n-max {heads.drafts}",
        ]
    return [
        *lines,
        f"    llama-server -m {file} --spec-type draft-mtp --spec-draft-n-max {heads.drafts}",
        "",
        "The file contains the Multi-Token Prediction heads. Drafts do not change answers, because the trunk verifies "
        "them. The architecture in the file is one in which llama.cpp drafts with heads and which computes this model.",
    ]
