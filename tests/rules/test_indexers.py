"""Test the rules of models with indexers: rows above `index_topk`, and the training of indexers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs, GkdArgs, GrpoArgs, PtArgs
from swiftlite.base.errors import OptionError
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


LONG: dict[str, Any] = {"model": "sparse", "max_length": 2 * TOPK}
HEADS: dict[str, Any] = {"mtp_mode": "heads_only", "mtp_num_layers": 1}
# Of six layers, 0, 1 and 5 have an indexer.
SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 2, "num_hidden_layers": 6, "model_type": "glm_moe_dsa"}


def about_indexers(args: Any) -> list[tuple[str, str]]:
    try:
        rules.check(args)
    except OptionError as error:
        return [(problem, hint) for problem, hint in error.problems if "index" in problem]
    return []


def change(model: Path, **config: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


@pytest.mark.parametrize(
    "args",
    [
        replace(SFT, **LONG),
        replace(SFT, **LONG, **HEADS),
        replace(SFT, **LONG, tuner_type="lora"),
        replace(SFT, **LONG, indexer_mode="joint", indexer_loss_coeff=0.1),
        replace(SFT, **LONG, indexer_mode="indexer_only"),
        PtArgs(**LONG, **FILES),
        DpoArgs(**LONG, **FILES),
        GrpoArgs(**LONG, reward_funcs=["format"], **FILES),
        planned(**LONG),
    ],
)
def test_rows_longer_than_index_topk(sparse, args):
    assert about_indexers(args) == []


UNROLLED = HEADS | {"mtp_unroll": 3}


@pytest.mark.parametrize(
    ("options", "named"), [(UNROLLED, "--mtp_unroll 3"), (HEADS | {"mtp_features": [0, 1, 2]}, "--mtp_features")]
)
def test_drafts_that_do_not_select(sparse, options, named):
    args = replace(SFT, **LONG, **options)
    ((problem, hint),) = about_indexers(args)
    assert mentions(problem, f"{named} --max_length {2 * TOPK} index_topk {TOPK}")
    assert mentions(hint, f"--max_length {TOPK}")
    assert not about_indexers(replace(args, max_length=TOPK))


STREAMED = HEADS | {"stream_trunk": True, "cache_trunk_states": "states"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pipeline_model_parallel_size": 2}, "--pipeline_model_parallel_size 2 3"),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*4|t*2L"},
            "--pipeline_model_parallel_layout 4",
        ),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*5|tL"}, ""),
        (STREAMED, "--stream_trunk"),
    ],
)
def test_shared_selections_stay_in_their_stage(sparse, options, named):
    change(sparse, **SHARED)
    found = about_indexers(replace(SFT, **LONG, **options))
    assert [mentions(problem, f"{named} --max_length {2 * TOPK}") for problem, _ in found] == [True] * bool(named)
    short = replace(SFT, **LONG | {"max_length": TOPK}, **options)
    assert not about_indexers(short)


@pytest.mark.parametrize(("model", "option"), [("teacher_model", "teacher"), ("ref_model", "ref")])
def test_stages_of_other_models(sparse, model, option):
    change(sparse, **SHARED)
    options: dict[str, Any] = {"model": "plain", model: "sparse", "max_length": 2 * TOPK, **FILES}
    args = GkdArgs(**options) if option == "teacher" else DpoArgs(**options)
    found = problems_of(replace(args, pipeline_model_parallel_size=2))
    assert [mentions(problem, f"--pipeline_model_parallel_size 2 --{model} {TOPK}") for problem, _ in found].count(
        True
    ) == 1
    assert not about_indexers(args)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (replace(SFT, indexer_mode="joint"), "joint"),
        (replace(SFT, model="sparse", indexer_mode="joint", tuner_type="lora"), "joint --tuner_type lora"),
        (replace(SFT, model="sparse", indexer_mode="indexer_only", **HEADS), "indexer_only --mtp_mode heads_only"),
        (DpoArgs(model="sparse", indexer_mode="indexer_only", **FILES), "indexer_only"),
        (replace(SFT, model="sparse", indexer_mode="indexer_only", moe_router_bias_update_rate=0.1), "indexer_only"),
        (
            replace(SFT, model="sparse", indexer_mode="indexer_only", moe_aux_loss_coeff=0.1),
            "indexer_only --moe_aux_loss_coeff",
        ),
        (replace(SFT, model="sparse", indexer_mode="indexer_only", mtp_num_layers=1, mtp_init="random"), "random"),
        (
            replace(SFT, model="sparse", max_length=TOPK, indexer_mode="joint", **UNROLLED | {"mtp_mode": "joint"}),
            "joint --mtp_unroll",
        ),
        (replace(SFT, model="sparse", max_length=TOPK, indexer_mode="joint", **UNROLLED), "joint --mtp_unroll"),
    ],
)
def test_indexers_that_cannot_be_trained(sparse, args, named):
    ((problem, _),) = about_indexers(args)
    assert mentions(problem, f"--indexer_mode {named}")


@pytest.mark.parametrize("name", ["k_norm", "weights_proj", "indexer.wk"])
@pytest.mark.parametrize("option", ["target_modules", "lora_modules_to_save"])
def test_indexers_are_not_trained(sparse, option, name):
    args = replace(SFT, model="sparse", max_length=TOPK, tuner_type="lora")
    assert rules.check(args) == []
    ((problem, hint),) = problems_of(replace(args, **{option: [name]}))
    assert mentions(problem, f"--{option} {name}")
    assert "k_norm" not in hint
