"""Choose the kernels of a model's layers from options and the machine as one frozen `Kernels`. No torch.

`model/layers/kernels.py` selects the modules. On a CPU only the default is allowed; tests build other values directly.
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
from swiftlite.plan.low_precision import LowPrecision, low_precision_of, precision_problems

PackedKernel = Literal["flash_attn", "torch_varlen"]
"""Who computes all sequences of a packed row in one call: the package flash-attn, or torch itself."""
FlashImpl = Literal["FA3", "FA4"]
"""Kernels that torch calls for its own attention once they are activated, by torch's names."""
_IMPLS: dict[str, FlashImpl] = {"flash3": "FA3", "flash4": "FA4"}
_PACKAGES = {"FA3": "flash_attn_interface of flash-attn 3", "FA4": "flash-attn-4"}
CHUNK = 1024
"""Positions whose logits `model/loss/chunked_loss.py` has in memory at one time, in float32."""
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
    """The kernels of a model's layers. The default is used on CPUs and is bitwise identical to transformers.

    Attributes:
        transformer_impl: implementation of linear layers and norms.
        attention: implementation of core attention.
        is_fused: whether norms, activations and losses are fused, which rounds differently from transformers.
        has_grouped_experts: whether all experts of a rank are one product instead of one each.
        low_precision: precision of Transformer Engine's products; None for the model's own.
        is_deterministic: whether kernels are deterministic on GPUs as well.
        flash_impl: implementation called by torch's own attention; None: the one included in torch.
    """

    transformer_impl: TransformerImpl = "local"
    attention: Literal["sdpa", "flash_attn", "torch_varlen", "te"] = "sdpa"
    is_fused: bool = False
    has_grouped_experts: bool = False
    low_precision: LowPrecision | None = None
    is_deterministic: bool = False
    flash_impl: FlashImpl | None = None

    @property
    def described(self) -> dict[str, str]:
        """Return a description for reports."""
        layers = "Transformer Engine" if self.transformer_impl == "transformer_engine" else "torch"
        fused = "RMSNorm, SwiGLU, loss in chunks" if self.is_fused else "none"
        experts = "a product for all of a rank" if self.has_grouped_experts else "a product for each"
        products = "the model's"
        if low := self.low_precision:
            kept = f"the first {low.bf16_at_start} and last {low.bf16_at_end} layers in bfloat16"
            products = f"{low.described}; {kept}"
        attention = _WORDS[self.attention] + (f", by {_PACKAGES[self.flash_impl]}" if self.flash_impl else "")
        return {"layers": layers, "attention": attention, "fused": fused, "experts": experts, "precision": products}


@dataclass(frozen=True)
class Machine:
    """The capabilities of a machine."""

    is_cuda: bool = False
    has_transformer_engine: bool = False
    packed_kernel: PackedKernel | None = None
    flash_impls: tuple[FlashImpl, ...] = ()


def this_machine(is_cuda: bool) -> Machine:
    """Return the capabilities of this machine without importing packages."""
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    kernel: PackedKernel | None = "torch_varlen" if _torch_has("varlen.py", "window_size") else None
    if _has_file("flash_attn", "flash_attn_interface.py"):
        kernel = "flash_attn"
    return Machine(is_cuda, has_transformer_engine, kernel, tuple(_flash_impls()))


def _flash_impls() -> Iterator[FlashImpl]:
    if not _torch_has("_registry.py", "activate_flash_attention_impl"):
        return
    if importlib.util.find_spec("flash_attn_interface") is not None:
        yield "FA3"
    if _has_file("flash_attn", "cute/interface.py"):  # the package of flash-attn 2 too, and either may be alone
        yield "FA4"


def _has_file(package: str, path: str) -> bool:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return any((Path(place) / path).exists() for place in places or ())


def _torch_has(file: str, *words: str) -> bool:
    """Whether a file of torch.nn.attention has all these: first releases of it take less."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    path = Path(torch.origin).parent / "nn" / "attention" / file
    text = path.read_text() if path.exists() else ""
    return all(word in text for word in words)


def largest_head(architecture: Architecture | None) -> int:
    """Channels of the queries of a head; 0 where nothing is known of the model."""
    config = architecture.mcore_config() if architecture else {}
    if config.get("multi_latent_attention"):
        return config["qk_head_dim"] + config["qk_pos_emb_head_dim"]
    return config.get("kv_channels") or 0


def choose(args: KernelArgs, machine: Machine, *, is_float32: bool, head: int = 0) -> Kernels:
    """Return the kernels of a run; only this function resolves `auto`.

    Args:
        is_float32: whether the model is float32; otherwise bfloat16.
        head: `largest_head` of the model.

    Raises:
        OptionError: an option is not available here; there is no silent fallback.
    """
    if problems := list(kernel_problems(args, machine, is_float32=is_float32, head=head)):
        raise OptionError(problems)
    attention, flash_impl = "sdpa", _IMPLS.get(args.attention_backend)
    if args.attention_backend == "te":
        attention = "te"
    elif flash_impl:
        attention = "torch_varlen"
    elif machine.packed_kernel and not list(_without_packed_kernel(args, machine, is_float32, head)):
        attention = machine.packed_kernel if args.attention_backend in ("auto", "flash") else "sdpa"
    is_fused = machine.is_cuda and args.fused_kernels == "auto"
    is_grouped = is_fused and (args.transformer_impl == "transformer_engine" or not is_float32)  # torch's: 16 bits
    return Kernels(
        args.transformer_impl,
        attention,
        is_fused,
        has_grouped_experts=is_grouped,
        low_precision=low_precision_of(args),
        is_deterministic=args.deterministic_mode,
        flash_impl=flash_impl,
    )


def kernel_problems(args: KernelArgs, machine: Machine, *, is_float32: bool, head: int = 0) -> Iterator[Problem]:
    """Yield unavailable options; arguments as for `choose`."""
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
    yield from precision_problems(args, is_float32)
    if args.attention_backend in ("flash", *_IMPLS):
        yield from _without_packed_kernel(args, machine, is_float32, head)


def _without_packed_kernel(args: KernelArgs, machine: Machine, is_float32: bool, head: int) -> Iterator[Problem]:
    """Return why packed rows are not supported by one kernel."""
    flag, other = f"--attention_backend {args.attention_backend}", "use --attention_backend sdpa"
    if not machine.is_cuda:
        yield f"{flag}: such kernels run on NVIDIA GPUs, and torch finds none here", other
    elif (impl := _IMPLS.get(args.attention_backend)) and impl not in machine.flash_impls:
        yield f"{flag}: {_PACKAGES[impl]} is not installed, or torch cannot call it", other
    elif machine.packed_kernel is None:
        yield f"{flag}: neither flash-attn nor a torch with varlen_attn is installed", other
    if is_float32:
        yield f"{flag} with --torch_dtype float32: such kernels compute in 16 bits", other
    if head > LARGEST_HEAD:
        yield f"{flag}: a head of this model has {head} channels, such kernels take {LARGEST_HEAD}", other


def automatic(is_cuda: bool, *, is_float32: bool, head: int = 0) -> Kernels:
    """The kernels of what has no options for them."""
    return choose(_UNSET, this_machine(is_cuda), is_float32=is_float32, head=head)
