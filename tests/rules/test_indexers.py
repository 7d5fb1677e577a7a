"""Test the rules of models with indexers: rows must not be longer than `index_topk`, and indexers are not trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs, GkdArgs, GrpoArgs, PtArgs
from tests.messages import mentions
from tests.planned import planned
from tests.rules.good import SFT, problems_of

TOPK = 1024
DSA: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "first_k_dense_replace": 1,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": TOPK,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "v_head_dim": 8,
}


@pytest.fixture
def sparse(here) -> Path:
    """Return a model with indexers, next to the files of `here`."""
    config = json.loads(Path("plain/config.json").read_text())
    Path("sparse").mkdir()
    Path("sparse/config.json").write_text(json.dumps(config | DSA))
    Path("sparse/model.safetensors").write_bytes(b"weights")
    return Path("sparse")


FILES: dict[str, Any] = {"dataset": ["train.jsonl"], "output_dir": "out"}


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (replace(SFT, model="sparse"), "--model"),
        (PtArgs(model="sparse", **FILES), "--model"),
        (DpoArgs(model="sparse", **FILES), "--model"),
        (DpoArgs(model="plain", ref_model="sparse", **FILES), "--ref_model"),
        (GkdArgs(model="plain", teacher_model="sparse", **FILES), "--teacher_model"),
        (GrpoArgs(model="sparse", reward_funcs=["format"], **FILES), "--model"),
        (planned(model="sparse"), "--model"),
    ],
)
def test_rows_longer_than_index_topk(sparse, args, option):
    found = [problem for problem in problems_of(args) if "index_topk" in problem[0]]
    ((problem, hint),) = found
    assert mentions(problem, f"--max_length 2048 {option} deepseek_v32 {TOPK} index_topk")
    assert mentions(hint, f"--max_length {TOPK}")


def test_rows_up_to_index_topk(sparse):
    """A packed row can be longer, because its sequences do not see each other."""
    args = replace(SFT, model="sparse", max_length=TOPK)
    assert rules.check(args) == []
    assert rules.check(replace(args, packing=True, packing_length=4 * TOPK)) == []
    assert problems_of(replace(args, max_length=TOPK + 1))


@pytest.mark.parametrize("name", ["k_norm", "weights_proj", "indexer.wk"])
@pytest.mark.parametrize("option", ["target_modules", "lora_modules_to_save"])
def test_indexers_are_not_trained(sparse, option, name):
    args = replace(SFT, model="sparse", max_length=TOPK, tuner_type="lora")
    assert rules.check(args) == []
    ((problem, hint),) = problems_of(replace(args, **{option: [name]}))
    assert mentions(problem, f"--{option} {name}")
    assert "k_norm" not in hint
