"""Adapters at every layout, against one process: gradients of A's and B's, and the checkpoint that all go on from."""

import pytest
import torch

from tests.parallel.parity import BOUNDS, CASES, FULL, Case, Job, compare, make_model, run

pytestmark = pytest.mark.gloo

LORA = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
# By family: layouts whose ranks exchange something else.
LAYOUTS = {
    "qwen2": ["TP2", "PP2 recomputed", "CP2+distopt"],  # tied embeddings, biases
    "deepseek_v3": ["TP2+SP", "EP2xTP2"],  # experts that are shared out or not, shared experts, latent attention
}
PLACES = CASES | {
    "PP2 recomputed": Case(2, CASES["PP2"].options | FULL["uniform 2"]),
    "CP2+distopt": Case(2, CASES["CP2"].options | {"use_distributed_optimizer": True}),
}


def test_a_layout_changes_no_adapter(tmp_path):
    """Two steps from where one process has saved after two, when no B is zero any more."""
    jobs: dict[int, dict[tuple[str, str], Job]] = {1: {}, 2: {}}
    for family, layouts in LAYOUTS.items():
        place = tmp_path / family
        hf_dir = make_model(place / "hf", family, tied=family == "qwen2")
        start = {"steps": (3, 4), "resume": place / "begun/checkpoint-2"}
        jobs[1][family, "begun"] = Job(hf_dir, place / "begun", LORA, steps=(1, 2), save=True)
        jobs[1][family, "alone"] = Job(hf_dir, place / "alone", LORA, **start)
        for name in layouts:
            case = PLACES[name]
            jobs[case.num_processes][family, name] = Job(hf_dir, place / name, LORA | case.options, **start)
    results = {}
    for num_processes, some in jobs.items():
        results |= dict(zip(some, run(num_processes, list(some.values())), strict=True))

    for family, layouts in LAYOUTS.items():
        one = results[family, "alone"]
        assert all(gradient.any() for key, gradient in one.gradients.items() if ".experts." not in key)
        zeros = {key: torch.zeros_like(tensor) for key, tensor in one.weights.items()}
        for name in layouts:
            found = compare(one, results[family, name], zeros)
            over = {figure: found[figure] for figure, bound in BOUNDS.items() if found[figure] > bound}
            assert not over, f"{family} {name}"
