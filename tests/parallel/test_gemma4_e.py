"""Test layouts of a Gemma 4 whose layers have inputs of their own, and read keys and values of other layers.

With pipeline parallelism, both are sent from stage to stage.
"""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parallel.parity import BOUNDS, CASES, FULL, SIZES, SMALL, TP2_SP, Job, beyond, run_each
from tests.tiers import some_of
from tests.tiny import GEMMA4_E, make_tiny_hf

pytestmark = pytest.mark.gloo

# Layers 4 to 7 read keys of layers 2 and 3. With two virtual stages per rank, stages 2 and 3 read those of stage 1.
EIGHT = GEMMA4_E | {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
EIGHT |= {"num_kv_shared_layers": 4}
PP2, VPP = CASES["PP2"].options, CASES["PP2xVPP2"].options
LORA = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
HEADS = {"mtp_mode": "heads_only"}
# By layout: options of the run, and those of the layout.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TP2": ({}, CASES["TP2"].options),
    "TP2+SP": ({}, TP2_SP),
    "PP2": ({}, PP2),
    "PP2xVPP2": ({}, VPP),
    "PP2 recomputed": ({}, PP2 | FULL["uniform 2"]),
    "PP2 packed": ({"padding_free": True, "micro_batch_size": 2}, PP2),
    "PP2 heads": (HEADS, PP2),
    "CP2": ({}, CASES["CP2"].options),
    "PP2xTP2": ({}, CASES["PP2xTP2"].options),
    "LoRA PP2": (LORA, PP2),
    "LoRA TP2+SP": (LORA, TP2_SP),
}
DAILY = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2xVPP2")}
# One rounding of every weight of this model moves the gradient norm of the first step by up to 5.5e-6.
LIMITS = BOUNDS | {"grad_norm_1": 6e-6}


@pytest.mark.parametrize("cases", some_of([DAILY, LAYOUTS], DAILY), ids=["some", "all"])
def test_a_layout_changes_no_step(tmp_path, cases):
    hf_dir = make_tiny_hf(tmp_path / "hf", "gemma4_text", depth=1, tied=True, **(SIZES | EIGHT))
    jobs: dict[int, dict[str, Job]] = {1: {}, 2: {}, 4: {}}
    for name, (of_run, of_layout) in cases.items():
        case = CASES.get(name)
        jobs[case.num_processes if case else 2][name] = Job(
            hf_dir, tmp_path / name, SMALL | of_run | of_layout, steps=(1, 2)
        )
        alone = f"alone {sorted(of_run)}"
        jobs[1][alone] = Job(hf_dir, tmp_path / alone, SMALL | of_run, steps=(1, 2))
    results = run_each(jobs)
    source = load_file(hf_dir / "model.safetensors")
    for name, (of_run, _) in cases.items():
        one = results[f"alone {sorted(of_run)}"]
        assert beyond(one, results[name], None if of_run is LORA else source, LIMITS) == {}, name
