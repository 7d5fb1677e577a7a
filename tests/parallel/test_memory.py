"""Test the estimate of `doctor --plan` against the bytes of tensors, measured by scripts/bench/memory.py."""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from swiftlite.args.fields import ParallelLayout, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.families.reward_model import as_reward_model
from swiftlite.model.attention import rope, self_attention
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from tests.parallel.launch import launch
from tests.tiers import some_of
from tests.tiny import OWN_SIZES, mimo_v2_flash, step3p5
from tests.torchao_here import torchao as torchao

pytestmark = pytest.mark.gloo  # in processes of its own: a test session has one process group
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "memory.py"


@functools.cache
def bench():
    spec = importlib.util.spec_from_file_location("bench_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 32}


def config(family: str, **changes) -> dict:
    return bench().example(**SHAPE) | {"model_type": family} | changes


def measure(hf_config: dict, setup: Setup):
    return bench().measure(hf_config, setup)


EXACT = ("parameters", "weights", "gradients", "optimizer")


def check(measured, estimated) -> None:
    """Check that parameters, gradients and optimizer state are exact, and activations within 1 %.

    Small tensors that do not grow with the hidden size (indices, masks, loss weights) are not estimated.
    """
    assert {name: getattr(measured, name) for name in EXACT} == {name: getattr(estimated, name) for name in EXACT}
    if measured.activations is not None:
        assert estimated.activations == pytest.approx(measured.activations, rel=0.01)
        assert estimated.logits == measured.logits


ROWS: dict[str, Any] = {"micro_batch_size": 2, "max_length": 64}
ONE_HEAD: dict[str, Any] = ROWS | {"heads": Heads(1)}
Case = tuple[dict[str, Any], Setup]
KINDS = ["sliding_attention", "full_attention"]
ALTERNATING: dict[str, Any] = {
    "layer_types": KINDS * 2,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS},
}
"""Settings of Gemma 4 with four layers."""


def dense_cases() -> Iterator[Case]:
    for family, depth, size in (("llama", 0, 2), ("qwen2", 2, 4), ("qwen3", 2, 2), ("smollm3", 0, 4)):
        setup = Setup(**ROWS, parameter_bytes=size, heads=Heads(depth))
        yield config(family, tie_word_embeddings=depth == 2), setup
    # The layers of Gemma 3 share cosines and sines of two rotary embeddings, and masks, which are not estimated.
    sizes = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
    yield config("gemma3_text", **sizes, tie_word_embeddings=True), Setup(**ONE_HEAD, parameter_bytes=2)
    # In Gemma 4, values have norms, keys of some layers are values, and logits have a cap.
    sizes = OWN_SIZES["gemma4_text"] | ALTERNATING
    longer: dict[str, Any] = ONE_HEAD | {"max_length": 96}
    for size in (2, 4):
        yield config("gemma4_text", **sizes, tie_word_embeddings=True), Setup(**longer, parameter_bytes=size)
    # In E2B, layers have inputs of their own, and read keys and values of other layers.
    sizes |= {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512, "attention_k_eq_v": False}
    sizes |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    for size in (2, 4):
        yield config("gemma4_text", **sizes, tie_word_embeddings=True), Setup(**longer, parameter_bytes=size)
    # OLMo 2 has one norm each for all queries and all keys, and EXAONE 4 has layers without rotary embeddings.
    yield config("olmo2"), Setup(**ONE_HEAD, parameter_bytes=4)
    yield config("exaone4", sliding_window=16, sliding_window_pattern=2), Setup(**ONE_HEAD)
    yield config("qwen3"), Setup(**ONE_HEAD, mtp_mode="heads_only")
    for size in (2, 4):
        yield as_reward_model(config("qwen3")), Setup(**ROWS, parameter_bytes=size)
    for recompute in (
        RecomputeArgs("full", "uniform", 1),
        RecomputeArgs("full", "uniform", 2),
        RecomputeArgs("full", "block", 2),
        RecomputeArgs("selective"),
        RecomputeArgs("selective", recompute_modules=["mlp"]),
    ):
        yield config("qwen3"), Setup(**ROWS, recompute=recompute)


