"""Choose the kernels of a model's layers from the options and the machine. This module does not import torch.

The choice is a `Kernels`; `model/layers/kernels.py` selects the corresponding modules. On a CPU only the default is
allowed; tests build other values directly.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftlite.args.config import Problem
from swiftlite.args.fields import KernelArgs, TransformerImpl
from swiftlite.base.errors import OptionError
from swiftlite.families.architecture import Architecture
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.plan.low_precision import LowPrecision, low_precision_of, precision_problems

PackedKernel = Literal["flash_attn", "torch_varlen"]
"""Implementation that computes all sequences of a packed row in one call: the package flash-attn or torch."""
FlashImpl = Literal["FA3", "FA4"]
"""Names in torch of kernels that torch's attention calls after they are activated."""
_IMPLS: dict[str, FlashImpl] = {"flash3": "FA3", "flash4": "FA4"}
_PACKAGES = {"FA3": "flash_attn_interface of flash-attn 3", "FA4": "flash-attn-4"}
CHUNK = 4096
"""Number of positions whose logits `model/loss/chunked_loss.py` has in memory at a time. Each chunk reads and writes
the whole float32 gradient of the output matrix."""
LARGEST_HEAD = 256
"""Maximum channels per head of packed kernels."""
LARGEST_CUDNN_HEAD = 128
"""Maximum channels per head for which cuDNN has a backward pass on all GPUs since Ampere."""
HOPPER = 9.0
"""Compute capability of the GPUs on which cuDNN's attention is about twice as fast as FlashAttention 2."""
_WORDS = {
    "sdpa": "torch's scaled_dot_product_attention, one call per sequence",
    "flash_attn": "flash-attn for packed rows, torch's scaled_dot_product_attention for padded ones",
    "torch_varlen": "torch's varlen_attn for packed rows, its scaled_dot_product_attention for padded ones",
    "te": "Transformer Engine",
}
_UNSET = KernelArgs()


@dataclass(frozen=True)
class Kernels:
    """The kernels of a model's layers. The default is used on CPUs and is bitwise identical to transformers.

    Attributes:
        transformer_impl: implementation of linear layers and norms.
        attention: implementation of core attention.
        is_fused: whether norms, activations and losses are fused, which rounds differently from transformers.
        has_grouped_experts: whether one grouped product computes all experts of a rank, instead of one product per
            expert.
        low_precision: precision of the products of linear layers; None for the model's precision.
        is_deterministic: whether kernels are deterministic on GPUs as well.
        flash_impl: implementation that torch's attention calls; None: the implementation included in torch.
        prefers_cudnn: whether torch's attention asks cuDNN first for long causal sequences.
        packs_with_cudnn: whether cuDNN also computes all sequences of a packed row in one call.
    """

    transformer_impl: TransformerImpl = "local"
    attention: Literal["sdpa", "flash_attn", "torch_varlen", "te"] = "sdpa"
    is_fused: bool = False
    has_grouped_experts: bool = False
    low_precision: LowPrecision | None = None
    is_deterministic: bool = False
    flash_impl: FlashImpl | None = None
    prefers_cudnn: bool = False
    packs_with_cudnn: bool = False

    def has_flash2(self, context_parallel_size: int) -> bool:
        """Return whether FlashAttention 2 computes attention on Hopper GPUs, where it is slow."""
        has_cudnn = self.prefers_cudnn and context_parallel_size == 1
        return not (has_cudnn or self.flash_impl or self.attention == "te")

    @property
    def described(self) -> dict[str, str]:
        """Return a description for reports."""
        described = {
            "layers": "torch",
            "attention": _WORDS[self.attention],
            "fused": "none",
            "experts": "one product per expert",
            "precision": "that of the model",
        }
        if self.transformer_impl == "transformer_engine":
            described["layers"] = "Transformer Engine"
        if self.flash_impl:
            described["attention"] += f", with {_PACKAGES[self.flash_impl]}"
        if self.packs_with_cudnn:
            described["attention"] += "; packed rows and long sequences with cuDNN"
        elif self.prefers_cudnn:
            described["attention"] += "; long sequences with cuDNN"
        if self.is_fused:
            described["fused"] = "RMSNorm, SwiGLU, loss in chunks"
        if self.has_grouped_experts:
            described["experts"] = "one product for all experts of a rank"
        if low := self.low_precision:
            kept = f"the first {low.bf16_at_start} and last {low.bf16_at_end} layers in bfloat16"
            described["precision"] = f"{low.described}; {kept}"
        return described


