"""Test adapters on Transformer Engine's layers and on grouped experts against one process with local layers.

Transformer Engine's compiled parts are replaced by `tests/te_stand_ins`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite import families
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora, is_adapter
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import stream_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.model.build import build_model
from swiftlite.model.layers.lora import add_adapters, merged
from swiftlite.plan.kernels import Kernels
from swiftlite.runtime.distributed import session
from tests import te_stand_ins
from tests.parallel import parity
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import CASES, FULL, SMALL, TP2_SP, Job, Result, beyond
from tests.tiers import all_but, selected

pytestmark = pytest.mark.gloo

GROUPED = Kernels(is_fused=True, has_grouped_experts=True)
TE = Kernels("transformer_engine", is_fused=True, has_grouped_experts=True)
LORA = SMALL | {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
# Tied embeddings and biases; experts, shared experts and latent attention.
FAMILIES = ("qwen2", "deepseek_v3")
EXPERTS = FAMILIES[1]
TUNERS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": LORA | {"use_dora": True},
    "lora, heads in full": LORA | {"mtp_tuner": "full"},
}
ALONE: dict[str, Any] = {}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TE": ALONE,
    "TE TP2+SP": TP2_SP,
    "TE PP2 recomputed": CASES["PP2"].options | FULL["uniform 2"],
    "TE DP2+overlap": CASES["DP2+overlap"].options,
    "TE EP2xTP2": CASES["EP2xTP2"].options,
    "TE ETP2xTP2": CASES["ETP2xTP2"].options,
    "grouped": ALONE,
    "grouped EP2": CASES["EP2"].options,
}
COMPARED = [
    ("qwen2", "lora", "TE TP2+SP"),
    ("qwen2", "lora", "TE PP2 recomputed"),
    ("qwen2", "lora, heads in full", "TE DP2+overlap"),
    ("qwen2", "dora", "TE"),
    ("deepseek_v3", "lora", "TE EP2xTP2"),
    ("deepseek_v3", "lora", "grouped EP2"),
    ("deepseek_v3", "dora", "TE"),
    ("deepseek_v3", "dora", "TE ETP2xTP2"),
    ("deepseek_v3", "dora", "grouped EP2"),
]
SLOW = COMPARED[:7]
"""Combinations whose tuner and layout are also those of others."""
Way = tuple[str, str, str]


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> dict[Way, Result]:
    """Return the results of two steps for each case, by family, tuner and name.

    "alone" is one process with local layers, which resumes from its checkpoint after two steps, when no B is zero. All
    other cases resume from the same checkpoint, except those that resume from a checkpoint of Transformer Engine.
    """
    root = tmp_path_factory.mktemp("adapters")
    models = {family: parity.make_model(root / family, family, tied=family == "qwen2") for family in FAMILIES}

    def job(family: str, tuner: str, name: str, begun: str = "begun", kernels: Kernels = Kernels()) -> Job:
        place = root / f"{family}, {tuner}"
        first = {"steps": (1, 2), "save": True}
        second = {"steps": (3, 4), "resume": place / begun / "checkpoint-2"}
        options = TUNERS[tuner] | LAYOUTS.get(name, ALONE)
        return Job(models[family], place / name, options, kernels=kernels, **(second if begun else first))

    starts: dict[tuple[bool, int], dict[Way, Job]] = {(False, 1): {}, (True, 1): {}, (False, 2): {}, (True, 2): {}}
    for family, tuner, name in selected(request, "family", "tuner", "name"):
        if name.startswith("TE") and te_stand_ins.missing():
            continue  # nor would anything be compared with its single process
        starts[False, 1][family, tuner, "begun"] = job(family, tuner, "begun", begun="")
        starts[False, 1][family, tuner, "alone"] = job(family, tuner, "alone")
        is_te, layout = name.startswith("TE"), LAYOUTS[name]
        its = job(family, tuner, name, kernels=TE if is_te else GROUPED)
        starts[is_te, 1 if layout is ALONE else 2][family, tuner, name] = its
    starts[True, 1][EXPERTS, "dora", "TE begun"] = job(EXPERTS, "dora", "TE begun", begun="", kernels=TE)
    starts[True, 1][EXPERTS, "dora", "TE goes on"] = job(EXPERTS, "dora", "TE goes on", "TE begun", TE)
    results: dict[Way, Result] = {}
    for (is_te, num_processes), chosen in starts.items():
        if not is_te or not te_stand_ins.missing():
            launcher = te_stand_ins.launch if is_te else launch
            results |= zip(chosen, parity.run(num_processes, list(chosen.values()), launcher), strict=True)
    if not te_stand_ins.missing():
        way: Way = (EXPERTS, "dora", "local goes on")
        (results[way],) = parity.run(1, [job(*way, "TE begun")])
    return results


def needs(name: str) -> None:
    """Skip the test if it requires Transformer Engine's package and the package is not installed."""
    if name.startswith("TE") and (reason := te_stand_ins.missing()):
        pytest.skip(reason)


