"""Test that vLLM without plugins drafts with an exported EAGLE-3 drafter, and counts what a reference counts."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.served_model import resolve_served
from swiftlite.export.run import convert
from swiftlite.families.eagle3 import VLLM_TRUNKS
from swiftlite.runtime.mesh import Mesh
from tests.e2e.conftest import Commands
from tests.e2e.test_stock_drafts import (
    NEW_TOKENS,
    HostWithoutPlugins,
    check_counts,
    counts_of_transformers,
    report_of,
    served_without_plugins,
)
from tests.engines.eagle3_reference import VERSIONS, Eagle3Reference, add_drafter, declare
from tests.engines.reference import Counts, Reference, write_trained
from tests.growth.test_drafter import learn, load_trunk, tokens_of
from tests.messages import answers_equal, mention_each, mentions, naming
from tests.stock_exports import SIZES
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
LAYERS = 4
FEATURES = [1, 2, 3]
DRAFT_CLASS = "Eagle3LlamaForCausalLM"


def exported(source: Path, directory: Path, mesh: Mesh) -> Path:
    """Export a model with a drafter as a run would; return the directory of the export."""
    run, out = directory / "run", directory / "hf"
    convert(ExportArgs(model=str(source), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    return out


def sizes_of(family: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": LAYERS, **SIZES.get(family, {})}
    if "sliding_window" in sizes:
        sizes["sliding_window"] = None
    if family == "smollm3":
        sizes["no_rope_layers"] = [0, 1, 1, 0]
    return sizes


def write_drafted(directory: Path, family: str, version: str) -> list[list[int]]:
    """Write a model whose drafts are often correct, and return prompts."""

    def draft_as(reference: Reference) -> Reference:
        return Eagle3Reference.of(reference.trunk, family, FEATURES, version)

    prompts = write_trained(directory, family, 1, family == "llama", 3, draft_as, **sizes_of(family))
    declare(directory, version, FEATURES)
    return prompts


Drafted = Callable[[str, str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def drafted(shared) -> Drafted:
    """Return drafted(family, version), which returns a model of `write_drafted`, not to be changed, and its prompts."""

    def get(family: str, version: str) -> tuple[Path, list[list[int]]]:
        def make(directory: Path) -> None:
            (directory / "prompts.json").write_text(json.dumps(write_drafted(directory, family, version)))

        directory = shared(f"eagle{version}-{family}", make)
        return directory, json.loads((directory / "prompts.json").read_text())

    return get


CASES = [(family, "3.1", 3) for family in VLLM_TRUNKS]
# Tiny models of the other two do not learn three drafts from states that are not normalized.
CASES += [(family, "3.0", 3) for family in VLLM_TRUNKS if family not in ("llama", "olmo2")]
CASES += [("llama", "3.1", 1), ("qwen3", "3.0", 1)]


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(("family", "version", "num_tokens"), some_of(CASES, ("llama", "3.1", 3)))
def test_counts_of_vllm_without_plugins(family, version, num_tokens, drafted, vllm_host, tmp_path, mesh):
    model, prompts = drafted(family, version)
    reference = Eagle3Reference.load(model, family)
    directory = exported(model, tmp_path, mesh)
    counts = check_counts(vllm_host, reference, directory, prompts, num_tokens, DRAFT_CLASS)
    reference.features = [0, 1, 2]  # off by one
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_a_draft_vocabulary(vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", "llama", "3.1")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mtp_draft_vocab": "0-59 70-127"}))
    reference = Eagle3Reference.load(tmp_path / "model", "llama")
    reference.draft_vocab = [*range(60), *range(70, 128)]
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served, _ = vllm_host.call(partial(served_without_plugins, directory, prompts, 3))
    _, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, 3)
    reference.draft_vocab = []
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_doctor_loads_trunk_and_folder_without_plugins(drafted, vllm_host, tmp_path, mesh):
    model, _ = drafted("llama", "3.1")
    directory = exported(model, tmp_path, mesh)
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.notes, report.draft) == ([], [], DRAFT_CLASS)
    file = directory / "draft" / "model.safetensors"
    tensors = load_file(file)
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    report = vllm_host.call(partial(report_of, directory))
    assert mention_each(report.problems, ["draft/ model.safetensors midlayer.hidden_norm.weight", f"{DRAFT_CLASS} 64"])


def test_vllm_is_refused_for_a_trunk_without_inner_states(tmp_path):
    from swiftlite.engines.vllm.options import check_trunk_of_drafter

    check_trunk_of_drafter(resolve_served(make_tiny_hf(tmp_path / "model", "qwen2_moe")))  # without a drafter
    declare(tmp_path / "model", "3.1", [0, 1])
    with pytest.raises(UserError, match=naming("vLLM eagle3 qwen2_moe")):
        check_trunk_of_drafter(resolve_served(tmp_path / "model"))
    declare(make_tiny_hf(tmp_path / "windows", "mistral", sliding_window=6), "3.1", [0, 1])
    with pytest.raises(UserError, match=naming("vLLM eagle3 window")):
        check_trunk_of_drafter(resolve_served(tmp_path / "windows"))


def test_live_weights_are_refused_without_advice_for_mtp_heads(tmp_path, mesh):
    from swiftlite.engines.vllm.options import check_heads_can_be_updated

    model = add_drafter(make_tiny_hf(tmp_path / "model", "llama", num_hidden_layers=LAYERS), "3.1", FEATURES)
    with pytest.raises(UserError, match=naming("draft/")) as error:
        check_heads_can_be_updated(resolve_served(exported(model, tmp_path, mesh)))
    assert mentions(error.value.hint, "--speculative none")
    assert "--draft_for" not in error.value.hint


OPTIONS = (
    "--torch_dtype float32 --mtp_mode heads_only --mtp_unroll 2 --global_batch_size 8 --lr 3e-3 "
    "--acceptance_samples 3 --acceptance_max_new_tokens 12"
)


def sft_words(dataset: Path) -> list[str]:
    files = f"--model model --dataset {dataset} --val_dataset val.jsonl"
    return f"megatron sft {files} --drafter eagle3.1 {OPTIONS} --train_iters 60 --save_steps 30".split()


def train(commands: Commands, dataset: Path) -> dict[str, Any]:
    """Train a drafter for a model that knows the rows, and export it; return what acceptance.json says."""
    prepare(commands.directory, dataset)
    commands.ok(*sft_words(dataset), "--output_dir", "whole")
    commands.ok(*"export --to_hf --model whole --output_dir hf".split())
    return json.loads((commands.directory / "whole" / "acceptance.json").read_text())["after"]["generated"]


def prepare(directory: Path, dataset: Path) -> None:
    """Write a model that knows the rows, and held-out rows."""
    model = make_tiny_hf(directory / "model", "llama", with_tokenizer=True, num_hidden_layers=LAYERS)
    trunk = load_trunk(model)
    learn(trunk, tokens_of(model, dataset, with_answers=True))
    learned = trunk.state_dict()
    tensors = {key: learned[key].contiguous() for key in load_file(model / "model.safetensors")}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (directory / "val.jsonl").write_text("".join(dataset.read_text().splitlines(keepends=True)[:3]))


@pytest.mark.slow
def test_a_run_counts_what_transformers_counts(commands, dataset):
    """A drafter passes through the commands: training, export, inference, evaluation, doctor."""
    said_by_run, directory = train(commands, dataset), commands.directory
    assert said_by_run["accepted"] > 3
    before, after = (load_file(directory / name / "model.safetensors") for name in ("model", "hf"))
    assert before.keys() == after.keys()
    assert all(after[key].equal(before[key]) for key in before)
    config = json.loads((directory / "hf" / "config.json").read_text())
    assert config.pop("drafter") == declare_of(config)
    assert config.pop("mtp_unroll") == 2
    assert config == json.loads((directory / "model" / "config.json").read_text())
    usual = "--model hf --infer_backend transformers --torch_dtype float32 --speculative mtp --max_new_tokens 12"
    commands.ok("infer", *f"{usual} --val_dataset val.jsonl --acceptance_json whole/acceptance.json".split())
    engines = json.loads((directory / "whole" / "acceptance.json").read_text())["engines"]
    assert {name: engines["transformers"][name] for name in said_by_run} == said_by_run
    commands.ok(*"evaluate --model hf --dataset val.jsonl --torch_dtype float32 --output_dir evaluation".split())
    measured = json.loads((directory / "evaluation" / "evaluation.json").read_text())["model"]
    assert len(measured["teacher_forced"]["all"]["heads"]) == 2
    assert "valid" in commands.ok("doctor", "--model", "hf").stdout
    tensors = load_file(directory / "hf" / "draft" / "model.safetensors")
    tensors["fc.weight"] += 1
    save_file(tensors, directory / "hf" / "draft" / "model.safetensors", {"format": "pt"})
    assert "fc.weight" in commands.run("doctor", "--model", "hf").stdout


def declare_of(config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {"kind": "eagle3", "layers": 1, "feature_layers": [*range(layers)][-3:], **VERSIONS["3.1"]}


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(commands, dataset):
    train(commands, dataset)
    directory = commands.directory
    shutil.copytree(directory / "whole", directory / "parts")
    shutil.rmtree(directory / "parts" / "checkpoint-60")
    commands.ok(*sft_words(dataset), "--output_dir", "parts", "--resume", "true")
    commands.ok(*"export --to_hf --model parts --output_dir hf-parts".split())
    whole, parts = (load_file(directory / name / "draft" / "model.safetensors") for name in ("hf", "hf-parts"))
    assert all(parts[key].equal(whole[key]) for key in whole)


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_a_run_counts_what_vllm_without_plugins_counts(vllm_host, commands, dataset):
    said_by_run, directory = train(commands, dataset), commands.directory
    host: Any = HostWithoutPlugins(vllm_host)
    without = Commands(directory, host)
    usual = "--model hf --infer_backend vllm --torch_dtype float32".split()
    measured = "--val_dataset val.jsonl --acceptance_json whole/acceptance.json"
    infer = f"--speculative mtp --compare --max_new_tokens 12 {measured}"
    assert answers_equal(without.ok("infer", *usual, *infer.split()).stderr, 3)
    counted = json.loads((directory / "whole" / "acceptance.json").read_text())["engines"]["vllm"]
    assert {name: counted[name] for name in said_by_run} == said_by_run
    shown = without.ok("deploy", *usual, "--dry_run").stdout
    assert f'"model": "{directory}/hf/draft"' in shown
    assert '"method": "eagle3"' in shown
