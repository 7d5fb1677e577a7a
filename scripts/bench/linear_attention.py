"""Linear attention against transformers' layer of Qwen3-Next, both in plain torch: forward and backward pass.

    python scripts/bench/linear_attention.py
    python scripts/bench/linear_attention.py --length 4096 --hidden_size 1024 --heads 16

Both have the same weights and the same rows, and take turns. A figure is the median over the rounds; before it counts,
both results are compared.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CONFIG = {"num_layers": 1, "num_attention_heads": 2, "activation_func": "silu", "add_bias_linear": False}


def layers(args: argparse.Namespace, mesh: Any) -> tuple[Any, Any]:
    """Transformers' layer and ours, with the same weights."""
    from megatron.core.transformer.spec_utils import build_module
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    from swiftlite.families.linear_attention import GatedDeltaNet
    from swiftlite.model.build import build_config
    from swiftlite.model.specs import attention_spec

    sizes = GatedDeltaNet(args.hidden_size, args.heads // 2, args.heads, args.head_dim, args.head_dim, kernel=4)
    hf_config = Qwen3NextConfig(
        hidden_size=args.hidden_size,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.key_head_dim,
        linear_value_head_dim=sizes.value_head_dim,
        num_hidden_layers=4,
    )
    theirs = Qwen3NextGatedDeltaNet(hf_config, layer_idx=0)
    config = build_config(
        {**CONFIG, "hidden_size": args.hidden_size, "layernorm_epsilon": hf_config.rms_norm_eps},
        device=mesh.device,
        dtype=torch.float32,
        mtp_num_layers=0,
    )
    ours = build_module(attention_spec(sizes), config=config, layer_number=1, pg_collection=mesh.groups)
    tensors = theirs.state_dict()
    by_group = sizes.rows()[2].join.source_ranges([len(tensors["conv1d.weight"])], len(tensors["conv1d.weight"]), 1)
    tensors["conv1d.weight"] = torch.cat(
        [tensors["conv1d.weight"].narrow(0, piece.start, piece.length) for piece in by_group]
    )
    ours.load_state_dict(tensors)
    return theirs, ours


def measure(run: Callable[[], torch.Tensor]) -> float:
    """Seconds of a forward and a backward pass."""
    start = time.perf_counter()
    run().sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8, help="value heads; half as many of keys")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()

    from swiftlite.model.context_parallel import describe_packed
    from swiftlite.runtime.distributed import session

    with session() as mesh:
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        theirs, ours = layers(args, mesh)
        hidden_SBH = torch.randn(args.length, args.rows, args.hidden_size, requires_grad=True)
        packed_T1H = hidden_SBH.detach().transpose(0, 1).reshape(-1, 1, args.hidden_size).requires_grad_()
        short = torch.arange(0, args.rows * args.length + 1, args.length // 8, dtype=torch.int32)
        contestants: dict[str, Callable[[], torch.Tensor]] = {
            "transformers": lambda: theirs(hidden_SBH.transpose(0, 1)).transpose(0, 1),
            "swiftlite": lambda: ours(hidden_SBH)[0],
            "swiftlite, sequences of an eighth in one packed row": lambda: ours(
                packed_T1H, packed_seq_params=describe_packed(short)
            )[0],
        }
        torch.testing.assert_close(contestants["swiftlite"](), contestants["transformers"](), rtol=1e-4, atol=1e-4)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(args.rounds):
            for name, run in contestants.items():
                seconds[name].append(measure(run))
    num_tokens = args.rows * args.length
    theirs_median = statistics.median(seconds["transformers"])
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"{name:52} {num_tokens / median:8.0f} tokens/s   {theirs_median / median:.2f}x transformers")


if __name__ == "__main__":
    main()
