"""Test the estimated time of a step against published figures, and properties that hold for any constants."""

import dataclasses
import itertools
import math
from dataclasses import dataclass, replace

import pytest

from swiftlite.args.fields import ParallelLayout, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.rows import Row
from swiftlite.families.architecture import Architecture, Outside
from swiftlite.families.attention import GroupedQueryAttention, LatentAttention
from swiftlite.families.index import architecture_of
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp
from swiftlite.families.rank import ParameterCount, Rank
from swiftlite.plan.cost.gpus import GPUS, gpu_named
from swiftlite.plan.cost.memory import largest, usable_bytes
from swiftlite.plan.cost.products import Product, products_of
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.software import Software
from swiftlite.plan.cost.speed import Step
from swiftlite.plan.cost.timing import bandwidth, collective_seconds, exchange_seconds, product_seconds
from swiftlite.plan.low_precision import LowPrecision
from tests.plan.test_memory import CONFIGS

H100 = GPUS["H100"]

MEGATRON = Software(
    products=0.62,  # Fitted. Also includes what the estimate of many GPUs ignores
    attention=0.47,  # cuDNN's on Hopper. Assumed
    layer_bytes=4.5,  # Fitted
    waits=0,
    logit_bytes=54,  # its own cross-entropy, pass by pass
    split_logit_bytes=54,
    gradient_bytes=8,  # added in the product
    vocabulary_products=3,
    exposed_tp=(0.5, 0.5),  # --tp-comm-overlap. Fitted
    exposed_sends=0,
)


