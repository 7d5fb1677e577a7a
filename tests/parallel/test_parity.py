"""Test a part of the parity table of scripts/parity.py: layouts and recomputation against one process."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.args.fields import ParallelLayout
from swiftlite.model.build import build_config
from swiftlite.runtime.device import Device
from tests.messages import mentions
from tests.parallel import parity
from tests.parallel.launch import launch
from tests.parallel.parity import BOUNDS, CASES, FEW_STEPS, FULL, SMALL, Job, Result
from tests.tiers import all_but, selected, some_of

pytestmark = pytest.mark.gloo

# (family, depth, tied) and its cases: each layout with a family or more, and families with the layouts that their kinds
# of layers treat differently. `scripts/parity.py` computes every family at every layout.
CHOSEN: dict[tuple[str, int, bool], tuple[str, ...]] = {
    ("llama", 1, False): ("TP2", "PP2xVPP2", "DP2+distopt", "DP4+instances"),
    ("qwen3", 2, True): (
        *("TP2+SP", "PP2", "CP2", "PP2xVPP2", "DP2+distopt", "DP2+instances+overlap"),
        *("PP2 MTP apart", "PP3 MTP middle"),
    ),
    ("mimo", 1, False): ("DP2+overlap", "DP2+instances+overlap", "PP2 MTP apart"),
    ("qwen3_moe", 1, False): ("EP2", "ETP2xTP2"),
    ("glm4_moe", 1, False): ("EP2xTP2", "DP2", "EP2+shared overlap", "EP2xTP2+allgather", "EP2+instances"),
    ("deepseek_v3", 1, False): ("TP2+SP", "PP2xTP2", "CP2xTP2"),
    ("qwen3_next", 1, False): ("EP2xTP2", "EP2xTP2+shared overlap", "CP2"),
    ("hy_v3", 1, False): ("PP2",),
    ("gemma3_text", 1, True): ("TP2+SP",),
    ("gemma4", 1, True): ("EP2xTP2", "PP2"),
    ("olmo2", 1, False): ("TP2+SP",),
    ("nemotron_h", 1, False): ("EP2xTP2", "PP2", "CP2"),
}
LAYOUTS = [(model, name) for model, names in CHOSEN.items() for name in names]
# Every kind of layout once, with the family whose layers it divides in the most parts.
DAILY = (
    (("qwen3", 2, True), "PP2"),
    (("qwen3", 2, True), "PP2xVPP2"),
    (("qwen3", 2, True), "DP2+instances+overlap"),
    (("qwen3_moe", 1, False), "ETP2xTP2"),
    (("glm4_moe", 1, False), "EP2xTP2"),
    (("deepseek_v3", 1, False), "PP2xTP2"),
    (("qwen3_next", 1, False), "CP2"),
    (("olmo2", 1, False), "TP2+SP"),
)
CLIPPED = ("EP2xTP2", "PP2")
RECOMPUTE = ("full uniform 2", "full block 1", "selective")
PIPELINED = ("uniform 1", "block 1")
HEADS = ("heads", "heads PP2", "heads PP2 MTP apart")
PP2 = CASES["PP2"].options
HEADS_ONLY = {"mtp_mode": "heads_only"}
BFLOAT16 = {"torch_dtype": "bfloat16"}
Model = tuple[str, int, bool]


Z_LOSS = {"megatron_config": {"moe_z_loss_coeff": 0.1}}


@dataclass
class Computed:
    """Results of all jobs by model and name; one process is "alone"."""

    models: dict[Model, Path]
    results: dict[tuple[Model, str], Result]

    def differences(self, model: Model, name: str, base: str = "alone") -> dict[str, float]:
        source = load_file(self.models[model] / "model.safetensors")
        return parity.compare(self.results[model, base], self.results[model, name], source)


QWEN3, MIMO, MIXTURE = ("qwen3", 2, True), ("mimo", 1, False), ("glm4_moe", 1, False)
LINEAR = ("qwen3_next", 1, False)
EXPERTS = ("qwen3_moe", 1, False)
RECOMPUTED = [(QWEN3, name) for name in RECOMPUTE]
RECOMPUTED += [(MIXTURE, "full uniform 1"), (MIXTURE, "selective"), (LINEAR, "full block 1")]
# Settings of --megatron_config that change when, or in which precision, numbers are sent. The sum of two numbers of
# bfloat16 is rounded in the same way in both precisions.
SETTINGS: dict[str, tuple[Model, dict, dict[str, bool]]] = {
    "overlapped flush": (QWEN3, CASES["PP2xVPP2"].options, {"overlap_p2p_comm_warmup_flush": True}),
    "sums in float32": (
        MIXTURE,
        BFLOAT16 | {"grad_reduce_in_bf16": True} | CASES["DP2+distopt"].options,
        {"reduce_scatter_with_fp32_accumulation": True},
    ),
}
# Both far below the norms that there are.
APART = {"clip_grad": 0.2, "mtp_clip_grad": 0.05}


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> Computed:
    root = tmp_path_factory.mktemp("parity")
    chosen = selected(request, "model", "name")
    names = selected(request, "name")
    heads = selected(request, "trunk", "name") + [(QWEN3, name) for name in names if name in HEADS]
    compared = {model for model, _ in chosen} | {QWEN3, MIXTURE, EXPERTS}
    models = {model: parity.make_model(root / "-".join(map(str, model)), *model) for model in {*compared, *dict(heads)}}
    jobs: dict[int, dict[tuple[Model, str], dict]] = {1: {(model, "alone"): {} for model in compared}, 2: {}}
    for model, name in chosen:
        if name in CASES:
            jobs.setdefault(CASES[name].num_processes, {})[model, name] = CASES[name].options
    jobs[2] |= {(QWEN3, f"PP2 {name}"): PP2 | FULL[name] for name in PIPELINED if name in names}
    # The same job once more, after many others in the same processes.
    jobs[2] |= {(QWEN3, name): PP2 for name in ("PP2", "PP2 again")}
    for trunk, name in heads:
        jobs[1][trunk, "heads"] = HEADS_ONLY
        if name != "heads":
            jobs[2][trunk, name] = HEADS_ONLY | CASES[name.removeprefix("heads ")].options
    jobs[1][EXPERTS, "apart"] = APART
    jobs[2] |= {(EXPERTS, f"apart {name}"): APART | CASES[name].options for name in selected(request, "layout")}
    jobs[1][MIXTURE, "bfloat16"] = BFLOAT16
    if "bfloat16 PP2" in names:
        jobs[2][MIXTURE, "bfloat16 PP2"] = BFLOAT16 | PP2
    rounded = BFLOAT16 | {"grad_reduce_in_bf16": True}
    jobs[1][MIXTURE, "bfloat16 gradients"] = rounded
    jobs[2][MIXTURE, "bfloat16 gradients DP2+distopt"] = rounded | CASES["DP2+distopt"].options
    for name, (model, options, settings) in SETTINGS.items():
        if name in names:
            jobs[2] |= {(model, f"without {name}"): options, (model, name): options | {"megatron_config": settings}}
    if "z-loss EP2" in names:
        jobs[1][MIXTURE, "z-loss"] = Z_LOSS
        jobs[2][MIXTURE, "z-loss EP2"] = Z_LOSS | CASES["EP2"].options
    results = {}
    for num_processes, started in jobs.items():
        queue = [
            Job(models[model], root / "runs" / "-".join(map(str, (*model, name))), SMALL | options, FEW_STEPS)
            for (model, name), options in started.items()
        ]
        results |= zip(started, parity.run(num_processes, queue), strict=True)
    return Computed(models, results)


def assert_within(differences: dict[str, float], bounds: dict[str, float]) -> None:
    assert [name for name, bound in bounds.items() if not differences[name] <= bound] == [], differences


EXACT = dict.fromkeys(BOUNDS, 0.0)


@pytest.mark.parametrize(
    ("model", "name"),
    some_of(LAYOUTS, *DAILY),
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_layout(computed, model, name):
    assert_within(computed.differences(model, name), parity.bounds_of(model[0]))


@pytest.mark.parametrize(
    ("model", "name"),
    some_of(RECOMPUTED, (MIXTURE, "selective"), (LINEAR, "full block 1")),
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_recomputation_changes_no_bit(computed, model, name):
    assert_within(computed.differences(model, name), EXACT)


@pytest.mark.parametrize("name", some_of(PIPELINED, "block 1"))
def test_recomputation_on_a_pipeline_changes_no_bit(computed, name):
    assert_within(computed.differences(QWEN3, f"PP2 {name}", base="PP2"), EXACT)


def test_jobs_leave_nothing_behind(computed):
    """Many jobs run one after another in the same processes, so a job must not leave any state behind."""
    assert_within(computed.differences(QWEN3, "PP2 again", base="PP2"), EXACT)


@pytest.mark.parametrize("name", all_but(HEADS, "heads PP2"))
def test_a_frozen_trunk_stays(computed, name):
    source = load_file(computed.models[QWEN3] / "model.safetensors")
    weights = computed.results[QWEN3, name].weights
    assert weights.keys() == source.keys()
    assert {key.startswith("mtp.") for key in source if not torch.equal(weights[key], source[key])} == {True}
    gradients = computed.results[QWEN3, name].gradients
    assert {key for key, gradient in gradients.items() if gradient.any()} == {
        key for key in source if key[:4] == "mtp."
    }


@pytest.mark.parametrize(
    ("trunk", "name"),
    some_of([(QWEN3, "heads PP2"), (QWEN3, HEADS[-1]), (MIMO, "heads PP2")], (QWEN3, HEADS[-1])),
)
def test_heads_alone_learn_the_same_on_a_pipeline(computed, trunk, name):
    assert_within(computed.differences(trunk, name, base="heads"), BOUNDS)


@pytest.mark.parametrize("layout", some_of(CLIPPED, "EP2xTP2"))
def test_heads_are_clipped_apart(computed, layout):
    """With --mtp_clip_grad, ranks with different experts and stages hold parts of both norms."""
    assert_within(computed.differences(EXPERTS, f"apart {layout}", base="apart"), BOUNDS)
    one, other = (computed.results[EXPERTS, job].metrics for job in ("apart", f"apart {layout}"))
    assert [step["mtp_grad_norm"] for step in other] == pytest.approx([step["mtp_grad_norm"] for step in one], rel=1e-5)


def test_each_norm_is_clipped_to_its_own_size(computed):
    unclipped, clipped = (computed.results[EXPERTS, job].gradients for job in ("alone", "apart"))

    def norms(gradients):
        squares = {True: 0.0, False: 0.0}
        for key, gradient in gradients.items():
            squares[key.startswith("mtp.")] += float(gradient.double().square().sum())
        return squares[True] ** 0.5, squares[False] ** 0.5

    heads, trunk = norms(unclipped)
    metrics = computed.results[EXPERTS, "apart"].metrics[0]
    assert metrics["mtp_grad_norm"] / metrics["grad_norm"] == pytest.approx(heads / trunk, rel=1e-5)
    assert norms(clipped) == pytest.approx((0.05, 0.2), rel=1e-4)


@pytest.mark.parametrize("name", some_of(["bfloat16 PP2"]))
def test_bfloat16_on_a_pipeline(computed, name):
    """A stage computes exactly what one process computes, so the losses of the first step are bitwise identical.

    Gradients of shared tensors are summed in another order before they are rounded to bfloat16 (2^-8 = 4e-3 of a
    number). Weights therefore differ from the second step on, and later losses are not compared.
    """
    one, two = computed.results[MIXTURE, "bfloat16"], computed.results[MIXTURE, name]
    losses = [name for name in one.metrics[0] if name.endswith("loss")]
    assert {name: one.metrics[0][name] for name in losses} == {name: two.metrics[0][name] for name in losses}
    differences = computed.differences(MIXTURE, name, base="bfloat16")
    assert_within(differences, {"grad_norm_1": 1e-5, "gradients": 2**-7})
    # Not float32 in disguise: precision shows against the float32 run.
    assert computed.differences(MIXTURE, "bfloat16")["loss"] > 1e-5


def test_gradients_in_bfloat16(computed):
    """Only the sums of gradients are rounded: each of 8 additions by at most 2^-9 of the sum so far."""
    names = ("bfloat16", *(f"bfloat16 gradients{layout}" for layout in ("", " DP2+distopt")))
    exact, *rounded = (computed.results[MIXTURE, name].metrics[0] for name in names)
    for metrics in rounded:
        assert metrics["loss"] == pytest.approx(exact["loss"], rel=1e-6)  # ranks sum the loss in another order
        assert metrics["grad_norm"] != exact["grad_norm"]
        assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=8 * 2**-9)


@pytest.mark.parametrize("name", some_of(SETTINGS, "sums in float32"))
def test_settings_of_megatron_core(computed, name):
    assert_within(computed.differences(SETTINGS[name][0], name, base=f"without {name}"), EXACT)


@pytest.mark.parametrize("name", some_of(["z-loss EP2"]))
def test_z_loss(computed, name):
    assert_within(computed.differences(MIXTURE, name, base="z-loss"), parity.bounds_of("glm4_moe"))
    assert computed.differences(MIXTURE, "z-loss")["gradients"] > 0.1


def test_refusals_are_the_rules(computed):
    dense, mixture = computed.models[QWEN3], computed.models[MIXTURE]
    assert mentions(parity.refusal(Job(dense, Path(), CASES["EP2"].options), 2), "--expert_model_parallel_size 2")
    assert mentions(parity.refusal(Job(mixture, Path(), CASES["TP2"].options), 2), "--tensor_model_parallel_size 2")
    assert not parity.refusal(Job(dense, Path(), CASES["TP2"].options), 2)


def test_a_wrong_number_shows(computed):
    """The comparison detects one gradient, one weight or one loss that is wrong by a thousandth."""
    one = computed.results[QWEN3, "alone"]
    source = load_file(computed.models[QWEN3] / "model.safetensors")
    key = "model.layers.3.self_attn.k_proj.weight"
    worse = Result(
        [step | {"mtp_2_loss": step["mtp_2_loss"] * 1.001} for step in one.metrics],
        one.gradients | {key: one.gradients[key] * 1.001},
        one.weights | {key: one.weights[key] + 0.002 * (one.weights[key] - source[key])},
    )
    found = parity.compare(one, worse, source)
    assert {name for name in BOUNDS if found[name] > BOUNDS[name]} == {"mtp_loss", "gradients", "weights"}


def break_a_copy(hf_dir: Path) -> bool:
    """Return whether a changed copy of the embedding is detected."""
    original = parity.check_embeddings

    def change_and_check(model) -> None:
        for chunk in model:
            if chunk.mtp_process:
                chunk.embedding.word_embeddings.weight.data[0, 0] += 1
        with pytest.raises(AssertionError, match="copies of the embedding differ"):
            original(model)

    parity.check_embeddings = change_and_check
    parity.compute(Job(hf_dir, hf_dir / "run", PP2, steps=(1, 1)))
    return True


def test_copies_of_the_embedding_are_compared(tmp_path):
    assert launch(2, break_a_copy, parity.make_model(tmp_path, "llama")) == [True, True]


def test_a_layout_string_may_have_spaces(device: Device):
    """megatron-core does not accept spaces in a layout string, so swiftlite removes them."""
    config = build_config(
        {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "activation_func": "silu"},
        device=device,
        dtype=torch.float32,
        mtp_num_layers=1,
        layout=ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E t*4, | m L"),
    )
    assert config.pipeline_model_parallel_layout is not None