@dataclass(frozen=True)
class Machine:
    """The capabilities of a machine.

    Attributes:
        capability: compute capability of its GPUs; 0 if unknown.
        has_cudnn_frontend: whether nvidia-cudnn-frontend is installed, with attention for packed rows.
    """

    is_cuda: bool = False
    has_transformer_engine: bool = False
    packed_kernel: PackedKernel | None = None
    flash_impls: tuple[FlashImpl, ...] = ()
    capability: float = 0.0
    has_cudnn_frontend: bool = False


PLANNED_MACHINE = Machine(
    True, has_transformer_engine=True, packed_kernel="torch_varlen", flash_impls=("FA3", "FA4"), capability=HOPPER
)
"""The machine that `doctor --plan` assumes. On other GPUs than Hopper, `prefers_cudnn` changes no estimate."""


def this_machine(is_cuda: bool, capability: float = 0.0) -> Machine:
    """Return the capabilities of this machine without importing packages. The arguments are those of `Machine`."""
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    kernel: PackedKernel | None = None
    if _torch_has("varlen.py", "window_size"):
        kernel = "torch_varlen"
    if _has_file("flash_attn", "flash_attn_interface.py"):
        kernel = "flash_attn"
    has_cudnn_frontend = _has_file("cudnn", "sdpa/fwd/torch_op.py")
    return Machine(is_cuda, has_transformer_engine, kernel, tuple(_flash_impls()), capability, has_cudnn_frontend)


def _flash_impls() -> Iterator[FlashImpl]:
    if not _torch_has("_registry.py", "activate_flash_attention_impl"):
        return
    if importlib.util.find_spec("flash_attn_interface") is not None:
        yield "FA3"
    if _has_file("flash_attn", "cute/interface.py"):  # flash-attn 2 has the same package name
        yield "FA4"


