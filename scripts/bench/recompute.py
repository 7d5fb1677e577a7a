"""Measure activation memory with and without recomputation.

Two values are measured: the memory that autograd stores in one forward pass, and the peak of this memory until the end
of the backward pass, which includes the layer that is being recomputed.

    python scripts/bench/recompute.py
    python scripts/bench/recompute.py --hidden_size 1024 --num_layers 16 --length 2048 --torch_dtype bfloat16

Prints one line per setting: MiB stored, peak MiB, and both relative to no recomputation; then the MiB stored by the MTP
layer. The bytes of storages that backward functions hold are counted, without weights. The result is the same on every
device with the same kernels.
"""

import argparse
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

MIB = 2**20
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "selective core_attn mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full uniform 1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "full uniform 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "full block 2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}


@dataclass
class _Kept:
    tensor: torch.Tensor

    __hash__ = object.__hash__  # weakref.finalize needs hashing by identity


class SavedActivations(saved_tensors_hooks):
    """Counts the bytes that autograd stores in this context, each storage once, without the model's weights.

    Attributes:
        now: bytes stored at the moment.
        peak: maximum of `now` so far.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__(self._pack, lambda kept: kept.tensor)
        self.now = self.peak = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._uses: Counter[int] = Counter()

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._use(storage.data_ptr(), storage.nbytes(), 1)
            weakref.finalize(kept, self._use, storage.data_ptr(), storage.nbytes(), -1)
        return kept

    def _use(self, address: int, num_bytes: int, change: int) -> None:
        was_held = self._uses[address] > 0
        self._uses[address] += change
        self.now += num_bytes * ((self._uses[address] > 0) - was_held)
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Figures:
    """Bytes stored by the forward pass, the peak of forward and backward pass, and bytes stored by one module."""

    kept: int
    peak: int
    module: int


def measure(model: torch.nn.Module, module: torch.nn.Module, forward) -> Figures:
    """Run `forward()`, which returns a scalar, and its backward pass.

    Args:
        module: a part of `model`, called once, whose stored bytes are counted separately.
    """
    saved, marks = SavedActivations(model), []
    hooks = [
        module.register_forward_pre_hook(lambda *_: marks.append(saved.now)),
        module.register_forward_hook(lambda *_: marks.append(saved.now)),
    ]
    with saved:
        loss = forward()
        kept = saved.now
        loss.backward()
    for hook in hooks:
        hook.remove()
    before, after = marks
    return Figures(kept, saved.peak, after - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--micro_batch_size", type=int, default=2)
    parser.add_argument("--torch_dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    from swiftlite import families
    from swiftlite.args.fields import RecomputeArgs
    from swiftlite.base.heads import Heads
    from swiftlite.model.build import build_model
    from swiftlite.model.inputs import ModelInputs, Target
    from swiftlite.runtime.distributed import session

    hf_config = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": args.hidden_size,
        "intermediate_size": 3 * args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": max(1, args.num_heads // 2),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": args.length,
    }
    with session() as mesh:
        device = mesh.device
        tokens = torch.arange(args.length, device=device.torch_device).expand(args.micro_batch_size, -1) % 1024
        positions = torch.arange(args.length, device=device.torch_device).expand_as(tokens)
        figures = {}
        for name, values in SETTINGS.items():
            [model] = build_model(
                families.get(hf_config).architecture(hf_config),
                hf_config,
                mesh=mesh,
                dtype=getattr(torch, args.torch_dtype),
                heads=Heads(1),
                recompute=RecomputeArgs(**values),
            )
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.02)

            def forward(model=model) -> torch.Tensor:
                losses = model(ModelInputs(tokens, positions), Target(tokens))
                return losses.main.loss_BS.sum() + losses.mtp[0].loss_BS.sum()

            figures[name] = measure(model, model.mtp.layers[0], forward)
    none = figures["none"]
    for name, figure in figures.items():
        print(
            f"{name:24} kept {figure.kept / MIB:8.1f} MiB ({figure.kept / none.kept:.2f})"
            f"  peak {figure.peak / MIB:8.1f} MiB ({figure.peak / none.peak:.2f})"
            f"  MTP layer {figure.module / MIB:7.2f} MiB ({figure.module / none.module:.2f})"
        )


if __name__ == "__main__":
    main()
