"""Print the Triton source that Inductor generates on an H100 for each compiled function, as JSON. No GPU is used.

`torch.compile` is replaced by a function that generates the source instead of running the kernel: the sizes that the
compiled function has marked as static are numbers in it, all others are arguments.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.cuda_emulated import library

library.load()  # before torch is imported

import torch  # noqa: E402
import torch.cuda  # noqa: E402

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=85_000_000_000,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)
for name, answer in {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_properties": PROPERTIES,
}.items():
    setattr(torch.cuda, name, lambda *args, answer=answer: answer)  # before Inductor keeps the functions

import triton  # noqa: E402
from torch._inductor.debug import DebugContext  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

SOURCES: dict[str, Any] = {}


class Driver:
    """What Inductor asks Triton's driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


def generating(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Return a function that stores the source for arguments of these sizes."""
    if function is None:
        return generating

    def generate(*args: Any) -> None:
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            static = getattr(tensor, "_dynamo_static_indices", set())
            sizes = []
            for dim, size in enumerate(tensor.shape):
                is_static = dim in static or size == 1  # torch makes a version of its own for size 1
                sizes.append(DimDynamic.STATIC if is_static else DimDynamic.DYNAMIC)
            on_device = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
            with mode:
                return torch.empty_strided(on_device.shape, on_device.stride(), dtype=tensor.dtype, device="cuda")

        tensors = [fake(given) if isinstance(given, torch.Tensor) else given for given in args]
        positions = [place for place, given in enumerate(tensors) if isinstance(given, torch.Tensor)]

        def of_tensors(*given: torch.Tensor) -> Any:
            whole = list(tensors)
            for place, tensor in zip(positions, given, strict=True):
                whole[place] = tensor
            return function(*whole)

        inputs = [tensors[place] for place in positions]
        with mode:
            graph = make_fx(of_tensors, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=shapes)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            source, _ = lowering.codegen()
        SOURCES[function.__name__] = getattr(source, "value", source)

    return generate


def main() -> None:
    triton.runtime.driver.set_active(Driver())  # pyright: ignore[reportArgumentType]: a part of a driver
    torch.compile = generating  # type: ignore[assignment]

    from swiftlite.model.attention import rope
    from swiftlite.model.layers import fp8, norm, residual

    def unmarked(*args: torch.Tensor) -> torch.Tensor:
        return rope.rotate(*args)

    heads = torch.empty(24, 2, 8, 64, dtype=torch.bfloat16)
    turns = torch.empty(2, 24, 1, 1, 64, dtype=torch.bfloat16)
    weight = torch.empty(64, dtype=torch.bfloat16)
    rope.fused_rotate(heads, turns)
    rope.fused_rotate_pairs(heads, turns)
    rope.fused_norm_and_rotate(heads, weight, turns, 1e-6, False)
    norm.fused_zero_centered_norm(torch.empty(24, 2, 512, dtype=torch.bfloat16), torch.empty(512), 1e-6)
    fp8.fused_quantize_rows(torch.empty(48, 512, dtype=torch.bfloat16), torch.float8_e4m3fn)
    hidden = torch.empty(24, 2, 512, dtype=torch.bfloat16)
    weight = torch.empty(512, dtype=torch.bfloat16)
    residual.fused_norm(hidden, weight, 1e-6, False)
    residual.fused_add_and_norm(hidden, hidden.clone(), weight, 1e-6, False)
    gradients = hidden.clone(), hidden.clone()
    residual.fused_norm_backward(*gradients, hidden, weight, 1e-6, False, True)
    torch.compile(unmarked, dynamic=True)(heads.clone(), turns.clone())
    print(json.dumps(SOURCES))


if __name__ == "__main__":
    main()