def _has_file(package: str, path: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    return any((Path(place) / path).exists() for place in spec.submodule_search_locations or ())


def _torch_has(file: str, *words: str) -> bool:
    """Return whether a file of torch.nn.attention contains all `words`. Early releases of torch support less."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    path = Path(torch.origin).parent / "nn" / "attention" / file
    if not path.exists():
        return False
    text = path.read_text()
    return all(word in text for word in words)


def largest_head(architecture: Architecture | None) -> int:
    """Return the number of channels of a query head; 0 for an unknown model."""
    if architecture is None:
        return 0
    config = architecture.mcore_config()
    if config.get("multi_latent_attention"):
        return config["qk_head_dim"] + config["qk_pos_emb_head_dim"]
    sizes = [kind.head_dim for kind in architecture.attentions if isinstance(kind, GroupedQueryAttention)]
    return max(sizes, default=config.get("kv_channels") or 0)


def choose(args: KernelArgs, machine: Machine, *, is_float32: bool, head: int = 0) -> Kernels:
    """Return the kernels of a run. Only this function resolves the value "auto" of options.

    Args:
        is_float32: whether the model is float32; otherwise bfloat16.
        head: `largest_head` of the model.

    Raises:
        OptionError: an option is not available on this machine.
    """
    if problems := list(kernel_problems(args, machine, is_float32=is_float32, head=head)):
        raise OptionError(problems)
    attention, flash_impl = "sdpa", _IMPLS.get(args.attention_backend)
    if args.attention_backend == "te":
        attention = "te"
    elif flash_impl:
        attention = "torch_varlen"
    elif args.attention_backend in ("auto", "flash", "cudnn"):
        attention = _packed_kernel(args, machine, is_float32, head) or "sdpa"
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
        prefers_cudnn=_prefers_cudnn(args, machine, is_float32, head),
        # Not by default until it was measured, because other packages install nvidia-cudnn-frontend as well.
        packs_with_cudnn=args.attention_backend == "cudnn" and machine.has_cudnn_frontend,
    )


def _prefers_cudnn(args: KernelArgs, machine: Machine, is_float32: bool, head: int) -> bool:
    if args.attention_backend == "cudnn":
        return True
    is_hopper = machine.is_cuda and machine.capability == HOPPER
    is_supported = not is_float32 and 0 < head <= LARGEST_CUDNN_HEAD and not args.deterministic_mode
    return args.attention_backend == "auto" and args.fused_kernels == "auto" and is_hopper and is_supported


def _packed_kernel(args: KernelArgs, machine: Machine, is_float32: bool, head: int) -> PackedKernel | None:
    if any(_without_packed_kernel(args, machine, is_float32, head)):
        return None
    return machine.packed_kernel


def kernel_problems(args: KernelArgs, machine: Machine, *, is_float32: bool, head: int = 0) -> Iterator[Problem]:
    """Yield a problem for each option that this machine does not support. The arguments are those of `choose`."""
    if args.transformer_impl == "transformer_engine":
        flag = "--transformer_impl transformer_engine"
        if not machine.is_cuda:
            yield f"{flag} requires an NVIDIA GPU, and torch finds none", "remove it"
        elif not machine.has_transformer_engine:
            hint = "pip install --no-build-isolation 'transformer-engine[pytorch]', or remove it"
            yield f"{flag}: the package transformer-engine is not installed", hint
    elif args.attention_backend == "te":
        yield (
            "--attention_backend te requires --transformer_impl transformer_engine",
            "add --transformer_impl transformer_engine",
        )
    yield from precision_problems(args, is_float32)
    low = low_precision_of(args)
    if low and low.is_local and machine.is_cuda and 0 < machine.capability < low.capability:
        found = f"this GPU has {machine.capability}"
        yield f"{low.flag} requires compute capability {low.capability}, but {found}", f"remove {low.option}"
    if args.attention_backend in ("flash", *_IMPLS):
        yield from _without_packed_kernel(args, machine, is_float32, head)
    if args.attention_backend == "cudnn":
        yield from _without_cudnn(args, machine, is_float32, head)


def _without_cudnn(args: KernelArgs, machine: Machine, is_float32: bool, head: int) -> Iterator[Problem]:
    """Yield problems if cuDNN computes no attention of this run."""
    flag, other = "--attention_backend cudnn", "use --attention_backend sdpa"
    if not machine.is_cuda:
        yield f"{flag} requires an NVIDIA GPU, and torch finds none", other
    if is_float32:
        yield f"{flag} does not support --torch_dtype float32", other
    if head > LARGEST_CUDNN_HEAD:
        yield f"{flag} supports up to {LARGEST_CUDNN_HEAD} channels per head, but this model has {head}", other
    if args.deterministic_mode:
        yield f"{flag} is not deterministic", "remove --deterministic_mode, or use --attention_backend sdpa"


def _without_packed_kernel(args: KernelArgs, machine: Machine, is_float32: bool, head: int) -> Iterator[Problem]:
    """Yield problems if no kernel computes a packed row in one call."""
    flag, other = f"--attention_backend {args.attention_backend}", "use --attention_backend sdpa"
    if not machine.is_cuda:
        yield f"{flag} requires an NVIDIA GPU, and torch finds none", other
    elif (impl := _IMPLS.get(args.attention_backend)) and impl not in machine.flash_impls:
        yield f"{flag}: {_PACKAGES[impl]} is not installed, or this torch does not support it", other
    elif machine.packed_kernel is None:
        yield f"{flag} requires flash-attn or a torch with varlen_attn", other
    if is_float32:
        yield f"{flag} does not support --torch_dtype float32", other
    if head > LARGEST_HEAD:
        yield f"{flag} supports up to {LARGEST_HEAD} channels per head, but this model has {head}", other


def automatic(is_cuda: bool, *, is_float32: bool, head: int = 0) -> Kernels:
    """Return the kernels for commands that have no options for kernels."""
    return choose(_UNSET, this_machine(is_cuda), is_float32=is_float32, head=head)