@pytest.mark.parametrize(("family", "tuner", "name"), all_but(COMPARED, *SLOW))
def test_kernels_change_roundings_of_adapters_alone(computed, family, tuner, name):
    needs(name)
    one = computed[family, tuner, "alone"]
    assert any("magnitude" in key for key in one.gradients) == (tuner == "dora")
    assert all(gradient.any() for key, gradient in one.gradients.items() if ".experts." not in key)
    assert beyond(one, computed[family, tuner, name]) == {}


def test_adapters_of_transformer_engine_go_on_beside_local_layers(computed):
    needs("TE")
    assert beyond(computed[EXPERTS, "dora", "TE goes on"], computed[EXPERTS, "dora", "local goes on"]) == {}


def streamed(hf_dir: Path, kernels: Kernels, port: int) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the tensors of a model with DoRA that an engine receives, by HF name, and whether the model is unchanged
    afterwards.
    """
    prepare_session(port)
    hf_config = read_config(hf_dir)
    family, heads = families.get(hf_config), Heads.from_config(hf_config)
    with session(tied_embeddings=True, timeout_minutes=2) as mesh:
        architecture = family.architecture(hf_config)
        model = build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=heads, kernels=kernels)
        load_hf(model, hf_dir, family, hf_config)
        add_adapters(model, Lora(4, 8.0, has_magnitudes=True, heads="lora"), family.rows(hf_config, heads.layers))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in sorted(model[0].named_parameters()):
            if is_adapter(name):
                parameter.data += torch.randn(parameter.shape, generator=generator) / 10
        before = {name: tensor.clone() for name, tensor in model[0].named_parameters()}
        buckets: list[dict[str, torch.Tensor]] = []
        with merged(model):
            buckets += stream_hf(model, family, hf_config, "trunk")
            buckets += stream_hf(model, family, hf_config, "heads")
        after = dict(model[0].named_parameters())
        is_restored = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        return {key: tensor for bucket in buckets for key, tensor in bucket.items()}, is_restored


def test_an_engine_is_given_the_same_bits(tmp_path):
    needs("TE")
    hf_dir = parity.make_model(tmp_path, EXPERTS, tied=True)
    stores = [open_store(), open_store()]
    ((expected, _),) = launch(1, streamed, hf_dir, Kernels(), stores[0].port)
    ((ours, is_restored),) = te_stand_ins.launch(1, streamed, hf_dir, TE, stores[1].port)
    base = load_file(hf_dir / "model.safetensors")
    assert is_restored
    assert {key for key in ours if not torch.equal(ours[key], expected[key])} == set()
    assert not torch.equal(
        ours["model.layers.1.self_attn.o_proj.weight"], base["model.layers.1.self_attn.o_proj.weight"]
    )