def expert_cases() -> Iterator[Case]:
    """For each selected expert, a token stores its input, the expert's inner activations and the expert's output.

    The output is needed for the gradient of the router's weight. Scores of Qwen2 MoE are normalized before the
    selection. The head of ERNIE 4.5 has no experts and no output norm.
    """
    for family in ("ernie4_5_moe", "minimax_m2", "qwen2_moe", "qwen3_moe"):
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        sizes |= {"norm_topk_prob": family == "qwen3_moe"}
        sizes |= {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
        if family == "qwen2_moe":
            sizes["shared_expert_intermediate_size"] = 128
        if family == "minimax_m2":
            sizes = OWN_SIZES["minimax_m2"] | {"num_local_experts": 8}
        # The matrices of these families' routers are float32 in a 16-bit model, too, which is not estimated.
        size = 4 if family in ("ernie4_5_moe", "minimax_m2") else 2
        hf_config = config(family, **sizes, decoder_sparse_step=1, mlp_only_layers=[])
        yield hf_config, Setup(micro_batch_size=2, max_length=256, heads=Heads(1), parameter_bytes=size)
    # Experts next to an MLP.
    sizes = OWN_SIZES["gemma4"] | ALTERNATING | {"num_experts": 8}
    for size in (2, 4):
        yield config("gemma4_text", **sizes), Setup(max_length=256, heads=Heads(1), parameter_bytes=size)


def window_cases() -> Iterator[Case]:
    """Masks of windows are not estimated: they contain the whole sequence, or are shared by all layers.

    With several rows, the attention of sinks on a CPU saves copies of values, instead of the whole projection.
    """
    # The activation of these experts saves only its input.
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "intermediate_size": 128}
    hf_config = config("gpt_oss", **OWN_SIZES["gpt_oss"] | sizes, rms_norm_eps=1e-5, attention_bias=True)
    for parameter_bytes in (2, 4):
        yield hf_config, Setup(max_length=64, parameter_bytes=parameter_bytes, heads=Heads(1))
    # Values are multiplied by a factor, so the whole projection is not saved. All layers have sinks, because torch on a
    # CPU saves the scores of other attention with values of another size.
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    own = sizes | OWN_SIZES["mimo_v2_flash"] | mimo_v2_flash(sizes)
    own |= {"hybrid_layer_pattern": [1, 1], "layer_types": ["sliding_attention"] * 2}
    hf_config = config("mimo_v2_flash", **own | {"sliding_window": 256, "sliding_window_size": 256})
    yield hf_config, Setup(max_length=256, parameter_bytes=4, heads=Heads(1))
    own = step3p5(SHAPE | {"num_attention_heads": 4}) | {"sliding_window": 128}
    yield config("step3p5", **own), Setup(max_length=128, parameter_bytes=4, heads=Heads(1))


def measure_all(cases: list[Case]) -> list[Any]:
    return [measure(*case) for case in cases]


@pytest.mark.parametrize("make_cases", [dense_cases, expert_cases, window_cases])
def test_one_process(make_cases):
    cases = list(make_cases())
    (found,) = launch(1, measure_all, cases)
    for (hf_config, setup), measured in zip(cases, found, strict=True):
        (estimated,) = estimate(hf_config, setup)
        check(measured, estimated)


def test_a_draft_vocabulary():
    heads = Heads(2, draft_vocab=tuple(range(0, 512, 8)))
    setup = Setup(micro_batch_size=2, max_length=512, parameter_bytes=4, heads=heads, mtp_mode="heads_only")
    (estimated,) = estimate(config("qwen3"), setup)
    (measured,) = launch(1, measure, config("qwen3"), setup)
    # The last positions of a row, 3 of 1024, have no label: the trunk says nothing of what follows.
    assert estimated.logits == pytest.approx(measured.logits, rel=0.005)
    assert estimated.activations == pytest.approx(measured.activations, rel=0.01)