@dataclass(frozen=True)
class PlainMlp(Mlp):
    """GPT's MLP: down(gelu(up(x)))."""

    def rows(self):
        up, down = (self.ffn, self.hidden), (self.hidden, self.ffn)
        return [Row("mlp.linear_fc1.weight", {"up": up}), Row("mlp.linear_fc2.weight", {"down": down})]

    def parameters(self, rank):
        return ParameterCount(2 * self.hidden * self.ffn // rank.tp)

    def activation_bytes(self, rank):
        return rank.tokens * 2 * self.ffn // rank.tp * rank.itemsize


@dataclass(frozen=True)
class Published:
    """A row of the weak-scaling table in Megatron-LM's README: H100, 4,096 tokens, vocabulary of 131,072, data parallel
    48.
    """

    size: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    teraflops: float
    """Teraflops per second and GPU. The table counts the whole attention matrix, not only its causal half."""

    def architecture(self) -> Architecture:
        head_dim = self.hidden // self.heads
        attention = GroupedQueryAttention(self.hidden, self.heads, self.heads, head_dim, head_dim)
        layer = Layer(attention, PlainMlp(self.hidden, 4 * self.hidden))
        return Architecture(Outside(self.layers, self.hidden, 131072, is_tied=False), (layer,) * self.layers)

    def estimate(self) -> float:
        """Return the estimated teraflops, counted as in the table.

        Micro-batches and virtual stages are not published, so the fastest values that fit are used.
        """
        architecture, found = self.architecture(), []
        for micro_batch, virtual in itertools.product((1, 2, 4), self.virtual_stages()):
            number = self.batch // 48 // micro_batch
            if virtual and number % self.pp:
                continue
            layout = ParallelLayout(self.tp, self.tp > 1, self.pp, virtual)
            setup = Setup(
                layout,
                num_gpus=self.gpus,
                use_distributed_optimizer=True,
                micro_batch_size=micro_batch,
                max_length=4096,
                is_fused=True,
            )
            step = Step(architecture, setup, H100, self.batch, MEGATRON)
            if largest(step.memory).total <= usable_bytes(80):
                found.append(step.seconds.total)
        of_layers = self.layers * (72 * self.hidden**2 + 12 * 4096 * self.hidden)
        flops = self.batch * 4096 * (of_layers + 6 * 131072 * self.hidden)
        return flops / (min(found) * self.gpus * 1e12)

    def virtual_stages(self) -> list[int | None]:
        of_rank = self.layers // self.pp
        divisors = [number for number in range(2, of_rank + 1) if of_rank % number == 0]
        return [None, *(divisors if self.pp > 1 else [])]


PUBLISHED = (
    Published("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8),
    Published("7.1B", 32, 4096, 30, 2, 1, 96, 192, 465.9),
    Published("16B", 48, 6144, 32, 4, 1, 192, 192, 489.1),
    Published("32B", 56, 7168, 48, 8, 1, 384, 192, 459.6),
    Published("70B", 64, 8192, 84, 8, 2, 768, 384, 419.7),
    Published("119B", 80, 10240, 92, 8, 4, 1536, 768, 420.5),
    Published("177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8),
    Published("314B", 128, 16384, 96, 8, 8, 3072, 1536, 474.4),
    Published("462B", 144, 18432, 112, 8, 16, 6144, 3072, 459.9),
)


# Fitted on six rows, 1.7B, 16B and 177B held back, over a coarse grid: _INNER_START, and MEGATRON's products,
# exposed_tp and layer_bytes (of two). Many combinations fit nearly as well, so none of the four means much alone.
# The three were kept from the fit, not from sight: which effects are counted, that the fastest micro-batch is taken,
# and attention's 0.47 (0.44 gave 11 % at 1.7B) were settled with all nine on the screen. So this is a weak check.
# Found: up to 6.0 % on the six; 9.2, 1.3 and 5.9 % on the three. The bound is the largest, rounded up.
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.size)
def test_published_figures(row):
    assert row.estimate() == pytest.approx(row.teraflops, rel=0.10)


QWEN3_1_7B = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
}
ON_H200 = Setup(micro_batch_size=2, max_length=4096, is_fused=True)
AS_MEASURED = Software(
    layer_bytes=10,  # norms 20 ms, rotary embeddings 10, SwiGLU 8; and 6 ms counted for sums and copies
    logit_bytes=38,  # 23 ms without matrix products
    vocabulary_products=4,  # the logits were computed twice
    waits=7,
)
"""swiftlite at commit 1b3c21d5, by the measured times of its kernels on an H200 (docs/en/gpu.md)."""


# Each constant is from its own measurement; nothing was fitted to the sums. Found: -0.7 % with one head, and +4.5 %
# without heads, of which no part was measured.
@pytest.mark.parametrize(("heads", "measured"), [(1, 25_069), (0, 27_836)])
def test_measured_speed_on_an_h200(heads, measured):
    setup = replace(ON_H200, heads=Heads(heads), has_flash2=True)
    step = Step(architecture_of(QWEN3_1_7B), setup, GPUS["H200"], 2, AS_MEASURED)
    assert step.tokens_per_second == pytest.approx(measured, rel=0.08)


def test_measured_parts_of_a_step_on_an_h200():
    """Milliseconds of kernels in the profile of the step with one head; matrix products are the rest of it."""
    setup = replace(ON_H200, heads=Heads(1), has_flash2=True)
    seconds = Step(architecture_of(QWEN3_1_7B), setup, GPUS["H200"], 2, AS_MEASURED).seconds
    logits = 2 * 8192 * 151936 * AS_MEASURED.logit_bytes / (0.85 * 4.8e12)
    assert 1e3 * seconds.attention == pytest.approx(58, rel=0.05)
    assert 1e3 * seconds.optimizer == pytest.approx(22, rel=0.05)
    assert 1e3 * seconds.idle == pytest.approx(23, rel=0.05)
    assert 1e3 * (seconds.products + seconds.vocabulary - logits) == pytest.approx(158, rel=0.05)


def test_kernels_of_today_are_faster_than_the_measured_ones():
    """cuDNN's attention, one pass over the logits, joint kernels of norms, and one wait."""
    before = Step(architecture_of(QWEN3_1_7B), replace(ON_H200, has_flash2=True), GPUS["H200"], 2, AS_MEASURED).seconds
    flash = Step(architecture_of(QWEN3_1_7B), replace(ON_H200, has_flash2=True), GPUS["H200"], 2).seconds
    today = Step(architecture_of(QWEN3_1_7B), ON_H200, GPUS["H200"], 2).seconds
    assert today.attention < flash.attention / 2 == before.attention / 2
    assert today.elementwise < before.elementwise / 2
    assert today.vocabulary < before.vocabulary / 1.5
    assert today.idle == pytest.approx(before.idle / 7)
    a100 = [Step(model(), replace(SETUP, has_flash2=flash), GPUS["A100"], 64).seconds for flash in (True, False)]
    assert a100[0].attention == a100[1].attention  # FlashAttention 2 is slow only on Hopper


LLAMA_8B, LLAMA_70B = (4096, 14336, 32, 32, 128256, Mlp), (8192, 28672, 64, 80, 128256, Mlp)
LLAMA_405B, LLAMA_405B_8 = (16384, 53248, 128, 126, 128256, Mlp), (16384, 53248, 128, 8, 128256, Mlp)
NEMOTRON_15B, NEMOTRON_340B = (6144, 24576, 48, 32, 256000, PlainMlp), (18432, 73728, 96, 96, 256000, PlainMlp)
PP8, ALL_STAGES = {"pipeline_model_parallel_size": 8}, "Et|(t*2|)*62tL"


def tp(size: int, cp: int = 1, **others) -> ParallelLayout:
    return ParallelLayout(size, size > 1, context_parallel_size=cp, **others)


@dataclass(frozen=True)
class Benchmark:
    """Seconds of a step that NVIDIA publishes in bfloat16 and FP8.

    The source is github.com/NVIDIA/dgxc-benchmarking, v25.04 (commit 741c886, llama3.1/README.md and
    nemotron/README.md; GB200: v25.05.05, c5c765f). FP8 uses delayed scaling in all layers, which quantizes in one pass
    like `blockwise`. Gradients are summed in bfloat16.
    """

    name: str
    model: tuple
    gpu: str
    num_gpus: int
    layout: ParallelLayout
    length: int
    micro_batch: int
    batch: int
    bf16: float
    fp8: float
    fp8_layout: ParallelLayout | None = None

    def estimate(self, low: LowPrecision | None) -> float:
        """Return the estimated seconds of a step."""
        hidden, ffn, heads, layers, vocab, mlp = self.model
        attention = GroupedQueryAttention(hidden, heads, 8, hidden // heads, hidden // heads)
        architecture = Architecture(
            Outside(layers, hidden, vocab, is_tied=False), (Layer(attention, mlp(hidden, ffn)),) * layers
        )
        layout = (self.fp8_layout or self.layout) if low else self.layout
        setup = Setup(
            layout,
            num_gpus=self.num_gpus,
            use_distributed_optimizer=True,
            micro_batch_size=self.micro_batch,
            max_length=self.length,
            is_fused=True,
        )
        software = replace(MEGATRON, gradient_bytes=4)
        return Step(architecture, replace(setup, low_precision=low), GPUS[self.gpu], self.batch, software).seconds.total


BENCHMARKS = (
    Benchmark("8B", LLAMA_8B, "H100", 8, tp(1, 2), 8192, 1, 128, 12.27, 9.33),
    Benchmark(
        *("70B", LLAMA_70B, "H100", 64),
        tp(4, 2, pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=5),
        *(8192, 1, 128, 14.66, 9.86),
        fp8_layout=tp(4, num_virtual_stages_per_pipeline_rank=5, **PP8),
    ),
    Benchmark("405B, 8 layers", LLAMA_405B_8, "H100", 32, tp(8, 2), 8192, 1, 64, 5.4, 3.53),
    Benchmark(
        *("405B", LLAMA_405B, "H100", 512),
        tp(8, 2, pipeline_model_parallel_layout=ALL_STAGES, **PP8),
        *(8192, 1, 256, 19.78, 12.37),
    ),
    Benchmark(
        *("405B, GB200", LLAMA_405B, "GB200", 128),
        tp(4, 2, pipeline_model_parallel_layout=ALL_STAGES, **PP8),
        *(8192, 1, 64, 9.347, 6.131),
    ),
    Benchmark("15B", NEMOTRON_15B, "H100", 16, tp(2), 4096, 2, 64, 2.66, 1.98),
    Benchmark(
        *("340B", NEMOTRON_340B, "H100", 256),
        tp(8, num_virtual_stages_per_pipeline_rank=12, **PP8),
        *(4096, 1, 64, 4.36, 2.93),
    ),
)
FP8 = LowPrecision("hybrid", "blockwise", 0, 0)


# Nothing was fitted to these. On H100 steps take 9 to 18 % too long in bfloat16 and 3 to 18 % in FP8, on GB200 12 and
# 20 % too short: 0.62 of the peak is from older figures, of H100 alone. Their ratio is within -1.1 and +10.3 %. Two
# choices were made with the figures known: that a tile starts no faster in FP8 (if it does, ratios are up to 14 % too
# high), and 4 bytes for gradients, which the recipes say (with 8: -1.2 to +9.3 %). The bounds are rounded up.
@pytest.mark.parametrize("row", BENCHMARKS, ids=lambda row: row.name)
def test_published_gain_of_fp8(row):
    bf16, fp8 = row.estimate(None), row.estimate(FP8)
    assert bf16 / fp8 == pytest.approx(row.bf16 / row.fp8, rel=0.11)
    assert bf16 == pytest.approx(row.bf16, rel=0.20)
    assert fp8 == pytest.approx(row.fp8, rel=0.20)


def model(hidden=4096, layers=32, ffn=14336, vocab=128256) -> Architecture:
    layer = Layer(GroupedQueryAttention(hidden, 32, 8, hidden // 32, hidden // 32), Mlp(hidden, ffn))
    return Architecture(Outside(layers, hidden, vocab, is_tied=False), (layer,) * layers)


NONE, FULL = RecomputeArgs(), RecomputeArgs(recompute_granularity="full")
SETUP = Setup(num_gpus=8, use_distributed_optimizer=True, max_length=4096, is_fused=True)


def step(architecture=None, gpu=H100, batch=64, *, recompute=NONE, **sizes) -> Step:
    layout = ParallelLayout(**sizes, sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1)
    setup = replace(SETUP, layout=layout, recompute=recompute)
    return Step(architecture or model(), setup, gpu, batch)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("rank", [Rank(rows=1, length=64), Rank(tp=2, ep=4, sequence_parallel=True, rows=1, length=64)])
def test_products_are_the_operations_that_layers_count(family, rank):
    for layer in architecture_of(CONFIGS[family]).layers:
        if layer.attention.is_recurrent:
            continue  # counts its chunks too, which are no layer's matrices
        macs = 0.0
        for product in products_of(layer, rank):
            # A rank's share of the tokens, or of the matrix.
            macs += product.tokens * product.number * product.size_out * product.size_in
        assert macs * rank.tp == layer.macs_per_token() * 64


def test_a_faster_gpu_is_faster():
    seconds = [step(gpu=GPUS[name]).seconds.total for name in ("A100", "H100", "B200")]
    assert seconds == sorted(seconds, reverse=True)
    more_memory_traffic = replace(H100, hbm=2 * H100.hbm)
    assert step(gpu=more_memory_traffic).seconds.elementwise == pytest.approx(step().seconds.elementwise / 2)


def test_the_bubble_shrinks():
    shares = [step(batch=batch, pipeline_model_parallel_size=4).seconds.pipeline / batch for batch in (16, 64, 256)]
    assert shares == sorted(shares, reverse=True)
    whole = step(pipeline_model_parallel_size=4)
    interleaved = step(pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=4)
    assert interleaved.seconds.pipeline < whole.seconds.pipeline
    assert step().seconds.pipeline == 0


def test_tensor_parallelism_is_worse_between_machines():
    def tensor_parallel(linked: int) -> float:
        gpu = replace(H100, linked=linked)
        return step(gpu=gpu, tensor_model_parallel_size=8).seconds.tensor_parallel

    assert tensor_parallel(linked=8) < tensor_parallel(linked=4) < tensor_parallel(linked=1)


def test_what_a_group_gets_of_links_and_network():
    link, network = H100.link, H100.network
    efficiency = bandwidth(H100, 8, 1) / link
    assert bandwidth(H100, 2, 4) == link * efficiency  # ranks 0 and 4 of a machine
    assert bandwidth(H100, 16, 8) == network * efficiency  # one rank on each machine
    assert bandwidth(H100, 16, 4) == 2 * network * efficiency
    inside, outside = exchange_seconds(H100, 8, 1, 1e9), exchange_seconds(H100, 16, 1, 1e9)
    assert outside > 4 * inside  # half leaves the machine, by a port nine times as slow


def test_small_products_are_less_efficient():
    def rate(size: int) -> float:
        return size**3 / product_seconds(H100, size, size, size)

    assert rate(512) < rate(2048) < rate(8192) < H100.peak_flops / 2
    tall = product_seconds(H100, 64, 8192, 8192)  # as long as reading the matrix
    assert tall >= 2 * 8192**2 / H100.hbm


def test_computing_again_takes_time():
    attention = step(recompute=RecomputeArgs(recompute_granularity="selective")).seconds
    mlps = step(recompute=RecomputeArgs(recompute_granularity="selective", recompute_modules=["mlp"])).seconds
    layers = step(recompute=FULL).seconds
    assert 0 == step().seconds.recompute < attention.recompute < mlps.recompute < layers.recompute
    # A forward pass beside one backward: a third of products, 1 / 3.5 of attention.
    forward = (layers.products + layers.elementwise) / 3 + layers.attention / 3.5
    assert layers.recompute == pytest.approx(forward, rel=0.1)


def test_a_block_recomputes_its_part():
    whole = step(recompute=FULL)
    part = step(recompute=replace(FULL, recompute_method="block", recompute_num_layers=8))
    assert part.seconds.recompute == pytest.approx(whole.seconds.recompute * 8 / 32)


def test_a_tiny_model_waits_for_its_launches():
    few_tokens = replace(SETUP, max_length=128)
    tiny = Step(model(hidden=128, layers=4, ffn=256, vocab=1000), few_tokens, H100, 64).seconds
    assert tiny.launches > 0
    assert tiny.total > 8 * 4 * 34 * 6e-6  # micro-batches x layers x kernels, six microseconds each
    assert step().seconds.launches == 0


def test_heads_alone_and_adapters_cost_less():
    joint = replace(SETUP, heads=Heads(1))
    alone = Step(model(), replace(joint, mtp_mode="heads_only"), H100, 64).seconds
    together = Step(model(), joint, H100, 64).seconds
    # The trunk forward instead of three times, and a layer of 33.
    assert 0.3 < alone.products / together.products < 0.4
    assert alone.total < together.total


def test_experts_in_one_product_are_faster():
    """There are 128 experts with 64 tokens each.

    One product fills the GPU; separate products fill a tenth of it each.
    """
    one_by_one = Product(tokens=64, size_out=1536, size_in=2048, number=128)
    grouped = replace(one_by_one, is_grouped=True)
    assert 2 * grouped.forward(H100) < one_by_one.forward(H100)
    assert 2 * grouped.backward(H100) < one_by_one.backward(H100)
    assert grouped.forward(H100) > 2 * grouped.weights / H100.hbm  # reading them is the least


TE = replace(SETUP, transformer_impl="transformer_engine")


def test_layers_in_low_precision_are_faster_and_others_are_not():
    b200 = GPUS["B200"]
    whole = Step(model(), TE, b200, 64).seconds
    all_fp8 = Step(model(), replace(TE, low_precision=FP8), b200, 64).seconds
    half = replace(FP8, bf16_at_start=8, bf16_at_end=8)
    half_fp8 = Step(model(), replace(TE, low_precision=half), b200, 64).seconds
    nvfp4 = Step(model(), replace(TE, low_precision=LowPrecision("e2m1", "nvfp4", 0, 0)), b200, 64).seconds
    assert half_fp8.products == pytest.approx((whole.products + all_fp8.products) / 2)
    assert whole.products / 2 < all_fp8.products < whole.products / 1.6
    assert nvfp4.products < all_fp8.products
    assert all_fp8.vocabulary == whole.vocabulary  # the output layer stays in bfloat16
    assert all_fp8.attention == whole.attention
    assert all_fp8.elementwise > whole.elementwise  # what is quantized is read and written


def test_what_is_quantized_is_gathered_as_such():
    sizes = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    setup = replace(TE, layout=ParallelLayout(**sizes))
    gpu = replace(H100, link=1e9, linked=4)  # so slow that starting a message is nothing
    bf16, fp8 = (Step(model(), replace(setup, low_precision=low), gpu, 64).seconds for low in (None, FP8))
    # Of three exposed collectives of a half layer two gather: a byte, and four for each 128 of them, instead of two.
    assert fp8.tensor_parallel / bf16.tensor_parallel == pytest.approx((1 + 2 * (1 + 4 / 128) / 2) / 3, rel=1e-3)


def test_transformer_engine_adds_gradients_in_its_products():
    local, te = Step(model(), SETUP, H100, 64).seconds, Step(model(), TE, H100, 64).seconds
    assert te.elementwise < local.elementwise
    assert te.products == local.products


def test_gradients_hide_behind_many_micro_batches_no_better_than_behind_one():
    few, many = step(batch=8).seconds, step(batch=64).seconds
    assert few.data_parallel == many.data_parallel
    slow_network = replace(H100, network=1e9, linked=1)
    assert step(gpu=slow_network).seconds.data_parallel > 10 * many.data_parallel


def test_parts_are_the_whole():
    seconds = step(pipeline_model_parallel_size=2, tensor_model_parallel_size=2).seconds
    assert math.isclose(seconds.total, sum(dataclasses.astuple(seconds)))
    assert (seconds * 2).total == pytest.approx((seconds + seconds).total)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H200 NVL", "H200 NVL")],
)
def test_a_gpu_by_its_drivers_name(name, kind):
    assert gpu_named(name) is GPUS[kind]
    assert gpu_named("Matrox G200") is None


@pytest.mark.parametrize(("cp", "tp", "share"), [(2, 1, 0.5), (8, 1, 0.5), (2, 4, 0.6), (16, 1, 0.45), (4, 8, 0.2)])
def test_unfolding_a_whole_row_takes_less_than_gathering_its_heads(cp, tp, share):
    """Latent attention has the sizes of DeepSeek-V3 and 32,768 tokens, on H100s; the last two cases span machines."""
    attention = LatentAttention(7168, 128, 1536, 512, 128, 64, 128, {})
    rank = Rank(cp=cp, tp=tp, rows=1, length=32768 // cp)
    heads = 128 // tp
    assert attention.gathered(rank) == rank.tokens * (512 + 64) * 2

    def unfolding(tokens: int) -> float:
        product = Product(tokens, heads * (128 + 128), 512)
        return product.forward(H100) + product.backward(H100)

    of_heads = 2 * collective_seconds(H100, cp, tp, cp * rank.tokens * heads * (192 + 128) * 2)
    of_latent = 2 * collective_seconds(H100, cp, tp, cp * attention.gathered(rank))
    of_latent += unfolding(cp * rank.tokens) - unfolding(rank.tokens)
    assert of_latent / of_heads < share


def test_context_parallel_ranks_each_unfold_the_whole_row():
    attention = LatentAttention(7168, 128, 1536, 512, 128, 64, 128, {})
    layer = Layer(attention, Mlp(7168, 18432))
    alone, shared = (list(products_of(layer, Rank(cp=cp, rows=1, length=4096 // cp))) for cp in (1, 4))
    fewer = [one.tokens / other.tokens for one, other in zip(alone, shared, strict=True)]
    assert sorted(fewer) == [1] + [4] * (len(fewer) - 1)
