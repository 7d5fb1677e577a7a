"""What computes a model's layers: options, and what this machine has, made into one frozen `Kernels`. No torch.

`model/kernels.py` turns it into modules. On a CPU everything but the default is refused; tests build the value itself.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftlite.args.config import Problem
from swiftlite.args.fields import KernelArgs, TransformerImpl
from swiftlite.errors import OptionError
from swiftlite.families.architecture import Architecture

PackedKernel = Literal["flash_attn", "torch_varlen"]
"""Who computes all sequences of a packed row in one call: the package flash-attn, or torch itself."""
CHUNK = 1024
"""Positions whose logits `model/chunked_loss.py` has in memory at one time, in float32."""
LARGEST_HEAD = 256
"""Channels of a head that these take."""
_WORDS = {
    "sdpa": "torch's scaled_dot_product_attention, a call for each sequence",
    "flash_attn": "flash-attn over packed rows, torch's scaled_dot_product_attention over padded ones",
    "torch_varlen": "torch's varlen_attn over packed rows, its scaled_dot_product_attention over padded ones",
    "te": "Transformer Engine's",
}
_UNSET = KernelArgs()


@dataclass(frozen=True)
class Kernels:
    """What computes a model's layers. By default what is computed on a CPU, as transformers does it, bit for bit.

    Attributes:
        transformer_impl: whose linear layers and norms they are.
        attention: whose core attention.
        is_fused: norms, activations and losses round elsewhere than transformers does, in fewer passes over memory.
    """

    transformer_impl: TransformerImpl = "local"
    attention: Literal["sdpa", "flash_attn", "torch_varlen", "te"] = "sdpa"
    is_fused: bool = False

    @property
    def described(self) -> dict[str, str]:
        """In words, for reports."""
        layers = "Transformer Engine" if self.transformer_impl == "transformer_engine" else "torch"
        fused = "RMSNorm, SwiGLU, loss in chunks" if self.is_fused else "none"
        return {"layers": layers, "attention": _WORDS[self.attention], "fused": fused}


@dataclass(frozen=True)
class Machine:
    """What there is to compute with."""

    is_cuda: bool = False
    has_transformer_engine: bool = False
    packed_kernel: PackedKernel | None = None


def this_machine(is_cuda: bool) -> Machine:
    """What is installed here; nothing is imported."""
    return Machine(is_cuda, importlib.util.find_spec("transformer_engine") is not None, _packed_kernel())


def _packed_kernel() -> PackedKernel | None:
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash_attn"
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    varlen = Path(torch.origin).parent / "nn" / "attention" / "varlen.py"
    # Its first releases take neither a scale nor groups of heads.
    text = varlen.read_text() if varlen.exists() else ""
    return "torch_varlen" if "enable_gqa" in text and "window_size" in text else None


def largest_head(architecture: Architecture | None) -> int:
    """Channels of the queries of a head; 0 where nothing is known of the model."""
    config = architecture.mcore_config() if architecture else {}
    if config.get("multi_latent_attention"):
        return config["qk_head_dim"] + config["qk_pos_emb_head_dim"]
    return config.get("kv_channels") or 0


def choose(args: KernelArgs, machine: Machine, *, is_float32: bool, head: int = 0) -> Kernels:
    """The kernels of a run; what `auto` stands for is decided here and nowhere else.

    Args:
        is_float32: the precision of the model; otherwise bfloat16.
        head: `largest_head` of the model.

    Raises:
        OptionError: what was asked for cannot be had here; there is no silent substitute.
    """
    if problems := list(kernel_problems(args, machine, is_float32=is_float32, head=head)):
        raise OptionError(problems)
    attention = "sdpa"
    if args.attention_backend == "te":
        attention = "te"
    elif machine.packed_kernel and not list(_without_packed_kernel(args, machine, is_float32, head)):
        attention = machine.packed_kernel if args.attention_backend in ("auto", "flash") else "sdpa"
    return Kernels(args.transformer_impl, attention, machine.is_cuda and args.fused_kernels == "auto")


def kernel_problems(args: KernelArgs, machine: Machine, *, is_float32: bool, head: int = 0) -> Iterator[Problem]:
    """What cannot be had; arguments as for `choose`."""
    if args.transformer_impl == "transformer_engine":
        flag = "--transformer_impl transformer_engine"
        if not machine.is_cuda:
            yield f"{flag}: its kernels run on NVIDIA GPUs, and torch finds none here", "leave it out"
        elif not machine.has_transformer_engine:
            hint = "pip install --no-build-isolation 'transformer-engine[pytorch]', or leave it out"
            yield f"{flag}: the package transformer-engine is not installed", hint
    elif args.attention_backend == "te":
        yield (
            "--attention_backend te is a part of Transformer Engine, but --transformer_impl is local",
            "add --transformer_impl transformer_engine",
        )
    if args.attention_backend == "flash":
        yield from _without_packed_kernel(args, machine, is_float32, head)


def _without_packed_kernel(args: KernelArgs, machine: Machine, is_float32: bool, head: int) -> Iterator[Problem]:
    """Why packed rows cannot go to one kernel."""
    flag, other = f"--attention_backend {args.attention_backend}", "use --attention_backend sdpa"
    if not machine.is_cuda:
        yield f"{flag}: such kernels run on NVIDIA GPUs, and torch finds none here", other
    elif machine.packed_kernel is None:
        yield f"{flag}: neither flash-attn nor a torch with varlen_attn is installed", other
    if is_float32:
        yield f"{flag} with --torch_dtype float32: such kernels compute in 16 bits", other
    if head > LARGEST_HEAD:
        yield f"{flag}: a head of this model has {head} channels, such kernels take {LARGEST_HEAD}", other


def automatic(is_cuda: bool, *, is_float32: bool, head: int = 0) -> Kernels:
    """The kernels of what has no options for them."""
    return choose(_UNSET, this_machine(is_cuda), is_float32=is_float32, head=head)