@pytest.mark.parametrize(
    ("parameter_bytes", "rows", "recompute", "ranks"),
    [
        (4, 2, RecomputeArgs(), 1),
        (4, 1, RecomputeArgs("selective"), 1),
        (2, 2, RecomputeArgs(), 1),
        (4, 2, RecomputeArgs(), 2),
    ],
    ids=["float32", "one row, recomputed", "bfloat16", "TP2"],
)
def test_linear_attention(parameter_bytes, rows, recompute, ranks):
    """Rows consist of whole chunks, as the estimate assumes.

    A few float32 parameters of a 16-bit model (A_log, dt_bias) are counted without their float32 copies.
    """
    layout = ParallelLayout(tensor_model_parallel_size=ranks)
    sizes = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "vocab_size": 1024}
    sizes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    hf_config = config("qwen3_5_text", **OWN_SIZES["qwen3_5_text"] | sizes)
    setup = Setup(
        layout=layout,
        num_gpus=ranks,
        micro_batch_size=rows,
        max_length=128,
        parameter_bytes=parameter_bytes,
        recompute=recompute,
        heads=Heads(1),
    )
    (estimated,) = estimate(hf_config, setup)
    (measured, *_) = launch(ranks, measure, hf_config, setup)
    if parameter_bytes == 2:
        assert estimated.weights < measured.weights < estimated.weights * 1.001
        measured = replace(measured, weights=estimated.weights)
    check(measured, estimated)


MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 4, "conv_kernel": 4}
ONE_HALF: dict[str, Any] = OWN_SIZES["nemotron_h"] | MAMBA | {"layer_norm_epsilon": 1e-5, "vocab_size": 1024}
ONE_HALF |= {"layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"]}


@pytest.mark.parametrize(
    ("parameter_bytes", "recompute", "ranks"),
    [(4, RecomputeArgs(), 1), (4, RecomputeArgs("selective"), 1), (2, RecomputeArgs(), 1), (4, RecomputeArgs(), 2)],
    ids=["float32", "recomputed", "bfloat16", "TP2"],
)
def test_layers_with_one_half(parameter_bytes, recompute, ranks):
    """Those of Nemotron-H. The last chunk of a row stores less than the estimate. A few parameters of a 16-bit model
    are float32."""
    layout = ParallelLayout(tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1)
    setup = Setup(
        layout=layout,
        num_gpus=ranks,
        micro_batch_size=1,
        max_length=512,
        parameter_bytes=parameter_bytes,
        recompute=recompute,
        heads=Heads(1),
    )
    hf_config = config("nemotron_h", **ONE_HALF | {"num_hidden_layers": 5})
    (estimated,) = estimate(hf_config, setup)
    (measured, *_) = launch(ranks, measure, hf_config, setup)
    if parameter_bytes == 2:
        assert estimated.weights < measured.weights < estimated.weights * 1.001
        measured = replace(measured, weights=estimated.weights)
    if ranks > 1:
        measured = replace(measured, logits=estimated.logits)  # with sequence parallelism, a tensor more
    check(measured, estimated)


