"""Test that vLLM drafts with exported drafters, and counts what a reference counts.

vLLM has no plugins, except for DSpark on a CPU and for MTP heads with features.
"""

import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.eagle3 import VLLM_TRUNKS
from tests.e2e.conftest import Commands
from tests.e2e.drafted import (
    FEATURES,
    HEAD_FEATURES,
    KINDS,
    LAYERS,
    VOCABULARY,
    exported,
    load_reference,
    write_drafted,
)
from tests.e2e.test_stock_drafts import (
    NEW_TOKENS,
    HostWithoutPlugins,
    check_counts,
    counts_of_transformers,
    report_of,
)
from tests.e2e.vllm_here import serve
from tests.engines import eagle3_reference
from tests.engines.reference import Counts
from tests.growth.test_drafter import learn, load_trunk, tokens_of
from tests.messages import answers_equal, mention_each, mentions, naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

# Tiny models of llama and olmo2 do not learn three drafts of EAGLE-3.0 from states that are not normalized; those of
# mistral, phi3 and smollm3 do not learn three drafts of a block of one layer. DFlash has no factor of embeddings, as in
# granite.
CASES = [("eagle3.1", family, 3) for family in VLLM_TRUNKS]
CASES += [("eagle3.0", family, 3) for family in VLLM_TRUNKS if family not in ("llama", "olmo2")]
CASES += [("eagle3.1", "llama", 1), ("eagle3.0", "qwen3", 1)]
CASES += [("dflash", family, 3) for family in VLLM_TRUNKS if family != "granite"]
CASES += [("dflash, one layer", "llama", 1), ("dflash, one layer", "qwen3", 2)]
CASES += [("dspark", "llama", 3), ("dspark, one layer", "qwen3", 1)]
CASES += [("mtp_features", family, 3) for family in VLLM_TRUNKS] + [("mtp_features", "llama", 1)]
CASES += [("mtp_features", "qwen3", 1)]
IN_CI = [(kind, "llama", 3) for kind in ("eagle3.1", "dflash", "dspark")]


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(("kind", "family", "num_tokens"), some_of(CASES, *IN_CI))
def test_counts_of_vllm(kind, family, num_tokens, vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", kind, family)
    reference: Any = load_reference(tmp_path / "model", kind, family)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    draft, has_plugin = KINDS[kind].draft, KINDS[kind].has_plugin
    counts = check_counts(vllm_host, reference, directory, prompts, num_tokens, draft, has_plugin=has_plugin)
    if kind.startswith("d"):
        report = vllm_host.call(partial(report_of, directory))
        assert (report.problems, report.notes, report.draft) == ([], [], draft)
    if kind.startswith("dspark"):
        reference.own["markov_head/markov_w2/weight"].data.zero_()
    else:  # other layers
        reference.features = [1, LAYERS - 2] if kind == "mtp_features" else [0, 1, 2]
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(
    "kind", some_of(["eagle3.1", "dflash, one layer", "dspark, one layer", "mtp_features"], "mtp_features")
)
def test_a_draft_vocabulary(kind, vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", kind, "llama", vocabulary="0-59 70-127")
    reference = load_reference(tmp_path / "model", kind, "llama")
    reference.draft_vocab = VOCABULARY
    directory = exported(tmp_path / "model", tmp_path, mesh)
    host = vllm_host if KINDS[kind].has_plugin else HostWithoutPlugins(vllm_host)
    served = host.call(partial(serve, directory, prompts, NEW_TOKENS, 3))
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    assert served.token_ids == expected
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, 3)
    if kind in ("eagle3.1", "dflash, one layer"):
        reference.draft_vocab = []
        assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.notes) == ([], [])
    if kind not in ("eagle3.1", "mtp_features"):
        return
    file = directory / "draft" / "model.safetensors"
    tensors, lost = load_file(file), KINDS[kind].lost
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    report = vllm_host.call(partial(report_of, directory))
    told = f"{KINDS[kind].draft} 64" if kind == "eagle3.1" else lost
    assert mention_each(report.problems, [f"draft/ model.safetensors {lost}", told])


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_counts_of_a_compiled_draft(vllm_host, tmp_path, mesh):
    """As by default on a GPU."""
    prompts = write_drafted(tmp_path / "model", "mtp_features", "qwen3")
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3, compile_in=tmp_path / "cache"))
    _, counts = load_reference(tmp_path / "model", "mtp_features", "qwen3").simulate(prompts, NEW_TOKENS, 3)
    assert served.num_compiled == 2
    assert Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position) == counts


