"""Test adding a family: it is planned, trained and exported, and its heads draft.

Ember is a Qwen3 with other names in its files: `mlp.w1` for `mlp.gate_proj`, `ffn_width` for `intermediate_size`. Its
MTP heads have the names of Qwen3-Next. Only this file knows the family: the part "The family" would be a file in
`swiftlite/families/models/`, where the index finds it, so `known` would not be needed (docs/en/add-a-family.md).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from swiftlite import families, rules
from swiftlite.args.commands import InferArgs, SftArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import OptionError
from swiftlite.base.heads import Heads
from swiftlite.families import Family, dense
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.serve import infer
from swiftlite.train import run as training
from tests.growth.unheard import (
    TOKENS,
    args_of,
    export_hf,
    hf_config,
    is_trained,
    logits,
    make_model,
    run,
    there_and_back,
)
from tests.messages import naming
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo

# The family


def in_qwen3_s_words(hf_config: HfConfig) -> HfConfig:
    return {**hf_config, "intermediate_size": hf_config.get("ffn_width")}


def check(hf_config: HfConfig) -> None:
    dense.check(in_qwen3_s_words(hf_config), attention_bias=(False, None))


def layer(hf_config: HfConfig, number: int) -> Layer:
    names = {"mlp.gate_proj.": "mlp.w1.", "mlp.down_proj.": "mlp.w2.", "mlp.up_proj.": "mlp.w3."}
    return replace(dense.layer(in_qwen3_s_words(hf_config), number, qk_norm=True), hf_names=names)


EMBER = Family(
    name="ember",
    check=check,
    layer=layer,
    outside=dense.outside,
    mtp=dense.QWEN3_NEXT_HEADS,
)


def make_known() -> None:
    families.FAMILIES["ember"] = EMBER


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "ember", EMBER)


# Its model, as transformers would have it


class EmberConfig(Qwen3Config):
    model_type = "ember"
    attribute_map: ClassVar[dict[str, str]] = {"intermediate_size": "ffn_width"}


class EmberMlp(nn.Module):
    def __init__(self, config: EmberConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class EmberForCausalLM(Qwen3ForCausalLM):
    config_class = EmberConfig

    def __init__(self, config: EmberConfig):
        super().__init__(config)
        for decoder_layer in self.model.layers:
            decoder_layer.mlp = EmberMlp(config)


AutoConfig.register("ember", EmberConfig, exist_ok=True)
AutoModelForCausalLM.register(EmberConfig, EmberForCausalLM, exist_ok=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ember")
    sizes = {"ffn_width": 96, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return make_model(directory, EmberConfig, EmberForCausalLM, **sizes)


# What swiftlite does with it


def test_it_is_planned(model):
    config = hf_config(model)
    assert "intermediate_size" not in config
    (whole,) = estimate(config, Setup(max_length=64))
    hf = AutoModelForCausalLM.from_pretrained(model)
    assert whole.parameters == sum(parameter.numel() for parameter in hf.parameters())
    (half,) = estimate(config, Setup(ParallelLayout(tensor_model_parallel_size=2), num_gpus=2, max_length=64))
    assert whole.activations / 2 < half.activations < whole.activations
    assert training_flops(config, Heads(1)).per_token > training_flops(config).per_token


def test_it_is_cut_only_where_it_has_a_seam(model):
    args = SftArgs(model=str(model), dataset=["rows.jsonl"], output_dir="run", tensor_model_parallel_size=4)
    with pytest.raises(OptionError, match=naming("--tensor_model_parallel_size 4 num_key_value_heads 2")):
        rules.check(args, world_size=4)


def test_it_computes_what_transformers_does(model):
    ours = torch.tensor(launch(1, logits, make_known, model)[0])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def trained(model, rows, tmp_path_factory) -> Path:
    """Return a run of a few steps on two tensor-parallel ranks."""
    output_dir = tmp_path_factory.mktemp("ember_run") / "run"
    options = {"acceptance_samples": 2, "acceptance_max_new_tokens": 4, "tensor_model_parallel_size": 2}
    args = args_of(model, rows, output_dir, **options)
    launch(2, run, make_known, training.run, args, 2)
    return output_dir


def test_it_learns(trained):
    first, *_, last = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert last["eval_loss"] < 0.8 * first["loss"]
    assert last["eval_mtp_1_loss"] < 0.8 * first["mtp_1_loss"]


def test_it_is_exported_and_drafts(trained, model, rows, tmp_path):
    exported = export_hf(make_known, trained, tmp_path / "hf")
    assert is_trained(load_file(model / "model.safetensors"), exported)

    plain = InferArgs(
        model=str(tmp_path / "hf"),
        val_dataset=[f"{rows}#4"],
        result_path=str(tmp_path / "plain.jsonl"),
        torch_dtype="float32",
        max_new_tokens=12,
    )
    drafted = replace(
        plain,
        speculative="mtp",
        result_path=str(tmp_path / "drafted.jsonl"),
        acceptance_json=str(trained / "acceptance.json"),
    )
    launch(1, run, make_known, infer.run, plain)
    launch(1, run, make_known, infer.run, drafted)
    assert (tmp_path / "drafted.jsonl").read_text() == (tmp_path / "plain.jsonl").read_text()
    assert json.loads((trained / "acceptance.json").read_text())["engines"]["transformers"]["drafted"] > 0


def test_there_and_back_it_is_the_same_to_the_bit(model, tmp_path):
    before, after = load_file(model / "model.safetensors"), there_and_back(make_known, model, tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (model / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
