"""Compare the bytes that implementations of attention move, gather and store on two context-parallel ranks.

    python scripts/bench/context_parallel.py

The script runs on a CPU, with a stand-in for torch's kernel for packed rows that counts as one operation. It compares
swiftlite's implementation with two alternatives: gathering heads instead of latents, and copying keys that segments
share for a single kernel call.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is used
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from megatron.core.transformer.spec_utils import build_module
from torch.autograd.graph import saved_tensors_hooks

from swiftlite.args.fields import ParallelLayout
from swiftlite.families import dense
from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.families.models import deepseek_v3
from swiftlite.model import context_parallel
from swiftlite.model.attention import mla
from swiftlite.model.attention.rope import RotaryEmbedding
from swiftlite.model.build import build_config
from swiftlite.model.context_parallel import describe_packed, shard_sequence
from swiftlite.model.layers.kernels import modules_of
from swiftlite.model.specs import attention_spec
from swiftlite.plan.kernels import Kernels
from swiftlite.runtime.distributed import session
from tests import flash_stand_ins
from tests.model.traffic import Traffic
from tests.parallel.launch import launch

LENGTH, HIDDEN, SIZE = 512, 256, 2
COMMON = {"hidden_size": HIDDEN, "num_attention_heads": 8, "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6}
COMMON |= {"intermediate_size": 96, "num_hidden_layers": 1, "rope_theta": 10000.0, "vocab_size": 128}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 64}
# Heads of DeepSeek-V3's size; the latent is reduced in proportion to their number.
LATENT = COMMON | {"q_lora_rank": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT |= {"v_head_dim": 128}
PACKED = (64, 128, 320)


def measure(kind: str, lengths: tuple[int, ...], is_recomputed: bool, is_new: bool) -> dict[str, int]:
    """Return a layer's bytes on one rank: moved in forward and backward pass, received in the
    forward pass, and stored.
    """
    with session(ParallelLayout(context_parallel_size=SIZE)) as mesh:
        library = flash_stand_ins.torch_on_cpu()
        module, turns = make_layer(kind, mesh, is_recomputed, is_new)
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        packed = describe_packed(cu_seqlens)
        turns = shard_sequence(turns, 1, mesh.cp.rank(), SIZE, cu_seqlens)
        hidden = torch.randn(LENGTH // SIZE, 1, HIDDEN, requires_grad=True)

        def run() -> torch.Tensor:
            return module(hidden, None, rotary_pos_emb=turns, packed_seq_params=packed)[0]

        run().sum().backward()  # creates what is cached per row
        inputs = {tensor.untyped_storage()._cdata for tensor in (hidden, turns, *module.parameters())}
        kept = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        received = count_gathered()
        with Traffic() as traffic:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                out = run()
            gathered = sum(received) * (SIZE - 1) // SIZE
            # Counted here, after memory for recomputation has been freed.
            held = sum(kept[place].untyped_storage().nbytes() for place in kept if place not in inputs)
            out.sum().backward()
        library._destroy()
        return {"moved": sum(traffic.bytes.values()), "received": gathered, "kept": held}


def make_layer(kind: str, mesh: Any, is_recomputed: bool, is_new: bool) -> tuple[Any, torch.Tensor]:
    hf_config, attention = GROUPED, dense.attention(GROUPED)
    if kind == "latent":
        hf_config, attention = LATENT, deepseek_v3.attention(LATENT)
    architecture = Architecture(dense.outside(hf_config), (Layer(attention, dense.mlp(hf_config)),))
    mcore_config = architecture.mcore_config()
    config = build_config(mcore_config, device=mesh.device, dtype=torch.float32, mtp_num_layers=0)
    if is_recomputed:
        config.recompute_granularity, config.recompute_modules = "selective", ["mla_up_proj"]
    modules = modules_of(Kernels("local", "torch_varlen"))
    if not is_new:
        core: Any = modules.core_attention
        modules = replace(modules, core_attention=replace(core, params=core.params | {"prefix": None}))
        # Core attention gathers the heads.
        mla.MLASelfAttention._reads_rows = lambda self, attention_mask: False
    module = build_module(attention_spec(attention, modules), config=config, layer_number=1)
    rotary = RotaryEmbedding(mcore_config.get("hf_rope", hf_config), mesh.device.torch_device, torch.float32)
    return module, rotary([LENGTH])


def count_gathered() -> list[int]:
    """Return a list to which the bytes of each gathered row are appended."""
    counted: list[int] = []
    gather = context_parallel.dist.all_gather_into_tensor

    def counting(whole: torch.Tensor, *args: Any, **options: Any) -> Any:
        counted.append(whole.nbytes)
        return gather(whole, *args, **options)

    context_parallel.dist.all_gather_into_tensor = counting
    return counted


def largest(ranks: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    cases = [("grouped", False), ("latent", False), ("latent", True)]
    print("| attention | row | moved | received | kept |\n|---|---|---|---|---|")
    for kind, is_recomputed in cases:
        for lengths in ((LENGTH,), PACKED):
            old, new = (launch(SIZE, measure, kind, lengths, is_recomputed, is_new) for is_new in (False, True))
            before, after = largest(old), largest(new)
            ratios = " | ".join(f"{after[name] / before[name]:.2f}" for name in before)
            what, row = kind, "packed"
            if is_recomputed:
                what += ", mla_up_proj recomputed"
            if len(lengths) == 1:
                row = "one sequence"
            print(f"| {what} | {row} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