@pytest.mark.parametrize("ranks", [1, 2])
def test_indexers(ranks):
    """Indexers count as weights, without gradients and optimizer state. Every tensor-parallel rank has all of them.

    Two of their tensors are float32 in a 16-bit model, too, which is not estimated.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 24, "vocab_size": 1024}
    hf_config = config("deepseek_v32", **OWN_SIZES["deepseek_v32"] | sizes)
    layout = ParallelLayout(tensor_model_parallel_size=ranks, sequence_parallel=ranks == 2)
    setup = Setup(layout=layout, num_gpus=ranks, micro_batch_size=2, max_length=256, heads=Heads(1), parameter_bytes=4)
    (estimated,) = estimate(hf_config, setup)
    (measured, *_) = launch(ranks, measure, hf_config, setup)
    (without,) = estimate(hf_config | {"model_type": "deepseek_v3"}, setup)
    for name in EXACT:
        assert getattr(measured, name) == getattr(estimated, name)
    assert estimated.trained == without.trained
    assert estimated.activations == without.activations
    # Of four layers and a head, per layer: queries, keys, weights of heads, and a norm with a bias.
    per_layer = 3 * 16 * 24 + 16 * 128 + 3 * 128 + 2 * 16
    assert estimated.parameters - without.parameters == 5 * per_layer


@pytest.mark.parametrize(
    ("mode", "recompute"),
    [("frozen", "none"), ("frozen", "full"), ("joint", "none"), ("indexer_only", "none")],
)
def test_selections(mode, recompute):
    """Layers store the tokens that indexers select, and with recomputation only those that other layers use."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 24, "index_topk": 128}
    shared = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    hf_config = config("glm_moe_dsa", **OWN_SIZES["glm_moe_dsa"] | sizes | shared)
    setup = Setup(
        micro_batch_size=2,
        max_length=256,
        parameter_bytes=4,
        indexer_mode=mode,
        recompute=RecomputeArgs(recompute, "uniform", 1),  # type: ignore[arg-type]
    )
    (estimated,) = estimate(hf_config, setup)
    (measured,) = launch(1, measure, hf_config, setup)
    for name in EXACT:
        assert getattr(measured, name) == getattr(estimated, name)
    if mode == "frozen":
        whole = hf_config | {"index_topk": 256}
        (short,), (measured_short,) = estimate(whole, setup), launch(1, measure, whole, setup)
        difference = 2 * 2 * 256 * 128 * 4  # two layers select
        if recompute == "none":
            difference -= 4 * 2 * 256 * 4 * 4  # four layers do not store the statistics of the softmax, of four heads
        assert estimated.activations - short.activations == difference
        assert measured.activations - measured_short.activations == pytest.approx(difference, rel=0.01)


def test_gradients_in_bfloat16():
    setup = Setup(
        micro_batch_size=2,
        max_length=64,
        heads=Heads(1),
        num_gpus=2,
        use_distributed_optimizer=True,
        grad_reduce_in_bf16=True,
    )
    (estimated,) = estimate(config("qwen3", tie_word_embeddings=True), setup)
    (measured, _) = launch(2, measure, config("qwen3", tie_word_embeddings=True), setup)
    for name in ("weights", "gradients", "optimizer"):  # the distributed optimizer pads its buffers
        assert getattr(measured, name) == pytest.approx(getattr(estimated, name), rel=1e-3)
    assert estimated.gradients == 2 * estimated.parameters
    assert estimated.float32_gradients == estimated.optimizer / 3  # as large as the float32 weights