def test_vllm_is_refused_for_a_trunk_without_inner_states(tmp_path):
    from swiftlite.engines.vllm.options import check_trunk_of_drafter

    check_trunk_of_drafter(resolve_served(make_tiny_hf(tmp_path / "model", "qwen2_moe")))  # without a drafter
    eagle3_reference.declare(tmp_path / "model", "3.1", [0, 1])
    with pytest.raises(UserError, match=naming("vLLM eagle3 qwen2_moe")):
        check_trunk_of_drafter(resolve_served(tmp_path / "model"))
    eagle3_reference.declare(make_tiny_hf(tmp_path / "windows", "mistral", sliding_window=6), "3.1", [0, 1])
    with pytest.raises(UserError, match=naming("vLLM eagle3 window")):
        check_trunk_of_drafter(resolve_served(tmp_path / "windows"))


def test_live_weights_are_refused_without_advice_for_mtp_heads(tmp_path, mesh):
    from swiftlite.engines.vllm.options import check_heads_can_be_updated

    model = make_tiny_hf(tmp_path / "model", "llama", num_hidden_layers=LAYERS)
    eagle3_reference.add_drafter(model, "3.1", FEATURES)
    with pytest.raises(UserError, match=naming("draft/")) as error:
        check_heads_can_be_updated(resolve_served(exported(model, tmp_path, mesh)))
    assert mentions(error.value.hint, "--speculative none")
    assert "--draft_for" not in error.value.hint


OPTIONS = {
    "eagle3.1": "--drafter eagle3.1",
    "mtp_features": f"--mtp_features {','.join(map(str, HEAD_FEATURES))}",
}
DECLARED: dict[str, dict[str, Any]] = {
    "eagle3.1": {"kind": "eagle3", "layers": 1, "feature_layers": FEATURES, **eagle3_reference.VERSIONS["3.1"]},
    "mtp_features": {"kind": "mtp_features", "layers": 1, "feature_layers": HEAD_FEATURES},
}


def sft_words(kind: str, dataset: Path) -> list[str]:
    return (
        f"megatron sft --model model --dataset {dataset} --val_dataset val.jsonl {OPTIONS[kind]} --torch_dtype float32 "
        "--mtp_mode heads_only --mtp_unroll 2 --global_batch_size 8 --lr 3e-3 --acceptance_samples 3 "
        "--acceptance_max_new_tokens 12 --train_iters 60 --save_steps 30"
    ).split()


def learn_rows(model: Path, dataset: Path) -> None:
    """Train the trunk of a model until it knows the rows, and write held-out rows next to it."""
    trunk = load_trunk(model)
    learn(trunk, tokens_of(model, dataset, with_answers=True))
    learned = trunk.state_dict()
    tensors = {key: learned[key].contiguous() for key in load_file(model / "model.safetensors")}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model.parent / "val.jsonl").write_text("".join(dataset.read_text().splitlines(keepends=True)[:3]))


