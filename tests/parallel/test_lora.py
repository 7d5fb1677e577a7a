"""Adapters at every layout, against one process: gradients of A's, B's and magnitudes, and the checkpoint that all go
on from."""

import pytest
import torch

from tests.parallel.parity import BOUNDS, CASES, FULL, Case, Job, compare, make_model, run

pytestmark = pytest.mark.gloo

LORA = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
DORA = LORA | {"use_dora": True}
# By family and what is trained: layouts whose ranks exchange something else.
LAYOUTS: dict[tuple[str, str], list[str]] = {
    ("qwen2", "lora"): ["TP2", "PP2 recomputed", "CP2+distopt", "DP2"],  # tied embeddings, biases
    ("qwen2", "dora"): ["TP2", "PP2 recomputed"],
    # Experts that are shared out or not, shared experts, latent attention.
    ("deepseek_v3", "lora"): ["TP2+SP", "EP2xTP2"],
    ("deepseek_v3", "dora"): ["TP2+SP", "EP2xTP2", "ETP2xTP2"],
}
PLACES = CASES | {
    "PP2 recomputed": Case(2, CASES["PP2"].options | FULL["uniform 2"]),
    "CP2+distopt": Case(2, CASES["CP2"].options | {"use_distributed_optimizer": True}),
}


def test_a_layout_changes_no_adapter(tmp_path):
    """Two steps from where one process has saved after two, when no B is zero any more."""
    jobs: dict[int, dict[tuple[str, str, str], Job]] = {1: {}, 2: {}}
    for (family, kind), layouts in LAYOUTS.items():
        place = tmp_path / f"{family}-{kind}"
        options = DORA if kind == "dora" else LORA
        hf_dir = make_model(place / "hf", family, tied=family == "qwen2")
        start = {"steps": (3, 4), "resume": place / "begun/checkpoint-2"}
        jobs[1][family, kind, "begun"] = Job(hf_dir, place / "begun", options, steps=(1, 2), save=True)
        jobs[1][family, kind, "alone"] = Job(hf_dir, place / "alone", options, **start)
        for name in layouts:
            case = PLACES[name]
            job = Job(hf_dir, place / name, options | case.options, **start)
            jobs[case.num_processes][family, kind, name] = job
    results = {}
    for num_processes, some in jobs.items():
        results |= dict(zip(some, run(num_processes, list(some.values())), strict=True))

    for (family, kind), layouts in LAYOUTS.items():
        one = results[family, kind, "alone"]
        assert any("magnitude" in key for key in one.gradients) == (kind == "dora")
        assert all(gradient.any() for key, gradient in one.gradients.items() if ".experts." not in key)
        zeros = {key: torch.zeros_like(tensor) for key, tensor in one.weights.items()}
        for name in layouts:
            found = compare(one, results[family, kind, name], zeros)
            over = {figure: found[figure] for figure, bound in BOUNDS.items() if found[figure] > bound}
            assert not over, f"{family} {kind} {name}"
