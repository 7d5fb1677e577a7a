"""Test that vLLM and transformers draft with exported MTP heads with features, and count what a reference counts."""

import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swiftlite.families.eagle3 import VLLM_TRUNKS
from tests.e2e.conftest import Commands
from tests.e2e.test_eagle3 import LAYERS, OPTIONS, exported, prepare, sizes_of
from tests.e2e.test_stock_drafts import NEW_TOKENS, counts_of_transformers, report_of
from tests.e2e.vllm_here import serve
from tests.engines.feature_reference import FeatureReference, declare
from tests.engines.reference import Counts, Reference, write_trained
from tests.messages import answers_equal, mention_each

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
FEATURES = [1, LAYERS - 1]


def write_drafted(directory: Path, family: str) -> list[list[int]]:
    """Write a model whose drafts are often correct, and return prompts."""

    def draft_as(reference: Reference) -> Reference:
        return FeatureReference.of(reference.trunk, family, FEATURES)

    prompts = write_trained(directory, family, 1, family == "llama", 3, draft_as, **sizes_of(family))
    declare(directory, FEATURES)
    return prompts


CASES = [(family, 3) for family in VLLM_TRUNKS] + [("llama", 1), ("qwen3", 1)]


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(("family", "num_tokens"), CASES)
def test_counts_of_vllm(family, num_tokens, vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", family)
    reference = FeatureReference.load(tmp_path / "model", family)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, num_tokens))
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    assert served.draft.endswith("MtpFeaturesEagle3")
    assert served.token_ids == expected
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, num_tokens)
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
    assert counts.accepted_per_position[-1] > 0
    reference.features = [1, LAYERS - 2]  # another layer
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_counts_of_a_compiled_draft(vllm_host, tmp_path, mesh):
    """As by default on a GPU."""
    prompts = write_drafted(tmp_path / "model", "qwen3")
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3, compile_in=tmp_path / "cache"))
    _, counts = FeatureReference.load(tmp_path / "model", "qwen3").simulate(prompts, NEW_TOKENS, 3)
    assert served.num_compiled == 2
    assert Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position) == counts


@pytest.mark.engine
@needs_vllm
def test_a_draft_vocabulary_and_doctor(vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", "llama")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mtp_draft_vocab": "0-59 70-127"}))
    reference = FeatureReference.load(tmp_path / "model", "llama")
    reference.draft_vocab = [*range(60), *range(70, 128)]
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3))
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    assert served.token_ids == expected
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, 3)
    assert counts.accepted_per_position[-1] > 0
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.notes) == ([], [])
    file = directory / "draft" / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.fc_first.weight"]
    save_file(tensors, file, {"format": "pt"})
    report = vllm_host.call(partial(report_of, directory))
    assert mention_each(report.problems, ["draft/ model.safetensors mtp.fc_first.weight", "mtp.fc_first.weight"])


def sft_words(dataset: Path) -> list[str]:
    files = f"--model model --dataset {dataset} --val_dataset val.jsonl --mtp_features {','.join(map(str, FEATURES))}"
    return f"megatron sft {files} {OPTIONS} --train_iters 60 --save_steps 30".split()


def train(commands: Commands, dataset: Path) -> dict[str, Any]:
    """Train a head for a model that knows the rows, and export it; return what acceptance.json says."""
    prepare(commands.directory, dataset)
    commands.ok(*sft_words(dataset), "--output_dir", "whole")
    commands.ok(*"export --to_hf --model whole --output_dir hf".split())
    return json.loads((commands.directory / "whole" / "acceptance.json").read_text())["after"]["generated"]


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_a_run_counts_what_engines_count(vllm_host, commands, dataset):
    """A head passes through the commands: fit, training, export, inference, doctor; a resumed run is the same."""
    said_by_run, directory = train(commands, dataset), commands.directory
    assert said_by_run["accepted"] > 3
    config = json.loads((directory / "hf" / "config.json").read_text())
    assert config["drafter"] == {"kind": "mtp_features", "layers": 1, "feature_layers": FEATURES}
    assert "valid" in commands.ok("doctor", "--model", "hf").stdout
    measured = "--speculative mtp --max_new_tokens 12 --val_dataset val.jsonl --acceptance_json whole/acceptance.json"
    counted = {}
    for engine, host in {"transformers": None, "vllm": vllm_host}.items():
        usual = f"--model hf --infer_backend {engine} --torch_dtype float32 --compare {measured}"
        assert answers_equal(Commands(directory, host).ok("infer", *usual.split()).stderr, 3)
        counted[engine] = json.loads((directory / "whole" / "acceptance.json").read_text())["engines"][engine]
    assert counted["vllm"] == counted["transformers"]
    # Unlike a run, engines also count correct drafts after the end of an answer, which no first draft is.
    assert counted["vllm"]["drafts"] == said_by_run["drafts"]
    assert counted["vllm"]["acceptance_per_position"][0] == said_by_run["acceptance_per_position"][0]
    shutil.copytree(directory / "whole", directory / "parts")
    shutil.rmtree(directory / "parts" / "checkpoint-60")
    commands.ok(*sft_words(dataset), "--output_dir", "parts", "--resume", "true")
    commands.ok(*"export --to_hf --model parts --output_dir hf-parts".split())
    whole, parts = (load_file(directory / name / "draft" / "model.safetensors") for name in ("hf", "hf-parts"))
    assert all(parts[key].equal(whole[key]) for key in whole)