def train(kind: str, commands: Commands, dataset: Path) -> dict[str, Any]:
    """Train a drafter for a model that knows the rows, and export it; return what acceptance.json says."""
    directory = commands.directory
    learn_rows(make_tiny_hf(directory / "model", "llama", with_tokenizer=True, num_hidden_layers=LAYERS), dataset)
    commands.ok(*sft_words(kind, dataset), "--output_dir", "whole")
    commands.ok(*"export --to_hf --model whole --output_dir hf".split())
    before, after = (load_file(directory / name / "model.safetensors") for name in ("model", "hf"))
    assert before.keys() == after.keys()
    assert all(after[key].equal(before[key]) for key in before)
    config = json.loads((directory / "hf" / "config.json").read_text())
    assert (config.pop("drafter"), config.pop("mtp_unroll")) == (DECLARED[kind], 2)
    assert config == json.loads((directory / "model" / "config.json").read_text())
    assert "valid" in commands.ok("doctor", "--model", "hf").stdout
    said = json.loads((directory / "whole" / "acceptance.json").read_text())["after"]["generated"]
    assert said["accepted"] > 3
    return said


def counted_by(engine: str, commands: Commands) -> dict[str, Any]:
    """Infer with and without drafts; return the counts in acceptance.json."""
    measured = "--speculative mtp --max_new_tokens 12 --val_dataset val.jsonl --acceptance_json whole/acceptance.json"
    usual = f"--model hf --infer_backend {engine} --torch_dtype float32 --compare {measured}"
    assert answers_equal(commands.ok("infer", *usual.split()).stderr, 3)
    return json.loads((commands.directory / "whole" / "acceptance.json").read_text())["engines"][engine]


@pytest.mark.slow
def test_a_run_counts_what_transformers_counts(commands, dataset):
    """A drafter passes through the commands: training, export, inference, evaluation, doctor."""
    said_by_run, directory = train("eagle3.1", commands, dataset), commands.directory
    counted = counted_by("transformers", commands)
    assert {name: counted[name] for name in said_by_run} == said_by_run
    commands.ok(*"evaluate --model hf --dataset val.jsonl --torch_dtype float32 --output_dir evaluation".split())
    measured = json.loads((directory / "evaluation" / "evaluation.json").read_text())["model"]
    assert len(measured["teacher_forced"]["all"]["heads"]) == 2
    tensors = load_file(directory / "hf" / "draft" / "model.safetensors")
    tensors["fc.weight"] += 1
    save_file(tensors, directory / "hf" / "draft" / "model.safetensors", {"format": "pt"})
    assert "fc.weight" in commands.run("doctor", "--model", "hf").stdout


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_a_run_counts_what_vllm_without_plugins_counts(vllm_host, commands, dataset):
    said_by_run, directory = train("eagle3.1", commands, dataset), commands.directory
    host: Any = HostWithoutPlugins(vllm_host)
    without = Commands(directory, host)
    counted = counted_by("vllm", without)
    assert {name: counted[name] for name in said_by_run} == said_by_run
    shown = without.ok(*"deploy --model hf --infer_backend vllm --torch_dtype float32 --dry_run".split()).stdout
    assert f'"model": "{directory}/hf/draft"' in shown
    assert '"method": "eagle3"' in shown


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_a_run_with_features_counts_what_engines_count(vllm_host, commands, dataset):
    """A head passes through the commands: fit, training, export, inference, doctor; a resumed run is the same."""
    said_by_run, directory = train("mtp_features", commands, dataset), commands.directory
    counted = [
        counted_by(engine, Commands(directory, host)) for engine, host in (("transformers", None), ("vllm", vllm_host))
    ]
    assert counted[0] == counted[1]
    # Unlike a run, engines also count correct drafts after the end of an answer, which no first draft is.
    assert counted[0]["drafts"] == said_by_run["drafts"]
    assert counted[0]["acceptance_per_position"][0] == said_by_run["acceptance_per_position"][0]
    shutil.copytree(directory / "whole", directory / "parts")
    shutil.rmtree(directory / "parts" / "checkpoint-60")
    commands.ok(*sft_words("mtp_features", dataset), "--output_dir", "parts", "--resume", "true")
    commands.ok(*"export --to_hf --model parts --output_dir hf-parts".split())
    whole, parts = (load_file(directory / name / "draft" / "model.safetensors") for name in ("hf", "hf-parts"))
    assert all(parts[key].equal(whole[key]) for key in whole)
