"""Test training with matrix products in 8 and 4 bits: which layers use them, what is saved, and layouts against one
process.

Transformer Engine's Python code runs with stand-ins that quantize as its kernels do (`tests/te_stand_ins`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from swiftlite import families
from swiftlite.args.fields import RecomputeArgs
from swiftlite.base.errors import OptionError
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import collate
from swiftlite.model.build import build_model
from swiftlite.model.forward import forward
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.kernels import Kernels
from swiftlite.plan.low_precision import LowPrecision
from swiftlite.runtime.distributed import session
from tests import te_stand_ins
from tests.messages import naming
from tests.parallel import parity
from tests.parallel.launch import open_store, prepare_session
from tests.parallel.parity import CASES, FULL, TP2_SP, Job, Result
from tests.parallel.test_memory import config, measure

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(bool(te_stand_ins.missing()), reason=te_stand_ins.missing() or "there"),
]

TE = Kernels("transformer_engine", is_fused=True, has_grouped_experts=True)
PRECISIONS = {name: LowPrecision("hybrid", name) for name in ("tensorwise", "blockwise", "mxfp8")}
PRECISIONS["nvfp4"] = LowPrecision("e2m1", "nvfp4")
RECIPES = {name: replace(TE, low_precision=low) for name, low in PRECISIONS.items()}
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
    """With recomputation, on another stage, or with distributed experts, the same tensors are quantized together."""
    expected, found = computed[family, one].metrics, computed[family, other].metrics
    assert [step["loss"] for step in found] == [step["loss"] for step in expected]
    assert [step["mtp_1_loss"] for step in found] == [step["mtp_1_loss"] for step in expected]


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_adapters_leave_the_products_of_their_layers_in_low_precision(computed, family):
    """Adapters initially add zero.

    Their matrix products are not computed in 8 bits, which would not support a rank of 4.
    """
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
    """With three mantissa bits a number is rounded by up to 6 %, with one bit by up to 25 %.

    In sums over 64 products these errors average out. The loss of a random model is near 4.85; differences of up to 0.8
    % were measured.
    """
    plain, low = computed[family, "bf16"].metrics[0], computed[family, name].metrics[0]
    for loss in ("loss", "mtp_1_loss"):
        assert low[loss] == pytest.approx(plain[loss], rel=3e-2)
        assert low[loss] != plain[loss]
    assert low["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.1)


def modules_in_low_precision(hf_dir: Any, kernels: Kernels, port: int) -> tuple[list[str], list[str], bool]:
    """Return the names of Transformer Engine's layers that used low precision in one training step, and of those that
    did not.

    Also return whether rows of odd length are evaluated as without low precision.
    """
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
    with pytest.raises(AssertionError, match=naming("--fp8_format hybrid mxfp8")):
        te_stand_ins.launch(1, modules_in_low_precision, models["qwen3"], RECIPES["mxfp8"], store.port)


def available() -> dict[str, bool]:
    """Return whether Transformer Engine supports each recipe on this GPU."""
    from swiftlite.model.layers import te  # imports Transformer Engine

    found = {}
    for name, low in PRECISIONS.items():
        try:
            te.check_available(low)
            found[name] = True
        except OptionError:
            found[name] = False
    return found


@pytest.mark.parametrize("capability", ["8", "9", "10"])
def test_a_plan_refuses_what_transformer_engine_refuses(capability):
    (found,) = te_stand_ins.launch(1, available, capability=capability)
    planned = {name: low.capability <= int(capability) for name, low in PRECISIONS.items()}
    assert found == planned


# What `doctor --plan` says of memory, for models whose matrices are multiples of a block in both directions.
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 4}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
LATENT = {
    "head_dim": 32,
    "partial_rotary_factor": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
PLANNED = {
    "qwen3": config("qwen3", **SHAPE, num_key_value_heads=2),
    "glm4_moe": config("glm4_moe", **SHAPE | EXPERTS, num_key_value_heads=2),
    "deepseek_v3": config("deepseek_v3", **SHAPE | EXPERTS | LATENT),
}
MLP = RecomputeArgs("selective", recompute_modules=["mlp"])
MEASURED: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    HOPPER: [
        ("qwen3", "", {}),
        ("qwen3", "tensorwise", {}),
        ("qwen3", "blockwise", {}),
        ("qwen3", "blockwise", {"recompute": MLP}),
        ("qwen3", "blockwise", {"recompute": RecomputeArgs("full")}),
        ("qwen3", "blockwise", {"mtp_mode": "heads_only"}),
        ("glm4_moe", "", {}),
        ("glm4_moe", "blockwise", {}),
        ("deepseek_v3", "blockwise", {}),
    ],
    BLACKWELL: [("qwen3", "mxfp8", {}), ("qwen3", "nvfp4", {})],
}


def setup_of(recipe: str, options: dict[str, Any]) -> Setup:
    setup = Setup(micro_batch_size=2, max_length=256, heads=Heads(1), is_fused=True)
    return replace(setup, transformer_impl="transformer_engine", low_precision=PRECISIONS.get(recipe), **options)


def measure_all(setups: list[tuple[dict[str, Any], Setup]]) -> list[Any]:
    return [measure(hf_config, setup) for hf_config, setup in setups]


@pytest.mark.parametrize("capability", MEASURED)
def test_what_is_kept_is_what_is_planned(capability):
    """Tensors that autograd saves and copies of weights are counted, each storage once.

    1 % is allowed, because scales are aligned, and small tensors that do not grow with the hidden size are not
    estimated.
    """
    setups = [(PLANNED[model], setup_of(recipe, options)) for model, recipe, options in MEASURED[capability]]
    (found,) = te_stand_ins.launch(1, measure_all, setups, capability=capability)
    for (hf_config, setup), measured in zip(setups, found, strict=True):
        (estimated,) = estimate(hf_config, setup)
        assert measured.activations == pytest.approx(estimated.activations, rel=0.01)
        assert measured.quantized == pytest.approx(estimated.quantized, rel=0.001)
        assert measured.weights == estimated.weights
