"""Make `torch.cuda`, torch.distributed and compiled functions behave as on a machine with an H100."""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.traceback
import torch.nn.functional as F
from torch.optim.optimizer import _foreach_supported_types

from swiftlite.runtime import environment
from tests import flash_stand_ins
from tests.cuda_emulated import record, tensor
from tests.cuda_emulated.record import RECORDER
from tests.cuda_emulated.tensor import CudaTensor

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=85_000_000_000,
    multi_processor_count=132,
    uuid="00000000-0000-0000-0000-000000000000",
)
CUDA_TYPE = 1  # c10::DeviceType::CUDA


class Stream(torch.Stream):
    """The only stream of the emulated device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Stream":
        return super().__new__(cls, stream_id=0, device_index=0, device_type=CUDA_TYPE)

    cuda_stream = 0

    def synchronize(self) -> None:
        synchronize()

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> "Event":
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event that has already occurred."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


STREAM = Stream()


def synchronize(device: Any = None) -> None:
    RECORDER.note("wait", "torch.cuda.synchronize")


def answer_for_cuda() -> None:
    """Replace functions of torch.cuda."""
    cuda: Any = torch.cuda
    cuda._initialized = True
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    cuda.default_generators = (tensor.GENERATOR,)
    answers = {
        "is_available": True,
        "is_built": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": PROPERTIES.name,
        "get_device_capability": (9, 0),
        "get_device_properties": PROPERTIES,
        "is_bf16_supported": True,
        "current_stream": STREAM,
        "default_stream": STREAM,
        "is_current_stream_capturing": False,
        "max_memory_allocated": 1_000_000_000,
        "memory_allocated": 1_000_000_000,
        "memory_reserved": 1_000_000_000,
        "max_memory_reserved": 1_000_000_000,
        "mem_get_info": (80_000_000_000, 85_000_000_000),
    }
    for name, value in answers.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    cuda.memory_stats = lambda device=None: {}
    for name in ("set_device", "set_stream", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.synchronize = synchronize
    cuda.nccl.version = lambda: (2, 27, 3)
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.device = lambda device: contextlib.nullcontext(device)
    cuda.nvtx = SimpleNamespace(range_push=lambda *a: None, range_pop=lambda: None, range=contextlib.nullcontext)


def answer_for_nccl() -> None:
    """Replace functions of torch.distributed, so that gloo runs instead of NCCL, but reports the name NCCL."""
    distributed: Any = dist
    c10d: Any = dist.distributed_c10d
    init, new_group, get_backend = c10d.init_process_group, c10d.new_group, c10d.get_backend
    names: dict[Any, str] = {}

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo", *args, **kwargs)
        names.clear()
        names[dist.group.WORLD] = backend or "nccl"

    @functools.wraps(new_group)
    def new(*args: Any, backend: str | None = None, pg_options: Any = None, device_id: Any = None, **kwargs: Any):
        group = new_group(*args, backend="gloo", **kwargs)
        names[group] = backend or names[dist.group.WORLD]
        return group

    @functools.wraps(get_backend)
    def backend_of(group: Any = None) -> str:
        return names.get(group or dist.group.WORLD, "nccl")

    for module in (distributed, c10d):
        module.init_process_group, module.new_group, module.get_backend = init_process_group, new, backend_of


class _Fused(torch.autograd.Function):
    """A function of tensors that counts as one kernel in the forward and one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Any, *inputs: Any) -> Any:
        ctx.name = name
        with torch.enable_grad(), RECORDER.one_kernel(name):
            ctx.inputs = [
                given.detach().requires_grad_(given.requires_grad) if isinstance(given, torch.Tensor) else given
                for given in inputs
            ]
            ctx.outputs = function(*ctx.inputs)
        outputs = ctx.outputs
        if isinstance(outputs, torch.Tensor):
            return outputs.detach()
        return tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        outputs = ctx.outputs if isinstance(ctx.outputs, (tuple, list)) else (ctx.outputs,)
        known = zip(outputs, grads, strict=True)
        of_outputs = [(out, grad) for out, grad in known if out.requires_grad and grad is not None]
        wanted = [given for given in ctx.inputs if isinstance(given, torch.Tensor) and given.requires_grad]
        with RECORDER.one_kernel(f"{ctx.name} backward"):
            outputs, grads = zip(*of_outputs, strict=True)
            found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
            # With the strides of the inputs, like those of the kernels (`empty_like` in flash_api.cpp).
            pairs = zip(wanted, found, strict=True)
            found = [grad if grad is None else torch.empty_like(like).copy_(grad) for like, grad in pairs]
        of_inputs = dict(zip(map(id, wanted), found, strict=True))
        return None, None, *(of_inputs.get(id(given)) for given in ctx.inputs)


