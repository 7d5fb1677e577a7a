"""Test assistants of Gemma 4 from training to engines: vLLM counts what a reference counts, also without plugins."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import Commands
from tests.e2e.drafted import exported
from tests.e2e.test_drafters import learn_rows
from tests.e2e.test_stock_drafts import NEW_TOKENS, HostWithoutPlugins, check_counts, counts_of_transformers, report_of
from tests.e2e.vllm_here import serve
from tests.engines.gemma4_assistant_reference import (
    CLUSTERS,
    LAYERS,
    AssistantReference,
    classes_for,
    config_for,
    declare,
    make_assistant,
    make_trunk,
    settings_of,
)
from tests.engines.reference import Reference, write_trained
from tests.messages import answers_equal
from tests.tiers import some_of

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
DRAFT_CLASS = "Gemma4MTP"


def write_drafted(directory: Path, family: str) -> list[list[int]]:
    """Write a model whose drafts are often correct, and return prompts."""

    def draft_as(reference: Reference) -> Reference:
        return AssistantReference.of(reference.trunk)

    prompts = write_trained(directory, family, 1, True, 3, draft_as, num_hidden_layers=LAYERS)
    declare(directory, config_for(settings_of(directory)).to_dict())
    return prompts


@pytest.mark.engine
@needs_vllm
def test_counts_of_vllm_without_plugins(vllm_host, tmp_path, mesh):
    """Answers are longer than the window, so that keys before it would change the counts."""
    prompts = write_drafted(tmp_path / "model", "gemma4_text")
    directory = exported(tmp_path / "model", tmp_path, mesh)
    reference = AssistantReference.load(directory, directory / "draft")
    counts = check_counts(vllm_host, reference, directory, prompts, 3, DRAFT_CLASS)
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.draft) == ([], DRAFT_CLASS)
    with_plugin = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3)).counts
    assert (with_plugin.drafts, with_plugin.accepted_per_position) == (counts.drafts, counts.accepted_per_position)
    reference.assistant.config.text_config.sliding_window += 1
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_counts_of_a_trunk_with_towers(family, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", family)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    _, counts = AssistantReference.load(directory, directory / "draft", family).simulate(prompts, NEW_TOKENS, 3)
    assert counts.accepted_per_position[-1] > 0
    assert counts_of_transformers(directory, prompts, 3) == counts


OPTIONS = "--torch_dtype float32 --mtp_mode heads_only --global_batch_size 8 --lr 3e-3 --split_dataset_ratio 0"


@pytest.mark.parametrize(
    ("family", "settings"),
    some_of([("gemma4_text", {}), ("gemma4", {}), ("gemma4", CLUSTERS), ("gemma4_unified", {})], ("gemma4", CLUSTERS)),
)
def test_after_a_step_a_published_assistant_has_its_names_dtypes_and_config(family, settings, commands, dataset):
    directory = commands.directory
    trunk = make_trunk(directory / "model", family, with_tokenizer=True)
    source = make_assistant(directory / "assistant", trunk, torch.bfloat16, **settings)
    graft = "--mtp_init graft --mtp_graft_from assistant --mtp_unroll 2 --train_iters 1 --acceptance_samples 0"
    commands.ok(*f"megatron sft --model model --dataset {dataset} {graft} {OPTIONS} --output_dir run".split())
    commands.ok(*"export --to_hf --model run --output_dir hf".split())
    before, after = (load_file(each / "model.safetensors") for each in (source, directory / "hf" / "draft"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype is tensor.dtype
        assert tensor.dtype is (torch.int64 if name.endswith("token_ordering") else torch.bfloat16)
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed >= {"model.embed_tokens.weight", "pre_projection.weight", "post_projection.weight"}
    assert ("masked_embedding.centroids.weight" in changed) == bool(settings)
    assert not any(name.endswith(("layer_scalar", "token_ordering")) for name in changed)
    for file in ("config.json", "generation_config.json"):
        contents = [json.loads((each / file).read_text()) for each in (source, directory / "hf" / "draft")]
        assert contents[0] == contents[1]
    assistant_class = classes_for(settings_of(trunk))[1]
    loaded: Any = assistant_class.from_pretrained(directory / "hf" / "draft", output_loading_info=True)
    _, loading = loaded
    assert not any(loading.values())
    commands.ok(*"export --to_hf --model run --output_dir wide --torch_dtype float32".split())
    wide = load_file(directory / "wide" / "draft" / "model.safetensors")
    assert {name for name, tensor in wide.items() if tensor.dtype is not torch.float32} == {
        name for name in before if name.endswith("token_ordering")
    }
    trunks = [load_file(each / "model.safetensors") for each in (trunk, directory / "hf")]
    assert trunks[0].keys() == trunks[1].keys()
    assert all(torch.equal(tensor, trunks[1][name]) for name, tensor in trunks[0].items())


def train(commands: Commands, dataset: Path, source: str) -> dict[str, Any]:
    """Train an assistant for a trunk that knows the rows, and export it; return the content of acceptance.json."""
    directory = commands.directory
    model = make_trunk(directory / "model", with_tokenizer=True)
    learn_rows(model, dataset)
    new = "--drafter gemma4_assistant"
    if source == "clusters":
        make_assistant(directory / "assistant", model, **CLUSTERS)
        new = "--mtp_init graft --mtp_graft_from assistant"
    new += " --mtp_unroll 2 --train_iters 80 --val_dataset val.jsonl"
    measured = "--acceptance_samples 3 --acceptance_max_new_tokens 12"
    options = OPTIONS.replace(" --split_dataset_ratio 0", "")
    commands.ok(*f"megatron sft --model model --dataset {dataset} {new} {measured} {options} --output_dir run".split())
    commands.ok(*"export --to_hf --model run --output_dir hf".split())
    return json.loads((directory / "run" / "acceptance.json").read_text())


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("source", ["new", "clusters"])
def test_an_assistant_learns_and_engines_count_what_the_run_counts(source, vllm_host, commands, dataset):
    said, directory = train(commands, dataset, source), commands.directory
    before, after = (said[when]["generated"] for when in ("before", "after"))
    assert after["acceptance_rate"] > before["acceptance_rate"] + 0.2
    usual = "--model hf --torch_dtype float32 --speculative mtp --max_new_tokens 12"
    measured = "--val_dataset val.jsonl --acceptance_json run/acceptance.json"
    commands.ok("infer", *f"{usual} --infer_backend transformers {measured}".split())
    host: Any = HostWithoutPlugins(vllm_host) if source == "new" else vllm_host  # on a CPU, clusters need the plugin
    of_vllm = Commands(directory, host)
    served = of_vllm.ok("infer", *f"{usual} --infer_backend vllm --compare {measured}".split())
    assert answers_equal(served.stderr, 3)
    engines = json.loads((directory / "run" / "acceptance.json").read_text())["engines"]
    for engine in ("transformers", "vllm"):
        assert {name: engines[engine][name] for name in after} == after
    assert "valid" in commands.ok("doctor", "--model", "hf").stdout
