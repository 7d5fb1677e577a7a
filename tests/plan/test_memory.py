"""Test the estimate of `doctor --plan`: parameters against transformers' models, the rest against examples.

tests/parallel/test_memory.py compares it with measured memory.
"""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftlite.args.fields import ParallelLayout, RecomputeArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.families.index import FAMILIES, architecture_of
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.stage_memory import ModelOnRank
from swiftlite.plan.cost.suggestion import suggest
from tests.tiny import DSA, HYBRID, NEVER_TIED, WRAPPED, alternating, mimo_v2_flash, step3p5
from tests.tiny import LATENT as LATENT_FAMILIES

DENSE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = DENSE | {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
SHARED: dict[str, Any] = MOE | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT: dict[str, Any] = SHARED | {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "gemma3_text": DENSE
    | {"sliding_window_pattern": 3, "sliding_window": 64, "query_pre_attn_scalar": 32, "pad_token_id": None},
    "gemma4_text": DENSE | dict(FAMILIES["gemma4_text"].tiny, pad_token_id=None) | {"layer_types": alternating(8)},
    "gpt_oss": DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64, "pad_token_id": None},
    "qwen2": DENSE,
    "mimo": DENSE,
    "qwen3": DENSE,
    "exaone4": DENSE | {"sliding_window": 64, "sliding_window_pattern": 3},
    "olmo2": DENSE | {"pad_token_id": None},
    "olmo3": DENSE | {"pad_token_id": None, "sliding_window": 64},
    "phi3": DENSE | {"pad_token_id": None},
    "smollm3": DENSE | {"pad_token_id": None},  # of the whole vocabulary
    "qwen2_moe": MOE
    | {"num_experts": 8, "shared_expert_intermediate_size": 160, "mlp_only_layers": [2], "decoder_sparse_step": 1},
    "qwen3_moe": MOE | {"num_experts": 8, "mlp_only_layers": [2], "decoder_sparse_step": 1},
    "glm4_moe": SHARED | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "deepseek_v3": LATENT,
    "mimo_v2_flash": DENSE
    | mimo_v2_flash(DENSE)
    | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "attention_value_scale": 0.7,
        "sliding_window": 64,
        "sliding_window_size": 64,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "add_swa_attention_sink_bias": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "pad_token_id": None,
    },
    "step3p5": step3p5(DENSE),
    "minimax_m2": DENSE
    | {
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "rope_theta": 10000.0,
        "pad_token_id": None,
    },
    "deepseek_v32": LATENT | {"index_topk": 2048, "index_n_heads": 3, "index_head_dim": 32},
    "ernie4_5_moe": DENSE
    | {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 96,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "rope_theta": 10000.0,
        "pad_token_id": None,
    },
}
# The sizes of other families are those of tiny models. Latent and linear attention have the families above.
CONFIGS |= {
    name: DENSE | dict(family.tiny, pad_token_id=None)
    for name, family in FAMILIES.items()
    if name not in CONFIGS and name not in (*DSA, *HYBRID, *LATENT_FAMILIES, *WRAPPED)
}
CONFIGS["nemotron_h"] |= {"num_hidden_layers": 4, "layer_norm_epsilon": 1e-5}
for _name, _config in CONFIGS.items():
    CONFIGS[_name] = _config | {"model_type": _name}


