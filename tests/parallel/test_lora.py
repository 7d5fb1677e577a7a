"""Test adapters with every layout against one process: gradients of A, B and magnitudes, starting
from one checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.args.commands import SftArgs
from swiftlite.families.resolved import resolve
from swiftlite.model.layers.lora import Adapter, add_adapters
from swiftlite.model.open import open_model
from swiftlite.plan.heads import lora_of
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from swiftlite.train.trainer import seed_of_step
from tests.kinds import Layout
from tests.parallel.launch import launch
from tests.parallel.parity import CASES, FULL, SMALL, Job, beyond, bounds_of, make_model, run_each
from tests.tiers import some_of

pytestmark = pytest.mark.gloo

LORA = SMALL | {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8.0}
DORA = LORA | {"use_dora": True}
# By family and what is trained: layouts whose ranks exchange something else.
LAYOUTS: dict[tuple[str, str], list[str]] = {
    ("qwen2", "lora"): ["PP2 recomputed", "CP2+distopt"],  # tied embeddings, biases
    ("qwen2", "dora"): ["TP2"],
    # Experts that are shared out or not, shared experts, latent attention.
    ("deepseek_v3", "lora"): ["EP2xTP2"],
    ("deepseek_v3", "dora"): ["TP2+SP", "ETP2xTP2"],
    ("deepseek_v32", "lora"): ["EP2xTP2"],  # indexers, which have no adapters
    ("phi3", "lora"): ["TP2+SP"],  # one adapter for gate and up
    ("phi3", "dora"): ["TP2+SP"],
    ("gemma3_text", "lora"): ["TP2+SP"],  # norms of outputs
    ("gemma4", "lora"): ["EP2xTP2", "CP2+distopt"],  # keys as values, experts next to an MLP
    ("qwen2_moe", "lora"): ["EP2xTP2", "CP2+distopt"],  # biases, a gated shared expert
    ("ernie4_5_moe", "lora"): ["EP2xTP2"],  # heads that share the final norm, dense heads of a mixture
    ("minimax_m2", "lora"): ["EP2xTP2", "CP2+distopt"],  # experts with other names, norms of all queries and keys
    ("gpt_oss", "lora"): ["EP2xTP2", "CP2+distopt"],  # sinks; experts without adapters
    ("mimo_v2_flash", "lora"): ["EP2xTP2", "CP2+distopt"],  # values of another size, other heads with windows
    ("step3p5", "lora"): ["EP2xTP2", "CP2+distopt"],  # gates per head, other heads with output layers of their own
    ("olmo3", "lora"): ["CP2+distopt"],  # windows and two rotary embeddings
    ("olmo2", "lora"): ["TP2+SP"],  # norms of all queries and of all keys
}
CHOSEN = {("deepseek_v3", "dora"): ["ETP2xTP2"]}
PLACES = CASES | {
    "PP2 recomputed": Layout(2, CASES["PP2"].options | FULL["uniform 2"]),
    "CP2+distopt": Layout(2, CASES["CP2"].options | {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("cases", some_of([CHOSEN, LAYOUTS], CHOSEN), ids=["chosen", "all"])
def test_a_layout_changes_no_adapter(tmp_path, cases):
    """Two steps run from a checkpoint that one process has written after two steps, when no B is zero."""
    jobs: dict[int, dict[tuple[str, str, str], Job]] = {1: {}, 2: {}}
    for (family, kind), layouts in cases.items():
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
    results, differing = run_each(jobs), {}
    for (family, kind), layouts in cases.items():
        # DoRA divides by norms of rows, which ranks sum in another order: on a processor with AVX-512 up to 1.8e-6.
        bounds = bounds_of(family) | ({"grad_norm_1": 3e-6} if kind == "dora" else {})
        one = results[family, kind, "alone"]
        assert any("magnitude" in key for key in one.gradients) == (kind == "dora")
        assert all(gradient.any() for key, gradient in one.gradients.items() if ".experts." not in key)
        for name in layouts:
            if found := beyond(one, results[family, kind, name], bounds=bounds):
                differing[family, kind, name] = found
    assert differing == {}


def draw(layout: dict[str, Any], hf_dir: Path) -> dict[str, bytes]:
    """Return, for each adapter, which inputs of a step's first micro-batch are not dropped on this rank."""
    args = SftArgs(model=str(hf_dir), torch_dtype="float32", lora_dropout=0.5, **LORA, **layout)
    with session(layout_of(args), tied_embeddings=False) as mesh:
        hf_model = resolve(hf_dir)
        chunks, _ = open_model(hf_model, mesh, dtype=torch.float32, heads=hf_model.heads)
        lora = lora_of(args, hf_model.heads)
        assert lora is not None
        add_adapters(chunks, lora, hf_model.family.rows(hf_model.config, hf_model.heads.layers))
        torch.manual_seed(seed_of_step(42, 1))
        kept = {}
        for name, adapter in chunks[0].named_modules():
            if isinstance(adapter, Adapter):
                dropped = adapter.train().drop(torch.ones(16, 1, 64))
                assert set(dropped.unique().tolist()) == {0.0, 2.0}
                kept[name] = (dropped > 0).numpy().tobytes()
        return kept


@pytest.mark.parametrize("layout", ["TP2xPP2", "TP2+SP"])
def test_ranks_drop_alike_where_their_inputs_are_the_same(tmp_path, layout):
    """Without sequence parallelism, tensor-parallel ranks have the same input of column-parallel layers, so their masks
    are equal.

    For other layers, and on other stages and data-parallel ranks, inputs and masks differ.
    """
    parts = {"tensor_model_parallel_size": 2}
    parts |= {"pipeline_model_parallel_size": 2} if layout == "TP2xPP2" else {"sequence_parallel": True}
    hf_dir = make_model(tmp_path / "hf", "qwen3", depth=0)
    ranks = launch(4, draw, parts, hf_dir)
    assert len(ranks[0]) == (8 if layout == "TP2xPP2" else 16)
    for name in ranks[0]:
        first, second, *others = (rank[name] for rank in ranks)
        is_whole = layout == "TP2xPP2" and any(part in name for part in ("linear_qkv", "linear_fc1"))
        assert (first == second) == is_whole, name
        assert (others[0] == others[1]) == is_whole, name
        assert not {first, second} & set(others), name
    assert all(len(set(rank.values())) == len(rank) for rank in ranks)