def fused(function: Any, name: str) -> Any:
    """Return `function`, counted as the compiler would fuse it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(given, CudaTensor) for given in args):
            return function(*args, **kwargs)
        learns = torch.is_grad_enabled() and any(given.requires_grad for given in args if isinstance(given, CudaTensor))
        if not learns:
            with RECORDER.one_kernel(name):
                return function(*args, **kwargs)
        inner = functools.partial(function, **kwargs) if kwargs else function
        return _Fused.apply(name, inner, *args)

    return call


def answer_for_compilers() -> None:
    """Let compiled functions run without compilation; see `fused`."""

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda model: compile(model, **options)
        return fused(model, f"compiled {getattr(model, '__name__', 'function')}")

    torch.compile = compile  # type: ignore[assignment]


def answer_for_the_driver() -> None:
    """Make rules find a GPU. They must be imported later."""
    environment.sees_gpu = lambda: True  # type: ignore[assignment]


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute attention, counted as one kernel per direction, in float32 with one rounding.

    The dimensions of the result are in memory in the order of those of the query, as those of FlashAttention
    (`empty_like` in flash_api.cpp) and cuDNN (`alloc_with_matching_layout` in MHA.cpp).
    """
    repeats = query.size(1) // key.size(1) if enable_gqa else 1
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    place = [order.index(dim) for dim in range(query.dim())]

    def compute(query, key, value, *mask):
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        wide = [given.to(torch.promote_types(query.dtype, torch.float32)) for given in (query, key, value)]
        out = _sdpa(*wide, mask[0] if mask else None, dropout_p, is_causal, scale=scale)  # type: ignore[call-arg]
        return out.to(query.dtype).permute(order).contiguous().permute(place)

    mask = () if attn_mask is None else (attn_mask,)
    return fused(compute, "scaled_dot_product_attention")(query, key, value, *mask)


_sdpa = F.scaled_dot_product_attention


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """Compute RMSNorm, counted as one kernel per direction, in float32 as torch does
    (native/cuda/layer_norm_kernel.cu).
    """

    def compute(hidden, *weight):
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + (eps or torch.finfo(hidden.dtype).eps))
        return (wide * weight[0].float() if weight else wide).to(hidden.dtype)

    return fused(compute, "rms_norm")(input, *(() if weight is None else (weight,)))


def install() -> None:
    """Install all replacements in this process, permanently. `library.load` must have been called before."""
    assert torch.accelerator.current_accelerator() == torch.device("cuda"), "runtime.cpp was not loaded before torch"
    answer_for_cuda()
    answer_for_nccl()
    answer_for_compilers()
    answer_for_the_driver()
    tensor.REPLACED[_sdpa] = attend
    tensor.REPLACED[F.rms_norm] = rms_norm
    torch.Generator = tensor.Generator  # type: ignore[misc]
    # torch.tensor(numbers, device="cuda") makes a tensor on the host and copies it; of itself torch copies below all
    # modes.
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    # torch's optimizers take their fused ways for tensors of these types.
    _foreach_supported_types.append(CudaTensor)
    # Autograd keeps the line that made each node: what waits in a backward pass is said to be that line's.
    torch.fx.traceback.format_stack = record.stack_for_autograd  # type: ignore[assignment]
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    global _library
    _library = flash_stand_ins.torch_on_cpu()
    for mode in (tensor.OnDevice(), tensor.Functions()):
        mode.__enter__()


_library: Any = None
