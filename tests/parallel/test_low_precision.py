"""Training with products of 8 and 4 bits: Transformer Engine's Python over stand-ins that quantise as its kernels do
(`tests/te_stand_ins`). Which layers compute so, what is saved, and layouts against one process.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from swiftlite import families
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import collate
from swiftlite.heads import Heads
from swiftlite.model.build import build_model
from swiftlite.model.forward import forward
from swiftlite.plan.kernels import Kernels, LowPrecision
from swiftlite.runtime.distributed import session
from tests import te_stand_ins
from tests.parallel import parity
from tests.parallel.launch import open_store, prepare_session
from tests.parallel.parity import CASES, FULL, TP2_SP, Job, Result

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(bool(te_stand_ins.missing()), reason=te_stand_ins.missing() or "there"),
]

TE = Kernels("transformer_engine", is_fused=True, has_grouped_experts=True)
RECIPES = {
    name: replace(TE, low_precision=LowPrecision("hybrid", name)) for name in ("tensorwise", "blockwise", "mxfp8")
}
RECIPES["nvfp4"] = replace(TE, low_precision=LowPrecision("e2m1", "nvfp4"))
HOPPER, BLACKWELL = "9", "10"
RECOMPUTED = FULL["uniform 2"]
DORA = {"tuner_type": "lora", "lora_rank": 4, "use_dora": True}
# (model, GPU, processes): what is computed there, by name.
RUNS: dict[tuple[str, str, int], dict[str, tuple[str, dict[str, Any]]]] = {
    ("qwen3", HOPPER, 1): {
        "bf16": ("", {}),
        "blockwise": ("blockwise", {}),
        "blockwise recomputed": ("blockwise", RECOMPUTED),
        "blockwise, adapters": ("blockwise", DORA),
        "blockwise, adapters recomputed": ("blockwise", DORA | RECOMPUTED),
        "tensorwise": ("tensorwise", {}),
    },
    ("qwen3", HOPPER, 2): {
        "blockwise PP2": ("blockwise", CASES["PP2"].options),
        "blockwise DP2": ("blockwise", CASES["DP2+overlap"].options),
        "tensorwise TP2+SP": ("tensorwise", TP2_SP),
    },
    ("qwen3", BLACKWELL, 1): {
        "mxfp8": ("mxfp8", {}),
        "nvfp4": ("nvfp4", {}),
        "nvfp4 recomputed": ("nvfp4", RECOMPUTED),
    },
    ("glm4_moe", HOPPER, 1): {
        "bf16": ("", {}),
        "blockwise": ("blockwise", {}),
        "blockwise, adapters": ("blockwise", DORA),
    },
    ("glm4_moe", HOPPER, 2): {
        "blockwise EP2": ("blockwise", CASES["EP2"].options),
        "blockwise, adapters EP2": ("blockwise", DORA | CASES["EP2"].options),
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: parity.make_model(root / family, family, 1) for family in ("qwen3", "glm4_moe")}


@pytest.fixture(scope="module")
def computed(models, tmp_path_factory) -> dict[tuple[str, str], Result]:
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for (family, capability, num_processes), runs in RUNS.items():
        jobs = []
        for name, (recipe, options) in runs.items():
            kernels = RECIPES[recipe] if recipe else TE
            options = {"torch_dtype": "bfloat16"} | options
            jobs.append(Job(models[family], root / family / name, options, steps=(1, 2), kernels=kernels))
        results = parity.run(num_processes, jobs, partial(te_stand_ins.launch, capability=capability))
        found |= {(family, name): result for name, result in zip(runs, results, strict=True)}
    return found


@pytest.mark.parametrize(
    ("family", "one", "other"),
    [
        ("qwen3", "blockwise", "blockwise recomputed"),
        ("qwen3", "blockwise, adapters", "blockwise, adapters recomputed"),
        ("qwen3", "nvfp4", "nvfp4 recomputed"),
        ("qwen3", "blockwise", "blockwise PP2"),
        ("glm4_moe", "blockwise", "blockwise EP2"),
    ],
)
def test_the_same_products_make_the_same_bits(computed, family, one, other):
    """Recomputed, on another stage, or with experts shared out: what is quantised together is the same."""
    expected, found = computed[family, one].metrics, computed[family, other].metrics
    assert [step["loss"] for step in found] == [step["loss"] for step in expected]
    assert [step["mtp_1_loss"] for step in found] == [step["mtp_1_loss"] for step in expected]


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_adapters_leave_the_products_of_their_layers_in_low_precision(computed, family):
    """They begin with nothing to add. Their own products are not of 8 bits, which take no rank of 4."""
    plain, adapted = (computed[family, name].metrics[0] for name in ("blockwise", "blockwise, adapters"))
    assert [adapted[loss] for loss in ("loss", "mtp_1_loss")] == [plain[loss] for loss in ("loss", "mtp_1_loss")]


def test_adapters_of_experts_that_are_shared_out(computed):
    one, other = (computed["glm4_moe", f"blockwise, adapters{layout}"] for layout in ("", " EP2"))
    assert [other.metrics[0][loss] for loss in ("loss", "mtp_1_loss")] == [
        one.metrics[0][loss] for loss in ("loss", "mtp_1_loss")
    ]
    # Products of adapters are rounded to bfloat16 once for each micro-batch, of which experts see two at a time here.
    found = parity.compare(one, other, one.weights)
    assert found["gradients"] < 1e-2
    assert any(gradient.any() for key, gradient in one.gradients.items() if ".experts." in key)


@pytest.mark.parametrize(
    ("one", "other", "bound"),
    [
        ("blockwise", "blockwise DP2", 0.0),
        # A matrix of which each rank has half has two scales where one process has one: as far as from bfloat16.
        ("tensorwise", "tensorwise TP2+SP", 1e-2),
    ],
)
def test_losses_of_the_first_step_at_layouts(computed, one, other, bound):
    expected, found = computed["qwen3", one].metrics[0], computed["qwen3", other].metrics[0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=bound)
    assert found["mtp_1_loss"] == pytest.approx(expected["mtp_1_loss"], rel=bound)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "blockwise"),
        ("qwen3", "tensorwise"),
        ("qwen3", "mxfp8"),
        ("qwen3", "nvfp4"),
        ("glm4_moe", "blockwise"),
    ],
)
def test_losses_are_near_those_of_bfloat16_and_not_the_same(computed, family, name):
    """Three bits behind the point are 6 % of a number, one bit 25 %; sums over 64 of them, and a random model's losses
    beside an even guess of 4.85: measured 0.1 to 1.1 %."""
    plain, low = computed[family, "bf16"].metrics[0], computed[family, name].metrics[0]
    for loss in ("loss", "mtp_1_loss"):
        assert low[loss] == pytest.approx(plain[loss], rel=3e-2)
        assert low[loss] != plain[loss]
    assert low["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.1)


def modules_in_low_precision(hf_dir: Any, kernels: Kernels, port: int) -> tuple[list[str], list[str], bool]:
    """Names of Transformer Engine's layers that computed in low precision in one training step, and of those that did
    not; and whether rows of an odd length are evaluated as if there were no low precision."""
    prepare_session(port)
    hf_config = read_config(hf_dir)
    family = families.get(hf_config)
    with session(tied_embeddings=False, timeout_minutes=2) as mesh:
        results = []
        for chosen in (kernels, TE):
            (model,) = build_model(
                family.architecture(hf_config),
                hf_config,
                mesh=mesh,
                dtype=torch.bfloat16,
                heads=Heads.from_config(hf_config),
                kernels=chosen,
            )
            load_hf([model], hf_dir, family, hf_config)
            samples = parity.make_samples(hf_config["vocab_size"])[:2]
            if chosen is kernels:
                flags = _train(model, collate(samples, pad_token_id=0, num_drafts=1, pad_to_multiple_of=32))
            model.eval()
            with torch.no_grad():
                odd = forward(model, collate(samples[:1], pad_token_id=0, num_drafts=1, pad_to_multiple_of=1))
            results.append(odd.main.loss_BS)
        return flags[True], flags[False], torch.equal(*results)


def _train(model: torch.nn.Module, batch: Any) -> dict[bool, list[str]]:
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "fp8_meta")}
    for name, module in model.named_modules():
        for linear, borrower in getattr(module, "borrowers", {}).items():
            layers[f"{name}.{linear}"] = borrower.linear
    losses = forward(model.train(), batch)
    (losses.main.loss_BS.sum() + losses.mtp[0].loss_BS.sum()).backward()
    flags: dict[bool, list[str]] = {True: [], False: []}
    for name, layer in layers.items():
        flags[layer.fp8].append(name)
    return flags


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_first_and_last_layers_stay_in_bfloat16_and_so_does_evaluation(models, family):
    store = open_store()
    ((low, plain, evaluates_alike),) = te_stand_ins.launch(
        1, modules_in_low_precision, models[family], RECIPES["blockwise"], store.port
    )
    assert {name.split(".layers.")[1].split(".")[0] for name in plain} == {"0", "3"}
    assert all(name.startswith(("decoder.layers.1.", "decoder.layers.2.", "mtp.layers.0.")) for name in low)
    assert {name.split(".")[0] for name in low} == {"decoder", "mtp"}
    assert ("mlp.experts.linear_fc2" in " ".join(low)) is (family == "glm4_moe")
    assert evaluates_alike


def test_what_a_gpu_has_no_kernels_for_is_refused(models):
    store = open_store()
    with pytest.raises(AssertionError, match="--fp8_format hybrid with mxfp8 scales"):
        te_stand_ins.launch(1, modules_in_low_precision, models["qwen3"], RECIPES["mxfp8"], store.port)
