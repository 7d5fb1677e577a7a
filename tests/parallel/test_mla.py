"""Test gradients of multi-latent attention on tensor- and context-parallel ranks against one process, for all
parameters.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.spec_utils import build_module

from swiftlite.args.fields import ParallelLayout
from swiftlite.families import dense
from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.families.models import deepseek_v3
from swiftlite.model.attention.rope import RotaryEmbedding
from swiftlite.model.build import build_config
from swiftlite.model.context_parallel import describe_packed, shard_sequence, unshard_sequence
from swiftlite.model.layers.kernels import modules_of
from swiftlite.model.specs import attention_spec
from swiftlite.plan.kernels import Kernels
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from tests import flash_stand_ins
from tests.parallel.launch import launch
from tests.tiers import some_of

pytestmark = pytest.mark.gloo

HF_CONFIG = {
    "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "intermediate_size": 96, "num_hidden_layers": 1, "rope_theta": 10000.0, "vocab_size": 128,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "halves": {"rope_interleave": False},
    "q_direct": {"q_lora_rank": None},
    # One head per rank: the shared key's gradient is then a slice of that head's, and not contiguous to begin with.
    "one_head": {"num_attention_heads": 2, "rope_interleave": False},
}
LENGTH = 16
PACKED = (8, 0, 4, 4)
"""Lengths of the sequences of a packed row. Two context-parallel ranks share each sequence; one sequence is empty."""
Gradients = dict[str, torch.Tensor]


def attention(
    variant: str,
    mesh: Mesh,
    sequence_parallel: bool,
    kernels: Kernels = Kernels(),
    recomputed: Sequence[str] = (),
) -> tuple[Any, dict[str, Any]]:
    """Return the layer, and its arguments except hidden states.

    Args:
        recomputed: modules of the layer to recompute, as in --recompute_modules.
    """
    hf_config = HF_CONFIG | VARIANTS[variant]
    kind = deepseek_v3.attention(hf_config)
    architecture = Architecture(dense.outside(hf_config), (Layer(kind, dense.mlp(hf_config)),))
    mcore_config = architecture.mcore_config()
    config = build_config(mcore_config, device=mesh.device, dtype=torch.float32, mtp_num_layers=0)
    if recomputed:
        config.recompute_granularity, config.recompute_modules = "selective", list(recomputed)
    spec: Any = attention_spec(kind, modules_of(kernels))
    rotary = RotaryEmbedding(mcore_config["hf_rope"], mesh.device.torch_device, torch.float32)
    angles = {"rotary_pos_emb": rotary([LENGTH])}
    config.calculate_per_token_loss = True  # gradients are summed over ranks that share rows, as in training
    config.tensor_model_parallel_size, config.sequence_parallel = mesh.tp.size(), sequence_parallel
    config.context_parallel_size = mesh.cp.size()
    return build_module(spec, config=config, layer_number=1), angles


def fill(module: Any, tp_rank: int, tp_size: int) -> None:
    """Fill parameters with values that do not depend on the number of ranks: the whole parameter is
    drawn, then split.
    """
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        is_split = tp_size > 1 and getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        if is_split:
            shape[parameter.partition_dim] *= tp_size
        whole = (1.0 if "norm" in name else 0.0) + torch.randn(shape) * 0.2
        parameter.data.copy_(whole.chunk(tp_size, parameter.partition_dim)[tp_rank] if is_split else whole)


def whole(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def gradients(
    variant: str, mesh: Mesh, sequence_parallel: bool, packed: bool = False, rows: int = 2, **options: Any
) -> Gradients:
    """Return the gradients of a weighted sum of the outputs, after megatron-core's finalize_model_grads; also of the
    input.

    Args:
        options: options of `attention`.
    """
    module, arguments = attention(variant, mesh, sequence_parallel, **options)
    tp_rank, tp_size = mesh.tp.rank(), mesh.tp.size()
    fill(module, tp_rank, tp_size)
    wrapped = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)
    torch.manual_seed(1)
    rows = 1 if packed else rows
    hidden, weight = torch.randn(LENGTH, rows, 64), torch.randn(LENGTH, rows, 64)
    cu_seqlens = torch.tensor([0, *accumulate(PACKED)], dtype=torch.int32) if packed else None
    if packed:
        arguments["packed_seq_params"] = describe_packed(cu_seqlens)
        turns = arguments["rotary_pos_emb"]
        arguments["rotary_pos_emb"] = torch.cat([turns[:, :length] for length in PACKED], dim=1)
    share = partial(shard_sequence, rank=mesh.cp.rank(), size=mesh.cp.size(), cu_seqlens=cu_seqlens)
    hidden, weight = share(hidden, 0), share(weight, 0)
    if "rotary_pos_emb" in arguments:
        arguments["rotary_pos_emb"] = share(arguments["rotary_pos_emb"], 1)
    if sequence_parallel:
        hidden, weight = hidden.chunk(tp_size)[tp_rank], weight.chunk(tp_size)[tp_rank]
    hidden.requires_grad_()
    output, _ = wrapped(hidden, None, **arguments)
    (output * weight).sum().backward()
    finalize_model_grads([wrapped])
    assert hidden.grad is not None
    of_input = whole(hidden.grad, 0, mesh.tp) if sequence_parallel else hidden.grad
    parts = whole(of_input, 0, mesh.cp).chunk(mesh.cp.size())
    result = {"input": unshard_sequence(parts, 0, cu_seqlens) if mesh.cp.size() > 1 else of_input}
    for name, parameter in module.named_parameters():
        is_split = tp_size > 1 and getattr(parameter, "tensor_model_parallel", False)
        grad = parameter.main_grad  # type: ignore[attr-defined]
        result[name] = whole(grad, parameter.partition_dim, mesh.tp) if is_split else grad.clone()
    return result


def all_gradients(tp_size: int) -> dict[tuple[str, bool], Gradients]:
    with session(ParallelLayout(tensor_model_parallel_size=tp_size)) as mesh:
        results = {}
        for variant, sequence_parallel in product(VARIANTS, [False, True] if tp_size > 1 else [False]):
            results[variant, sequence_parallel] = gradients(variant, mesh, sequence_parallel)
        return results


def shared_gradients(layout: ParallelLayout) -> dict[tuple[str, bool], Gradients]:
    """Return gradients by variant and whether the row is packed."""
    with session(layout) as mesh:
        cases = product(VARIANTS, [False, True])
        return {(name, packed): gradients(name, mesh, layout.sequence_parallel, packed) for name, packed in cases}


SHARED = {
    "cp2": ParallelLayout(context_parallel_size=2),
    "cp2-tp2": ParallelLayout(context_parallel_size=2, tensor_model_parallel_size=2),
    "cp2-tp2-sp": ParallelLayout(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
}


@pytest.fixture(scope="module", params=some_of(SHARED, "cp2-tp2-sp"))
def shared(request) -> list[dict[tuple[str, bool], Gradients]]:
    """Return the gradients of one process, and of each rank of a layout."""
    layout = SHARED[request.param]
    ranks = layout.context_parallel_size * layout.tensor_model_parallel_size
    return [*launch(1, shared_gradients, ParallelLayout()), *launch(ranks, shared_gradients, layout)]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_over_shared_rows_are_those_of_one_process(shared, variant, packed):
    """Every rank up-projects the heads of all tokens, and computes the gradients from its own queries."""
    alone, *ranks = shared
    for rank in ranks:
        found = differences(alone[variant, packed], rank[variant, packed])
        assert max(found.values()) < BOUND, found


WAYS = {"a call for each segment": Kernels(), "a kernel for each": Kernels("local", "torch_varlen")}
RECOMPUTED = ((), ("mla_up_proj",), ("core_attn",), ("core_attn", "mla_up_proj"))


def recomputed_gradients() -> dict[tuple[str, Sequence[str]], Gradients]:
    """Return gradients by kernels and recomputed modules."""
    with session(ParallelLayout(context_parallel_size=2)) as mesh:
        library = flash_stand_ins.torch_on_cpu()
        found = {}
        for (way, kernels), modules in product(WAYS.items(), RECOMPUTED):
            options = {"rows": 1, "kernels": kernels, "recomputed": modules}
            found[way, modules] = gradients("pairs", mesh, False, **options)
        library._destroy()
        return found


def test_recomputed_heads_have_the_same_gradients():
    """Gradients are bitwise identical to those without context parallelism, although recomputation frees the heads'
    data.
    """
    for found in launch(2, recomputed_gradients):
        for way, modules in found:
            for parameter, grad in found[way, modules].items():
                assert torch.equal(grad, found[way, ()][parameter]), (way, modules, parameter)
        assert max(differences(*(found[way, ()] for way in WAYS)).values()) < BOUND


def gathered_numbers() -> list[int]:
    """Return, for each collective of a layer's forward pass over context-parallel ranks, the numbers that it gathers
    per token.
    """
    counted = []
    gather = dist.all_gather_into_tensor

    def counting(whole: torch.Tensor, *args: Any, **options: Any) -> Any:
        counted.append(whole.numel())
        return gather(whole, *args, **options)

    with session(ParallelLayout(context_parallel_size=2)) as mesh:
        module, arguments = attention("pairs", mesh, sequence_parallel=False)
        turns = shard_sequence(arguments["rotary_pos_emb"], 1, mesh.cp.rank(), mesh.cp.size())
        dist.all_gather_into_tensor = counting
        module(torch.randn(LENGTH // 2, 2, 64), None, rotary_pos_emb=turns)
    return [number // (2 * LENGTH // 2) for number in counted]


def test_the_latent_is_gathered_and_not_the_heads():
    """Per token, 32 numbers of the latent and 8 of the rotary key are gathered, instead of 4 heads of 24 and 12
    numbers.
    """
    for counted in launch(2, gathered_numbers):
        assert counted == [32 + 8, 32 + 8]


@pytest.fixture(scope="module")
def computed() -> tuple[dict, list[dict]]:
    """Return gradients of one process and of each of two ranks, by variant and sequence parallelism."""
    (alone,) = launch(1, all_gradients, 1)
    return alone, launch(2, all_gradients, 2)


def differences(one: Gradients, two: Gradients) -> dict[str, float]:
    """Return the largest difference of each gradient, relative to the gradient's largest number."""
    assert one.keys() == two.keys()
    return {name: float((two[name] - one[name]).abs().max() / one[name].abs().max()) for name in one}


# Sums in two halves: float32 rounding, measured 4e-7; a sum that is missing differs by 0.1 and more.
BOUND = 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2-sp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_one_process(computed, variant, sequence_parallel):
    alone, ranks = computed
    for rank in ranks:
        found = differences(alone[variant, False], rank[variant, sequence_parallel])
        assert max(found.values()) < BOUND, found
