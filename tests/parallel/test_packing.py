"""Test that packed rows give the losses, gradients and metrics of the same samples one by one, for every kind of
layout.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.data.batch import collate_packed
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.inputs import ModelInputs, Target
from tests.model.test_logits import ROPES, load_megatron
from tests.parallel.packing import LONGEST, ROWS, Job, Result, make_rows, run
from tests.parallel.parity import sensitivity
from tests.tiers import selected, some_of
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LONGEST,
}
MODELS = [
    (family, depth)
    for family in ("llama", "mimo", "glm4_moe", "deepseek_v3", "qwen3_5", "gpt_oss")  # gpt_oss: windows and sinks
    for depth in (1, 2)
]
MODELS += [(family, depth) for family in ("ernie4_5_moe", "step3p5") for depth in (1, 2)]
FAMILIES = sorted({family for family, _ in MODELS})
# Stages and tensor-parallel ranks treat packed rows of all kinds of attention alike, and so does recomputation: linear
# attention has every case, latent attention those with two heads.
DIVIDED = RECOMPUTED = "qwen3_5"
MIXTURES = ("ernie4_5_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "step3p5")
DENSE = [(family, depth) for family, depth in MODELS if family in ("llama", "mimo")]
LAYOUTS: dict[str, dict] = {
    "CP2": {"context_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}
VPP2 = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
RECOMPUTE: dict[str, dict] = {
    "full": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}
NUM_SAMPLES = sum(map(len, ROWS))
CHANGED = 4
"""Number of the sample that is changed: the longest, followed by other samples in its row."""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[tuple, Result]:
    """Return results by family, depth and name."""
    root: Path = tmp_path_factory.mktemp("packing")
    jobs: dict[int, dict[tuple, Job]] = {1: {}, 2: {}}
    layouts, recomputed = (selected(request, "family", name) for name in ("layout", "kind"))
    needed = {*selected(request, "family", "depth")} | {(family, 1) for family, _ in recomputed}
    needed |= {(family, 2) for family, layout in layouts if layout == "PP2xVPP2"}
    for family, depth in [model for model in MODELS if model in needed]:
        model = make_tiny_hf(root / f"{family}-{depth}", family, depth, **SIZES)

        def add(num_processes: int, name: str, model=model, key=(family, depth), **options) -> None:
            jobs[num_processes][*key, name] = Job(model, model / name, **options)

        add(1, "one by one", rows="one by one")
        add(1, "packed")
        if depth == 1:
            add(1, "packed, changed", changed=CHANGED)
            for name, recompute in RECOMPUTE.items():
                if (family, name) in recomputed:
                    add(1, name, recompute=recompute)
        else:
            for name, layout in {**LAYOUTS, "PP2xVPP2": VPP2}.items():
                if (family, name) in layouts:
                    add(2, name, layout=layout)
            add(2, "CP2, changed", layout=LAYOUTS["CP2"], changed=CHANGED)
    longrope = make_tiny_hf(root / "longrope", "llama", 1, rope_parameters=ROPES["longrope"], **SIZES)
    jobs[1]["longrope", 1, "one by one"] = Job(longrope, longrope / "one by one", rows="one by one")
    jobs[2]["longrope", 1, "packed CP2"] = Job(longrope, longrope / "CP2", layout=LAYOUTS["CP2"])
    jobs[2]["longrope", 1, "padded PP2"] = Job(longrope, longrope / "PP2", rows="padded", layout=LAYOUTS["PP2"])
    return {
        key: result
        for num_processes, chosen in jobs.items()
        for key, result in zip(chosen, run(num_processes, list(chosen.values())), strict=True)
    }


def assert_same_losses(ours: Result, expected: Result, sensitivity: float = 1.0) -> None:
    for mine, its in zip(ours.losses, expected.losses, strict=True):
        # Sums in another order. Measured: 99 of 100 losses (of 3 to 11) are within 7e-6; the worst, of all families and
        # layouts, is off by 2e-5.
        torch.testing.assert_close(mine, its, rtol=0, atol=4e-5 * sensitivity)


def assert_same_gradients(ours: Result, expected: Result, sensitivity: float = 1.0) -> None:
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        # Sums over tokens in another order. Measured: up to 7e-6 of each tensor's largest entry, and 1.05e-5 for a bias
        # of keys, whose parts cancel but for the rotation.
        tolerance = 2e-5 * sensitivity * float(gradient.abs().max()) + 1e-9
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=0, atol=tolerance, msg=name)


PACKED = [
    (family, depth, layout) for family, depth in MODELS for layout in ["packed", *(LAYOUTS if depth == 2 else [])]
]


@pytest.mark.parametrize(
    ("family", "depth", "layout"),
    some_of(
        PACKED,
        *(case for case in PACKED if case[0] == DIVIDED),
        ("deepseek_v3", 2, "packed"),
        ("deepseek_v3", 2, "CP2"),
    ),
)
def test_packed_is_one_by_one(results, family, depth, layout):
    alone, packed = results[family, depth, "one by one"], results[family, depth, layout]
    assert len(alone.losses) == NUM_SAMPLES
    assert all(len(losses) == 1 + depth for losses in alone.losses)
    assert_same_losses(packed, alone, sensitivity(family))
    assert_same_gradients(packed, alone, sensitivity(family))
    assert packed.metrics == pytest.approx(alone.metrics, rel=1e-6 * sensitivity(family))


@pytest.mark.parametrize(("family", "depth"), some_of(DENSE, ("mimo", 1)))
def test_losses_of_a_dense_model_are_the_same_bits(results, family, depth):
    """The shortest sample is excluded, because matrices with few rows use another kernel."""
    alone, packed = results[family, depth, "one by one"], results[family, depth, "packed"]
    compared = [torch.equal(*pair) for pair in zip(packed.losses, alone.losses, strict=True) if pair[0].size(1) > 12]
    assert compared == [True] * 3


@pytest.mark.parametrize("layout", ["packed CP2", "padded PP2"])
def test_frequencies_that_depend_on_the_length(results, layout):
    """The frequencies depend on the length of the sequence and not on the longest in its row or micro-batch.

    One is longer than the 32 original positions.
    """
    alone, together = results["longrope", 1, "one by one"], results["longrope", 1, layout]
    assert_same_losses(together, alone)
    assert_same_gradients(together, alone)


@pytest.mark.parametrize("layout", ["PP2xVPP2"])
@pytest.mark.parametrize("family", some_of(FAMILIES, DIVIDED))
def test_virtual_stages_take_rows_of_any_length(results, family, layout):
    alone, packed = results[family, 2, "one by one"], results[family, 2, layout]
    assert_same_losses(packed, alone, sensitivity(family))
    assert_same_gradients(packed, alone, sensitivity(family))


@pytest.mark.parametrize("kind", RECOMPUTE)
@pytest.mark.parametrize("family", some_of(FAMILIES, RECOMPUTED))
def test_recomputation_changes_no_bit(results, family, kind):
    kept, recomputed = results[family, 1, "packed"], results[family, 1, kind]
    assert all(map(torch.equal, recomputed.losses, kept.losses))
    assert recomputed.metrics == kept.metrics
    assert all(torch.equal(recomputed.gradients[name], gradient) for name, gradient in kept.gradients.items())


@pytest.mark.parametrize(("depth", "layout"), [(1, "packed"), (2, "CP2")])
@pytest.mark.parametrize("family", some_of(FAMILIES, DIVIDED))
def test_other_tokens_in_a_sequence_change_nothing_in_another(results, family, depth, layout):
    before, after = results[family, depth, layout].losses, results[family, depth, f"{layout}, changed"].losses
    assert not torch.equal(before[CHANGED], after[CHANGED])
    for number in set(range(NUM_SAMPLES)) - {CHANGED}:
        if family not in MIXTURES:
            assert torch.equal(before[number], after[number])
        else:
            # The other tokens go to other experts, whose matrices have more or fewer rows: another kernel may multiply
            # them. That nothing passes between sequences is test_no_gradient_passes_between_sequences.
            torch.testing.assert_close(before[number], after[number])


@pytest.mark.parametrize(("family", "depth"), some_of(MODELS, (DIVIDED, 1), ("deepseek_v3", 2)))
def test_no_gradient_passes_between_sequences(mesh, tmp_path, family, depth):
    """Gradients are exactly zero. Comparing losses would not detect a very small influence of another sequence.

    This also holds for experts, because each token is routed separately without a capacity and an auxiliary loss.
    """
    model = load_megatron(make_tiny_hf(tmp_path, family, depth, **SIZES), mesh, torch.float32)
    [*_, row, _] = make_rows(128)
    batch = collate_packed(row, 3, num_drafts=depth, pad_each_to_multiple_of=4, pad_to_multiple_of=16)
    assert batch.cu_seqlens is not None
    embedded: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda *call: embedded.append(call[-1]))
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    assert len(bounds) == len(row) + 1
    for start, end in bounds:
        embedded.clear()
        losses = model(
            ModelInputs(
                batch.tokens_KBS[0], batch.position_ids_BS, packed_seq_params=describe_packed(batch.cu_seqlens)
            ),
            Target(batch.tokens_KBS[0]),
        )
        assert len(embedded) == 1 + depth
        total = torch.stack([head.loss_BS[:, start:end].sum() for head in (losses.main, *losses.mtp)]).sum()
        for gradient in torch.autograd.grad(total, embedded):
            touched = gradient[:, 0].abs().amax(-1) != 0
            assert touched[start:end].any()
            assert not touched[:start].any()
            assert not touched[end:].any()
