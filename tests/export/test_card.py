"""Test README.md of a pushed model with the hub's client."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.args.config import write_config
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.export import card
from swiftlite.export.card import model_card
from swiftlite.export.provenance import Provenance, provenance_of
from swiftlite.export.run import convert
from swiftlite.families.drafters import DrafterOptions, with_drafter
from swiftlite.families.resolved import resolve
from swiftlite.hub.name import HubName
from tests.llamacpp_here import needs_llamacpp
from tests.messages import has_line, naming
from tests.tiny import make_tiny_hf

MODEL = HubName("model", "org/base", "v1")
DATA = HubName("dataset", "org/rows", subset="small")
COMMIT = "a" * 40
ORIGIN = Provenance(
    MODEL, (DATA, "/home/someone/private/rows.jsonl#50"), {MODEL.key: COMMIT}, steps=70, heads_only=True
)


def test_the_card_says_what_it_was_made_from(tmp_path):
    text = model_card("me/new", ORIGIN, Heads(layers=1, unroll=3), tmp_path)
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["datasets"], data["library_name"]) == ("org/base", ["org/rows"], "transformers")
    assert has_line(text, f"[org/base@v1](https://huggingface.co/org/base) {COMMIT}")
    assert "- Data: [org/rows:small](https://huggingface.co/datasets/org/rows), `rows.jsonl`" in text
    assert "someone" not in text
    assert has_line(text, "70")
    assert has_line(text, "1 3")
    assert "\n|" not in text  # no table


def test_the_card_of_another_drafter_has_no_commands_for_mtp_heads(tmp_path):
    text = model_card("me/new", ORIGIN, Heads(layers=3, kind="networks"), tmp_path)
    assert has_line(text, "networks 3")
    assert "multi-token-prediction" not in ModelCard(text).data.to_dict()["tags"]
    assert "mtp" not in text


@pytest.mark.parametrize(("kind", "needs_plugin"), [("eagle3", False), ("mtp_features", True)])
def test_the_card_of_a_drafter_in_a_folder_has_its_method(tmp_path, kind, needs_plugin):
    heads = Heads(layers=1, unroll=3, kind=kind, features=(1,))
    text = model_card("me/new", ORIGIN, heads, tmp_path, drafting_engines=["vllm", "sglang"], has_draft_folder=True)
    assert has_line(text, "swiftlite deploy --infer_backend sglang")
    assert '{"method": "eagle3", "model": "model/draft", "num_speculative_tokens": 3}' in text
    assert ("plugin" in text) is needs_plugin


@pytest.mark.parametrize(
    ("family", "kind", "vocab", "engines"),
    [
        ("qwen3", "dflash", "", "transformers vllm sglang llamacpp"),
        ("qwen3", "dflash", "0-40", "transformers vllm llamacpp"),
        ("phi3", "dspark", "", "transformers vllm sglang"),
        ("qwen3", "mtp", "", ""),
    ],
)
def test_engines_that_draft_are_those_of_the_records(tmp_path, family, kind, vocab, engines):
    source = make_tiny_hf(tmp_path, family, num_hidden_layers=4)
    model = resolve(source)
    if kind != "mtp":
        config = with_drafter(model.config, DrafterOptions(kind)) | {"mtp_draft_vocab": vocab}
        config["drafter"] |= {"layers": 1}
        model = replace(model, config=config)
    assert card.engines_that_draft(model) == engines.split()


def write_acceptance(run) -> None:
    before = {"prompts": 8, "drafts": 100, "drafted": 100, "accepted": 3, "acceptance_rate": 0.03}
    after = before | {"accepted": 61, "acceptance_rate": 0.61, "mean_accepted_length": 1.61}
    content = {
        "depths": 1,
        "before": {"generated": before | {"mean_accepted_length": 1.03}},
        "after": {"generated": after},
        "engines": {"vllm": after | {"accepted": 60, "acceptance_rate": 0.6, "mean_accepted_length": 1.6}},
    }
    (run / "acceptance.json").write_text(json.dumps(content))


def test_the_card_has_the_acceptance_of_the_run_and_of_engines(tmp_path):
    write_acceptance(tmp_path)
    text = model_card("me/new", ORIGIN, Heads(layers=1), tmp_path)
    assert has_line(text, "8 3 100 3.0% 1.03")
    assert has_line(text, "8 61 100 61.0% 1.61")
    assert has_line(text, "vllm 8 60 100 60.0% 1.60")


@pytest.fixture(scope="module")
def run(tmp_path_factory, mesh) -> Path:
    """Return a run that has measured its heads, and a model with other heads."""
    folder = tmp_path_factory.mktemp("card")
    for name in ("model", "other"):
        make_tiny_hf(folder / name, "qwen3", depth=1, with_tokenizer=True, seed=len(name))
    convert(ExportArgs(model=str(folder / "model"), output_dir=str(folder / "run"), to_mcore=True), mesh)
    write_acceptance(folder / "run")
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"query": "What does this function do?", "response": "It returns the sum."}))
    options = SftArgs(model=str(folder / "model"), dataset=[str(rows)], output_dir=str(folder / "run"))
    write_config(options, folder / "run" / "args.json")
    return folder / "run"


def card_of(run: Path, out: Path, mesh, **options) -> str:
    args = ExportArgs(model=str(run), output_dir=str(out), to_hf=True, push_to_hub="me/new", **options)
    convert(args, mesh)  # `export.run.run` uploads what this has written
    return (out / "README.md").read_text()


def test_heads_of_the_run_have_its_acceptance(run, tmp_path, mesh):
    assert has_line(card_of(run, tmp_path / "out", mesh), "61 100 61.0%")


@pytest.mark.parametrize(
    "options",
    [{"mtp": "strip"}, {"mtp_graft_from": "other"}, {"draft_vocab": 5}],
    ids=["stripped", "grafted", "fewer tokens"],
)
def test_other_heads_have_not(run, tmp_path, mesh, options):
    """Heads with another draft vocabulary than the measured heads are also excluded."""
    if "mtp_graft_from" in options:
        options = {"mtp_graft_from": str(run.parent / "other")}
    text = card_of(run, tmp_path / "out", mesh, **options)
    assert not has_line(text, "61 100")


@needs_llamacpp
def test_a_gguf_file_has_the_acceptance_of_the_run_and_its_command(run, tmp_path, mesh):
    out = tmp_path / "out"
    convert(ExportArgs(model=str(run), output_dir=str(out), to_gguf=True, push_to_hub="me/new"), mesh)
    text = (out / "README.md").read_text()
    assert has_line(text, "61 100 61.0%")
    assert has_line(text, "llama-server out-bf16.gguf --spec-type draft-mtp")
    assert has_line(text, "library_name gguf")
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "out-bf16.gguf"]


@pytest.mark.parametrize(("kind", "method"), [("eagle3", "eagle3"), ("dspark", "dspark"), ("gemma4_assistant", "mtp")])
def test_a_drafter_has_its_own_file_and_the_name_of_its_method_in_llamacpp(kind, method):
    text = "\n".join(card._serving_gguf("me/new", "out-bf16.gguf", Heads(1, kind=kind, unroll=3)))
    assert has_line(text, f"llama-server --model-draft --spec-type draft-{method} --spec-draft-n-max 3")


INT4: dict[str, Any] = {"quant_method": "rtn", "quant_bits": 4, "group_size": 32}


def test_a_quantized_model_is_compared_with_the_unquantized_one(run, tmp_path, mesh):
    text = card_of(run, tmp_path / "out", mesh, val_dataset=[str(run.parent / "rows.jsonl")], **INT4)
    content = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    before = content["baseline"]
    assert has_line(text, "rtn 4 32")
    assert has_line(text, f"{before['trunk']['loss']:.4f} {content['trunk']['loss']:.4f}")
    assert has_line(text, f"{content['trunk']['top1_agreement']:.1%}")
    shares = [each["teacher_forced"]["acceptance_per_depth"][0] for each in (before, content)]
    assert has_line(text, f"head 1 {shares[0]:.1%} {shares[1]:.1%}")
    counts = [each["replayed"] for each in (before, content)]
    assert has_line(text, " ".join(f"{each['accepted']} {each['drafted']}" for each in counts))
    assert has_line(text, "61 100 61.0%")  # of the run, before the quantization


def test_a_quantized_model_without_measurements_has_its_format(run, tmp_path, mesh):
    text = card_of(run, tmp_path / "out", mesh, **INT4)
    assert has_line(text, "rtn 4 32")
    assert "baseline" not in text


def test_counts_of_engines_are_compared(tmp_path):
    counts = {"prompts": 8, "drafted": 100, "accepted": 61, "acceptance_rate": 0.61}
    fewer = counts | {"accepted": 44, "acceptance_rate": 0.44}
    measured = {
        "trunk": {"tokens": 9, "loss": 1.25, "top1_agreement": 0.875},
        "teacher_forced": {"acceptance_per_depth": [0.5]},
        "replayed": fewer,
        "engines": {"vllm": fewer, "sglang": fewer},
    }
    quantization = {"format": "fp8", "weights": [{"bits": 8}], "activation_bits": 8}
    baseline = measured | {"trunk": {"tokens": 9, "loss": 1.125}, "engines": {"vllm": counts}}
    quality = {"quantization": quantization, **measured, "baseline": baseline}
    text = model_card("me/new", ORIGIN, Heads(layers=1), tmp_path, quality)
    assert has_line(text, "vllm 61 100 61.0% 44 100 44.0%")
    assert has_line(text, "sglang 44 100")
    assert has_line(text, "1.1250 1.2500")
    assert has_line(text, "87.5%")
    assert has_line(text, "head 1 50.0% 50.0%")


def test_heads_before_the_end_of_a_run_have_not(run, tmp_path, mesh):
    longer = shutil.copytree(run, tmp_path / "longer")
    shutil.copytree(longer / "checkpoint-0", longer / "checkpoint-5")
    assert not has_line(card_of(longer / "checkpoint-0", tmp_path / "out", mesh), "61 100")


def test_a_model_without_heads_promises_no_drafts():
    text = model_card("me/new", Provenance("base", (), {}, steps=1, heads_only=False), Heads(), None)
    assert "speculative" not in text
    data = ModelCard(text).data.to_dict()
    assert data["tags"] == ["swiftlite"]
    assert "datasets" not in data


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "m"}', '{"model": "m", "dataset": 1}', None])
def test_a_run_that_cannot_say(tmp_path, text):
    if text is not None:
        (tmp_path / "args.json").write_text(text)
    with pytest.raises(UserError, match=naming(f"--push_to_hub {tmp_path / 'args.json'}")):
        provenance_of(tmp_path / "checkpoint-5")