def test_instances_of_the_optimizer():
    """Each of two instances has one rank, which holds the whole state."""
    setup = Setup(num_gpus=2, max_length=64, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    (estimated,) = estimate(config("qwen3"), setup)
    for measured in launch(2, measure, config("qwen3"), setup):
        for name in ("weights", "gradients", "optimizer"):  # the distributed optimizer pads its buffers
            assert getattr(measured, name) == pytest.approx(getattr(estimated, name), rel=1e-3)
    assert estimated.optimizer == 12 * estimated.parameters


@pytest.mark.slow
def test_8bit_moments(torchao):
    hf_config = config("qwen3", vocab_size=4096)
    setup = Setup(num_gpus=2, use_distributed_optimizer=True, optimizer="adamw_8bit", heads=Heads(1))
    (estimated,) = estimate(hf_config, setup)
    for measured in launch(2, measure, hf_config, setup):
        for name in ("weights", "gradients"):  # the distributed optimizer pads its buffers
            assert getattr(measured, name) == pytest.approx(getattr(estimated, name), rel=1e-3)
        # Each matrix has two tables of 256 numbers, and small tensors have float32 moments: not counted.
        assert estimated.optimizer < measured.optimizer < 1.03 * estimated.optimizer
    assert estimated.optimizer - estimated.main_weights == int(estimated.parameters * 2 * (1 + 4 / 256) / 2)


@pytest.mark.parametrize(
    ("mtp_mode", "granularity"),
    some_of([("joint", "none"), ("joint", "selective"), ("heads_only", "full")], ("joint", "selective")),
)
def test_three_drafts_of_one_layer(mtp_mode, granularity):
    """The estimate is within 5 %. On a CPU, torch's attention stores a mask and concatenated keys
    for each later step.
    """
    recompute = RecomputeArgs(granularity)
    heads = Heads(1, unroll=3)
    setup = Setup(micro_batch_size=2, max_length=64, heads=heads, mtp_mode=mtp_mode, recompute=recompute)
    (estimated,) = estimate(config("qwen3"), setup)
    (measured,) = launch(1, measure, config("qwen3"), setup)
    assert estimated.activations == pytest.approx(measured.activations, rel=0.05)
    assert (estimated.logits, estimated.optimizer) == (measured.logits, measured.optimizer)


class OneKernel(torch.autograd.Function):
    """`F.rms_norm` as CUDA computes it: the input and a scale per row are saved (aten::_fused_rms_norm)."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, scale, weight)
        return (hidden.float() * scale * weight).to(hidden.dtype)


def measure_fused(hf_config: dict, setup: Setup):
    """Measure in a separate process, in which `OneKernel` replaces torch's norm, and the norm in the compiled rotation,
    which is not compiled on a CPU."""
    F.rms_norm = lambda hidden, shape, weight, eps: OneKernel.apply(hidden, weight, eps)  # type: ignore[assignment]

    def norm_and_rotate(channels, weight, rotary_emb, eps, is_zero_centered):
        assert not is_zero_centered
        return rope.rotate(OneKernel.apply(channels, weight, eps), rotary_emb)  # type: ignore[arg-type]

    self_attention.fused_norm_and_rotate = norm_and_rotate  # type: ignore[assignment]
    return measure(hf_config, setup)


@pytest.mark.parametrize(("mtp_mode", "parameter_bytes"), [("joint", 2), ("heads_only", 4)])
def test_fused_kernels(mtp_mode, parameter_bytes):
    """Norms, activations and losses store what a fused kernel stores. The logits of a chunk are not stored."""
    setup = Setup(
        micro_batch_size=2,
        max_length=64,
        parameter_bytes=parameter_bytes,
        heads=Heads(1),
        mtp_mode=mtp_mode,
        is_fused=True,
    )
    hf_config = config("qwen3")
    (estimated,) = estimate(hf_config, setup)
    (measured,) = launch(1, measure_fused, hf_config, setup)
    check(replace(measured, logits=estimated.logits), estimated)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ParallelLayout(tensor_model_parallel_size=2), id="TP2", marks=pytest.mark.slow),
        pytest.param(ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=True), id="TP2+SP"),
        pytest.param(ParallelLayout(pipeline_model_parallel_size=2), id="PP2", marks=pytest.mark.slow),
        pytest.param(
            ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*4|mL"),
            id="PP2 with MTP alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ParallelLayout(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2), id="PP2xVPP2"
        ),
    ],
)
def test_every_rank_of_a_layout(layout):
    tied = layout.pipeline_model_parallel_size > 1
    setup = Setup(layout=layout, num_gpus=2, micro_batch_size=2, max_length=64, heads=Heads(1))
    hf_config = config("qwen3", tie_word_embeddings=tied)
    estimated = estimate(hf_config, setup)
    for rank, measured in enumerate(launch(2, measure, hf_config, setup)):
        check(measured, estimated[rank if len(estimated) > 1 else 0])


def test_a_distributed_optimizer_shares_its_state():
    setup = Setup(num_gpus=2, micro_batch_size=2, max_length=64, use_distributed_optimizer=True)
    hf_config = config("qwen3")
    (estimated,) = estimate(hf_config, setup)
    ranks = launch(2, measure, hf_config, setup)
    for measured in ranks:
        # Buffers are padded, so that ranks share them in equal parts (param_and_grad_buffer.py of 0.16.1), and a
        # parameter may lie on both.
        assert estimated.gradients <= measured.gradients <= estimated.gradients * 1.01
        assert measured.optimizer == pytest.approx(estimated.optimizer, rel=0.01)
    assert sum(measured.optimizer for measured in ranks) == 2 * estimated.optimizer
    alone = estimate(hf_config, replace(setup, use_distributed_optimizer=False))[0]
    assert 2 * estimated.optimizer == alone.optimizer