def total(config: dict[str, Any], **setup: Any) -> int:
    return sum(stage.parameters for stage in estimate(config, Setup(**setup)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_those_of_transformers(family, tied):
    config = CONFIGS[family] | {"tie_word_embeddings": tied and family not in NEVER_TIED}
    own = {key: value for key, value in config.items() if key != "model_type"}
    if family in ("qwen2", "mimo"):
        own["head_dim"] = 16  # Qwen2 in transformers takes hidden_size / num_attention_heads
        config["head_dim"] = 16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model({"mimo": "qwen2"}.get(family, family), **own))
    # The expert bias of a router is a buffer in megatron-core. In transformers it is a buffer or not trained.
    counted = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    counted += [buffer.numel() for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    assert total(config) == sum(counted)


def test_deepseek_v3_itself():
    """671,026,404,352 is the number in the index of its files, without the MTP layer and the 58
    expert biases of 256.
    """
    config = CONFIGS["deepseek_v3"] | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
    }
    assert total(config) == 671_026_404_352


def test_a_mtp_layer_is_a_decoder_layer_in_a_frame():
    config = CONFIGS["llama"]
    one, two = total(config), total(config | {"num_hidden_layers": 9})
    frame = 2 * 128 * 128 + 3 * 128
    assert total(config, heads=Heads(2)) == one + 2 * (two - one + frame)
    features = Heads(1, kind="mtp_features", features=(1, 5))  # and the state of later drafts again
    assert total(config, heads=features) == one + (two - one + frame) + (2 + 1) * 128 * 128 + 2 * 128


PP4 = ParallelLayout(pipeline_model_parallel_size=4)


@pytest.mark.parametrize(("tied", "depth", "copies"), [(False, 0, 0), (False, 1, 1), (True, 0, 1), (True, 1, 1)])
def test_stages_hold_the_model_and_copies_of_the_embedding(tied, depth, copies):
    """A last stage with a tied output layer, or with MTP layers, holds a copy of the embedding; with both, one copy."""
    config = CONFIGS["qwen3"] | {"tie_word_embeddings": tied}
    split = total(config, layout=PP4, num_gpus=4, heads=Heads(depth))
    assert split == total(config, heads=Heads(depth)) + copies * 1000 * 128


def test_mimo_v2_flash_itself():
    """Its authors state 309 B parameters, and 0.33 B per head."""
    sizes = DENSE | {"vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}
    sizes |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}
    config = CONFIGS["mimo_v2_flash"] | sizes | mimo_v2_flash(sizes)
    config["hybrid_layer_pattern"] = [0 if number == 0 or number % 6 == 5 else 1 for number in range(48)]
    config["layer_types"] = None
    trunk = total(config)
    assert round(trunk / 1e9) == 309
    assert round((total(config, heads=Heads(3)) - trunk) / 3e9, 2) == 0.33


def test_minimax_m2_itself():
    """Its files have 228,703,644,928 numbers, including 62 expert biases of 256 and the scales of FP8 blocks of
    128 x 128. They therefore contain no MTP modules.
    """
    sizes = {"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "vocab_size": 200064}
    attention = {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64}
    config = CONFIGS["minimax_m2"] | sizes | attention | {"num_local_experts": 256, "num_experts_per_tok": 8}
    blocks_of_expert, blocks_of_attention = 3 * 12 * 24, 2 * 48 * 24 + 2 * 8 * 24
    other = 62 * (256 + 256 * blocks_of_expert + blocks_of_attention)
    assert total(config) + other == 228_703_644_928


@pytest.mark.parametrize(
    ("layout", "holds"),
    [
        ("Et*4|t*4mL", ["E t*4", "t*4 m L"]),
        ("Et*8|mL", ["E t*8", "m L"]),
        ("Et*2|t*2|t*2|t*2mL", ["E t*2 | t*2", "t*2 | t*2 m L"]),
        ("Et*4|t*4|m|L", ["E t*4 | m", "t*4 | L"]),
    ],
)
def test_a_layout_string(layout, holds):
    config = CONFIGS["qwen3"]
    two = ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
    stages = estimate(config, Setup(layout=two, num_gpus=2, heads=Heads(1)))
    assert [stage.holds for stage in stages] == holds
    is_second_copy = "E" not in next(part for part in layout.split("|") if "m" in part)
    assert sum(stage.parameters for stage in stages) == total(config, heads=Heads(1)) + is_second_copy * 1000 * 128


def test_tensor_parallel_ranks_share_all_but_norms():
    config = CONFIGS["qwen3"]
    norms = (8 * 2 + 1) * 128 + 8 * 2 * 32
    whole = total(config)
    half = total(config, layout=ParallelLayout(tensor_model_parallel_size=2), num_gpus=2)
    assert 2 * half - norms == whole


def test_expert_parallel_ranks_share_experts_alone():
    config, ranks = CONFIGS["glm4_moe"], ParallelLayout(expert_model_parallel_size=4)
    experts = 7 * 8 * 3 * 128 * 96
    assert total(config) - total(config, layout=ranks, num_gpus=4) == experts * 3 // 4


def test_gradients_and_optimizer_state():
    config = CONFIGS["llama"]
    n = total(config)
    (half,) = estimate(config, Setup())
    assert (half.weights, half.gradients, half.optimizer) == (2 * n, 4 * n, 12 * n)
    (single,) = estimate(config, Setup(parameter_bytes=4))
    assert (single.weights, single.gradients, single.optimizer) == (4 * n, 4 * n, 8 * n)
    (shared,) = estimate(config, Setup(num_gpus=4, use_distributed_optimizer=True))
    assert shared.optimizer == 12 * n // 4


def test_the_optimizer_state_of_experts_is_shared_by_fewer():
    """With 4 ranks and experts on 2 of them, two ranks hold the same experts, and all four the same
    other parameters.
    """
    config = CONFIGS["glm4_moe"]
    layout = ParallelLayout(expert_model_parallel_size=2)
    (stage,) = estimate(config, Setup(layout=layout, num_gpus=4, use_distributed_optimizer=True))
    experts = 7 * 4 * 3 * 128 * 96
    assert stage.optimizer == 12 * ((stage.parameters - experts) // 4 + experts // 2)
    twice = Setup(layout=layout, num_gpus=4, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    assert estimate(config, twice)[0].optimizer == 12 * ((stage.parameters - experts) // 2 + experts)


def test_moments_on_the_host():
    config = CONFIGS["llama"]
    n = total(config)
    setup = Setup(num_gpus=4, use_distributed_optimizer=True, offload_fraction=0.5)
    (stage,) = estimate(config, setup)
    assert (stage.optimizer, stage.main_weights) == (8 * n // 4, 4 * n // 4)
    assert (stage.offloaded, stage.host) == (4 * n // 4, 8 * n // 4)
    (whole,) = estimate(config, dataclasses.replace(setup, offload_fraction=0.0))
    assert whole.total - stage.total == stage.offloaded


def test_heads_only_keeps_nothing_of_the_trunk():
    config = CONFIGS["llama"]
    (joint,) = estimate(config, Setup(heads=Heads(1)))
    (heads,) = estimate(config, Setup(heads=Heads(1), mtp_mode="heads_only"))
    of_head = total(config, heads=Heads(1)) - total(config)
    assert heads.weights == joint.weights
    assert (heads.gradients, heads.optimizer) == (4 * of_head, 12 * of_head)
    deeper = CONFIGS["llama"] | {"num_hidden_layers": 16}
    assert estimate(deeper, Setup(heads=Heads(1), mtp_mode="heads_only"))[0].activations == heads.activations
    stages = estimate(config, Setup(layout=PP4, num_gpus=4, heads=Heads(1), mtp_mode="heads_only"))
    assert [stage.gradients > 0 for stage in stages] == [False, False, False, True]


def test_a_draft_vocabulary_keeps_fewer_logits():
    def logits(*draft_vocab: int) -> int:
        heads = Heads(1, draft_vocab=draft_vocab)
        (stage,) = estimate(CONFIGS["qwen3"], Setup(heads=heads, mtp_mode="heads_only", parameter_bytes=4))
        return stage.logits

    assert logits() == 1000 * 2048 * 4
    assert logits(*range(100)) == logits() // 10


def test_a_head_over_a_frozen_trunk_keeps_named_entries():
    """In bfloat16 without fused kernels, a norm stores a float32 input and the scale only if its
    input has a gradient.
    """
    setup = Setup(heads=Heads(2), mtp_mode="heads_only", max_length=100)
    model = ModelOnRank(architecture_of(CONFIGS["qwen3"]), setup)
    first, second = ({entry.name: entry.bytes for entry in model.draft_activations(head)} for head in range(2))
    frozen, learning = 100 * 2 * 128, 100 * (4 * 128 + 2 * 128 + 4)
    norms = ("enorm input", "hnorm input", "output norm input")
    assert [first[name] for name in norms] == [frozen, frozen, learning]
    assert [second[name] for name in norms] == [frozen, learning, learning]
    assert (first["token ids"], first["eh_proj input"]) == (0, 100 * 2 * 256)


def test_1f1b_keeps_a_forward_pass_for_every_stage_that_follows():
    stages = estimate(CONFIGS["llama"], Setup(layout=PP4, num_gpus=4))
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]


def test_interleaved_stages_keep_what_megatron_warms_up():
    """The expected number of forward passes in flight is that of megatron-core's warm-up plus 1.

    The warm-up has 2 (pp - rank - 1) + (virtual - 1) pp passes (get_pp_rank_microbatches in schedules.py of 0.16.1).
    """
    layout = ParallelLayout(pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2)
    stages = estimate(CONFIGS["llama"], Setup(layout=layout, num_gpus=4))
    assert [stage.in_flight for stage in stages] == [11, 9, 7, 5]


@pytest.mark.parametrize(("method", "number", "boundaries"), [("uniform", 1, 8), ("uniform", 3, 3), ("uniform", 20, 1)])
def test_full_recompute_keeps_the_input_of_every_span(method, number, boundaries):
    config = CONFIGS["llama"]
    recompute = RecomputeArgs("full", method, number)
    (full,) = estimate(config, Setup(recompute=recompute))
    (none,) = estimate(config | {"num_hidden_layers": 0}, Setup())
    cosines_and_sines = 2 * 2048 * 32 * 2
    assert full.activations - none.activations == boundaries * 2048 * 128 * 2 + cosines_and_sines


def test_block_recompute_leaves_the_other_layers():
    config = CONFIGS["llama"]
    (whole,), (block,) = (
        estimate(config, Setup(recompute=recompute))
        for recompute in (RecomputeArgs(), RecomputeArgs("full", "block", 3))
    )
    assert block.recomputed * 3 - 3 * 2048 * 128 * 2 == whole.activations - block.activations


def test_sequence_and_context_parallel_share_activations():
    config, length = CONFIGS["llama"], 4096
    setups = [
        Setup(layout=layout, num_gpus=2, max_length=length)
        for layout in (
            ParallelLayout(),
            ParallelLayout(tensor_model_parallel_size=2),
            ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=True),
            ParallelLayout(context_parallel_size=2),
        )
    ]
    alone, tensor, sequence, context = (estimate(config, setup)[0].activations for setup in setups)
    # Half of all, with keys and values of the other half, but without the tensor that held queries, keys and values.
    assert alone * 0.4 < context < alone * 0.6
    assert alone / 2 < sequence < tensor < alone


def test_an_unknown_model_type():
    with pytest.raises(UserError, match="gpt2"):
        estimate(DENSE | {"model_type": "gpt2"}, Setup())


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_a_suggestion_fits_and_what_stands_before_it_does_not(family):
    config = CONFIGS[family]
    setup = Setup(num_gpus=4, max_length=16384)
    whole = memory.largest(estimate(config, setup)).total
    gigabytes = whole / 1e9 / 3
    better = suggest(config, setup, gigabytes)
    assert better is not None
    assert memory.largest(estimate(config, better)).total <= memory.usable_bytes(gigabytes)
    shared = dataclasses.replace(setup, use_distributed_optimizer=True)
    assert memory.largest(estimate(config, shared)).total > memory.usable_bytes(gigabytes)
    assert better.layout.pipeline_model_parallel_size == 1  # no pipeline where recomputing or tensor parallel is enough


def test_a_suggestion_takes_more_gpus_where_these_are_too_few():
    better = suggest(CONFIGS["qwen3"], Setup(num_gpus=1, max_length=256), 0.01)
    assert better is not None
    assert better.num_gpus > 1


def test_nothing_is_suggested_where_nothing_fits():
    assert suggest(CONFIGS["qwen3"], Setup(), 1e-6) is None


def test_fused_kernels_keep_inputs_and_one_chunk_of_logits():
    """The expected bytes are written out for a dense bfloat16 layer with the sizes of Qwen3-8B.

    A token stores two norms (input, scale), the input of attention and of the MLP, queries, keys and values in one
    tensor, the attention output and its log-sum-exp, and three times the width of the MLP.
    """
    config = CONFIGS["llama"] | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 4}
    tokens = 8192
    plain, fused = (Setup(max_length=tokens, is_fused=is_fused) for is_fused in (False, True))
    deeper = config | {"num_hidden_layers": 5}
    of_layer = {
        setup.is_fused: estimate(deeper, setup)[0].activations - estimate(config, setup)[0].activations
        for setup in (plain, fused)
    }
    norms, inputs = 2 * (2 * 4096 + 4), 2 * 2 * 4096
    attention = 2 * (2 * 4096 + 1024 + 4096 + 2 * 1024) + 32 * 4
    assert of_layer[True] == tokens * (norms + inputs + attention + 2 * 3 * 12288)
    assert of_layer[True] < 0.75 * of_layer[False]
    assert estimate(config, plain)[0].logits == tokens * 151936 * (4 + 2)
    assert estimate(config, fused)[0].logits == 4096 * 151936 * 2
    assert estimate(config, dataclasses.replace(fused, parameter_bytes=4))[0].logits == 4096 * 151936 * 4
